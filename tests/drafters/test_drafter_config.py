"""Whole configs: the reference checkpoints, the published ones, and GGUF against Hugging Face."""

import json
from dataclasses import fields, replace

import pytest
from gguf import GGUFReader
from gguf_craft import GGUF_DRAFTERS
from safetensors import safe_open

from torch_dflash.drafters.attention import LayerAttention
from torch_dflash.drafters.config import DrafterConfig
from torch_dflash.drafters.from_gguf import config_from_gguf
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.names import logical_names
from torch_dflash.drafters.rope import RopeConfig

DFLASH = [
    "d1_full",
    "d1_mha_bias_eps",
    "d1_mixed_causal",
    "d1_mixed_legacy",
    "d1_mixed_noncausal",
    "d1_mqa",
    "d1_scaled",
    "d1_swa_legacy_causal",
    "d1_swa_noncausal",
    "d1_yarn",
    "d1_yarn_legacy_type",
    "d1_yarn_mscale_notrunc",
    "d2_full",
    "d2_group1",
    "d2_k1",
    "d2_mixed_legacy",
    "d2_scaled",
    "d2_swa_noncausal",
    "d2_taps1_groupH",
    "d2_taps3",
    "d2_yarn",
]
DSPARK = [
    "conf_hidden_only",
    "gated",
    "logit_scale",
    "no_confidence",
    "reduced_vocab",
    "reduced_vocab_bonus",
    "rnn",
    "vanilla_anchor",
    "vanilla_bonus",
]


def from_folder(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    names = logical_names("model.safetensors", shapes, gguf=False)
    config = json.loads((folder / "config.json").read_text())
    return config_from_hf(config, {k: shapes[v] for k, v in names.items()})


def from_file(path):
    reader = GGUFReader(path)
    meta = {k: f.contents() for k, f in reader.fields.items()}
    shapes = {t.name: tuple(reversed(t.shape.tolist())) for t in reader.tensors}
    names = logical_names(path.name, shapes, gguf=True)
    return config_from_gguf(meta, {k: shapes[v] for k, v in names.items()})


@pytest.mark.parametrize("name", DFLASH)
def test_reference_dflash(fixtures, name):
    config = from_folder(fixtures / "dflash" / name)
    assert config.kind == ("dflash2" if name.startswith("d2") else "dflash")
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (48, 16, 64)
    assert config.target_layer_ids == (1, 4, 9)
    assert (config.mask_token_id, config.block_size, config.max_draft_tokens) == (7, 8, 7)
    assert not config.sample_from_anchor
    want = {
        "d1_swa_legacy_causal": [(6, True)] * 2,
        "d1_swa_noncausal": [(6, False)] * 2,
        "d1_mixed_legacy": [(6, True), (None, False)],
        "d1_mixed_noncausal": [(None, False), (6, False)],
        "d1_mixed_causal": [(None, True), (6, True)],
        "d2_mixed_legacy": [(6, True), (None, False)],
        "d2_swa_noncausal": [(6, False)] * 2,
    }.get(name, [(None, False)] * config.num_layers)
    assert config.layers == tuple(LayerAttention(*w) for w in want)
    assert (config.rope.type == "yarn") == ("yarn" in name)
    assert config.attention_bias == (name == "d1_mha_bias_eps")


def test_reference_dflash_details(fixtures):
    def load(name):
        return from_folder(fixtures / "dflash" / name)

    assert load("d1_mha_bias_eps").rms_norm_eps == 1e-2
    assert load("d1_mha_bias_eps").num_kv_heads == 4
    assert load("d1_mqa").num_kv_heads == 1
    scaled = load("d1_scaled")
    assert scaled.output_multiplier == 0.3
    assert scaled.final_logit_softcapping == 2.0
    assert scaled.input_embedding_scale == 0.5
    assert load("d1_yarn").rope == RopeConfig(
        1e4, 16, "yarn", 8.0, 64, beta_fast=4.0, beta_slow=0.25
    )
    legacy = load("d1_yarn_legacy_type").rope
    assert (legacy.type, legacy.factor) == ("yarn", 8.0)
    mscale = load("d1_yarn_mscale_notrunc").rope
    assert mscale.mscale is not None
    assert not mscale.truncate
    assert (load("d2_taps3").conv_kernel_size, load("d2_taps1_groupH").conv_group_size) == (3, 48)
    assert load("d2_group1").conv_group_size == 1
    assert load("d2_k1").selector_top_k == 1


@pytest.mark.parametrize("name", DSPARK)
def test_reference_dspark(fixtures, name):
    config = from_folder(fixtures / "dspark" / name)
    assert config.kind == "dspark"
    assert config.markov_rank == 10
    assert config.markov_head_type == (name if name in ("gated", "rnn") else "vanilla")
    assert config.sample_from_anchor == ("bonus" not in name)
    assert config.max_draft_tokens == (6 if "bonus" in name else 7)
    assert config.draft_vocab_size == (36 if "reduced" in name else 64)
    assert config.logit_scale == (0.7 if name == "logit_scale" else 1.0)
    absent = name in ("no_confidence", "reduced_vocab_bonus")
    wide = None if absent else "hidden+markov"
    assert config.confidence == ("hidden" if name == "conf_hidden_only" else wide)


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_reference_loop(fixtures, name):
    config = from_folder(fixtures / "loop" / name)
    assert config.kind == name
    assert config.layers == (LayerAttention(24, False),) * 2


@pytest.mark.parametrize("name", GGUF_DRAFTERS)
def test_gguf_says_what_hugging_face_says(fixtures, name):
    """The files of upstream's converter resolve to the config of the checkpoint they came from."""
    hf = from_folder(fixtures / "gguf" / name)
    got = from_file(fixtures / "gguf" / name / "model.gguf")
    assert got.num_target_layers is None  # has no key
    hf = replace(hf, num_target_layers=None, rope_is_neox=True)  # the converter reordered the rows
    for f in fields(DrafterConfig):
        if f.compare:
            a, b = getattr(got, f.name), getattr(hf, f.name)
            # float32 in the file
            assert a == (pytest.approx(b, rel=6e-8) if isinstance(b, float) else b), f.name
    assert not got.notes
