"""Drafters as Hugging Face folders: what comes back equals what went in, bit for bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf_craft import GGUF_DRAFTERS
from safetensors.torch import load_file

from torch_dflash.convert import prepare_drafter
from torch_dflash.drafters.attention import LayerAttention
from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.rope import RopeConfig, magnitude
from torch_dflash.drafters.to_hf import hf_config, hf_notes, hf_tensors, write_folder
from torch_dflash.fields import CheckpointError
from torch_dflash.load import ASSETS
from torch_dflash.testing.tiny import tiny_drafter

HF_CASES = [
    "d1_full",
    "d1_mha_bias_eps",
    "d1_mixed_causal",
    "d1_mixed_legacy",
    "d1_swa_noncausal",
    "d1_scaled",
    "d1_yarn",
    "d1_yarn_legacy_type",
    "d1_yarn_mscale_notrunc",
    "d2_taps3",
    "d2_scaled",
    "d2_group1",
]
DSPARK_CASES = [
    "conf_hidden_only",
    "gated",
    "logit_scale",
    "no_confidence",
    "reduced_vocab",
    "reduced_vocab_bonus",
    "rnn",
    "vanilla_bonus",
]


def equal(a, b):
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(b.tensors[name].to_dense(), tensor.to_dense()), name


@pytest.mark.parametrize(
    "case",
    [f"dflash/{c}" for c in HF_CASES] + [f"dspark/{c}" for c in DSPARK_CASES],
)
def test_folder_to_folder(fixtures, tmp_path, case):
    source = read_checkpoint(fixtures / case)
    write_folder(tmp_path / "x", source, num_target_layers=12)
    again = read_checkpoint(tmp_path / "x")
    depth = source.config.num_target_layers or 12
    want = replace(source.config, num_target_layers=depth)
    if source.config.context_length is None:
        want = replace(want, context_length=again.config.context_length)
    assert again.config == want
    assert again.config.notes == () or "neither is_causal" in again.config.notes[0]
    equal(source, again)


@pytest.mark.parametrize("case", GGUF_DRAFTERS)
def test_gguf_to_folder(fixtures, tmp_path, case):
    """llama.cpp's converter and back: the published config and the published bits."""
    folder = fixtures / "gguf" / case
    prepare_drafter(folder / "model.gguf", tmp_path / "x", target=_target(tmp_path, folder))
    source, again = read_checkpoint(folder), read_checkpoint(tmp_path / "x")
    want, got = source.config, again.config
    ours = json.loads((tmp_path / "x/config.json").read_text())
    assert got == replace(want, num_target_layers=got.num_target_layers)
    assert ours["torch_dtype"] == "bfloat16"
    equal(source, again)


def _target(tmp_path, folder):
    """A target's config with the drafter's own width and vocabulary."""
    c = read_checkpoint(folder).config
    path = tmp_path / "target"
    path.mkdir()
    text = {"hidden_size": c.target_hidden_size, "vocab_size": c.vocab_size}
    text["num_hidden_layers"] = max(c.target_layer_ids) + 3
    (path / "config.json").write_text(json.dumps({"text_config": text}))
    return path


def test_keys_that_engines_read(tmp_path):
    """vLLM reads DSpark's keys at the top level and refuses sample_from_anchor in dflash_config."""
    config = read_checkpoint(tiny_drafter(tmp_path / "d", "dspark", block_size=7)).config
    got = hf_config(config)
    assert got["architectures"] == ["Qwen3DSparkModel"]
    assert got["block_size"] == 7
    assert got["markov_rank"] == 16
    assert got["enable_confidence_head"] is True
    assert got["confidence_head_with_markov"] is True
    assert got["sample_from_anchor"] is True
    assert got["num_target_layers"] == 6
    inner = got["dflash_config"]
    assert "sample_from_anchor" not in inner
    assert inner["target_layer_ids"] == [0, 2, 4]
    assert inner["mask_token_id"] == 511
    assert "confidence_head_with_markov" not in hf_config(replace(config, confidence=None))
    two = hf_config(read_checkpoint(tiny_drafter(tmp_path / "d2", "dflash2")).config)
    assert {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16}.items() <= (
        two["dflash_config"].items()
    )
    scaled = hf_config(
        replace(read_checkpoint(tmp_path / "d2").config, kind="dflash", output_multiplier=0.196)
    )
    assert scaled["logit_scale"] == scaled["dflash_config"]["output_multiplier"] == 0.196


def test_float32_comes_back_as_it_was_written(tmp_path):
    config = read_checkpoint(tiny_drafter(tmp_path / "d", "dflash")).config
    yarn = RopeConfig(  # the factor as a GGUF gives it back
        theta=1e7,
        rotary_dim=64,
        type="yarn",
        factor=32.0,
        original_max_position_embeddings=8192,
        attention_factor=magnitude(32.0) * float(np.float32(1.1 / magnitude(32.0))),
    )
    got = hf_config(replace(config, rms_norm_eps=9.999999974752427e-07, rope=yarn))
    assert got["rms_norm_eps"] == 1e-6
    assert got["rope_parameters"]["attention_factor"] == 1.1
    assert hf_config(replace(config, rms_norm_eps=1.23456789e-6))["rms_norm_eps"] == 1.23456789e-6


def test_partial_rotary_factor_survives_the_integer_part(tmp_path):
    config = read_checkpoint(tiny_drafter(tmp_path / "d", "dflash")).config
    for head_dim in (64, 80, 96, 112, 192, 200):
        for rotary in range(2, head_dim + 1, 2):
            c = replace(config, head_dim=head_dim, rope=RopeConfig(theta=1e4, rotary_dim=rotary))
            part = hf_config(c)["rope_parameters"].get("partial_rotary_factor", 1.0)
            assert int(head_dim * part) == rotary


def test_vectors_are_rounded_only_without_loss(tmp_path):
    folder = tiny_drafter(tmp_path / "d", "dflash2")
    checkpoint = read_checkpoint(folder)
    norm = torch.rand(256) + 0.5  # not exact in bfloat16
    tensors = {**checkpoint.tensors}
    tensors["norm.weight"] = type(tensors["norm.weight"]).from_tensor(norm)
    got = hf_tensors(replace(checkpoint, tensors=tensors), torch.bfloat16)
    assert got["norm.weight"].type_name == "F32"
    assert torch.equal(got["norm.weight"].to_dense(), norm)
    assert got["hidden_norm.weight"].type_name == "BF16"
    assert got["fc.weight"] is checkpoint.tensors["fc.weight"]  # nothing is copied
    write_folder(tmp_path / "f", checkpoint, dtype=torch.float32)
    stored, original = (
        load_file(tmp_path / "f/model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    assert {t.dtype for t in stored.values()} == {torch.float32}
    assert all(torch.equal(stored[n], t.float()) for n, t in original.items())


def test_f16_that_would_overflow(tmp_path):
    folder = tiny_drafter(tmp_path / "d", "dflash")
    checkpoint = read_checkpoint(folder)
    checkpoint.tensors["fc.weight"].to_dense()[3, 5] = 1e5  # a private copy of the page
    with pytest.raises(ValueError, match=r"'fc.weight': values must be below 65520 for F16"):
        write_folder(tmp_path / "x", checkpoint, dtype=torch.float16)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_progress_covers_every_byte(tmp_path):
    seen = []
    prepare_drafter(
        tiny_drafter(tmp_path / "d", "dflash"), tmp_path / "x", progress=lambda *a: seen.append(a)
    )
    size = sum(t.nbytes for t in read_checkpoint(tmp_path / "d").tensors.values())
    assert seen[-1][1:] == (size, size)
    assert {name for name, _, _ in seen} == {*read_checkpoint(tmp_path / "d").tensors}


def test_what_is_refused(fixtures, tmp_path):
    checkpoint = read_checkpoint(fixtures / "gguf/dflash")
    with pytest.raises(CheckpointError, match=r"num_target_layers must be known.*pass the target"):
        write_folder(
            tmp_path / "x",
            replace(checkpoint, config=replace(checkpoint.config, num_target_layers=None)),
        )
    layers = (LayerAttention(None, True), LayerAttention(8, False))
    for change, message in (
        (
            {"layers": layers},
            r"layers, got causal \[True, False\] with sliding \[False, Tr",
        ),
        ({"layers": (LayerAttention(8, True), LayerAttention(4, True))}, r"window, got \[4, 8\]"),
        (
            {"rope": RopeConfig(theta=1e4, rotary_dim=16, freq_factors=(1.0,) * 8)},
            "no place for frequency factors",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            hf_config(replace(checkpoint.config, **change), num_target_layers=9)
    with pytest.raises(ValueError, match=r"dtype must be .*, got torch.int8"):
        hf_tensors(checkpoint, torch.int8)
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    with pytest.raises(FileExistsError, match="must not exist yet or be empty"):
        write_folder(tmp_path / "used", checkpoint, num_target_layers=9)
    with pytest.raises(FileNotFoundError, match=r"absent: must be a folder to write x to"):
        write_folder(tmp_path / "absent/x", checkpoint, num_target_layers=9)
    target = _target(tmp_path, fixtures / "gguf/dflash")
    text = json.loads((target / "config.json").read_text())
    text["text_config"] |= {"hidden_size": 999, "num_hidden_layers": 3}
    (target / "config.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match=r"hidden size .*target has 999|allow 0..1|below 2"):
        prepare_drafter(fixtures / "gguf/dflash/model.gguf", tmp_path / "x", target=target)
    assert {p.name for p in tmp_path.iterdir()} == {"used", "target"}


def test_notes(fixtures):
    c = read_checkpoint(fixtures / "dflash/d1_scaled").config
    assert hf_notes(c) == [
        "vLLM without the torch-dflash plugin ignores final_logit_softcapping in a DFlash drafter",
        "vLLM without the torch-dflash plugin ignores input_embedding_scale in a DFlash drafter",
    ]
    assert (
        "vanilla Markov heads only, not rnn"
        in hf_notes(read_checkpoint(fixtures / "dspark/rnn").config)[0]
    )
    assert hf_notes(replace(c, kind="dflash2", context_length=None)) == [
        "max_position_embeddings: the drafter does not say, 32768 is written, and engines refuse "
        "longer texts"
    ]
    part = read_checkpoint(fixtures / "gguf/dflash_partial_rotary").config
    assert "and SGLang rotate whole heads and ignore partial_rotary_factor" in hf_notes(part)[0]


@pytest.mark.parametrize(
    "case, said",
    [
        ("dflash/d1_swa_noncausal", ["SGLang takes exactly the sliding layers as causal"]),
        ("dflash/d1_mixed_legacy", []),
        ("dspark/reduced_vocab", ["SGLang drafts with the target's whole head"]),
        ("dspark/reduced_vocab_bonus", ["SGLang drafts with", "SGLang reads drafts from the anch"]),
    ],
)
def test_what_sglang_leaves_out(fixtures, case, said):
    notes = [n for n in hf_notes(read_checkpoint(fixtures / case).config) if "SGLang" in n]
    assert len(notes) == len(said)
    assert all(note.startswith(text) for note, text in zip(notes, said, strict=True))


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_zlab_loads_what_is_prepared(tmp_path, name):
    """An embedded GGUF drafter, every value of it, in z-lab's package; DSpark's backbone too."""
    zlab = pytest.importorskip("dflash.model", reason="z-lab's dflash 0.1.0 is not installed")
    source, folder = ASSETS / f"{name}.gguf", tmp_path / name
    prepare_drafter(source, folder, target=ASSETS / "target.gguf", dtype=torch.float32)
    cls = zlab.DFlash2DraftModel if name == "dflash2" else zlab.DFlashDraftModel
    model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    heads = {"markov_head.", "confidence_head."} if name == "dspark" else set()
    assert not info["missing_keys"]
    assert {k.split(".")[0] + "." for k in info["unexpected_keys"]} == heads
    assert not info["mismatched_keys"]
    loaded = model.state_dict()
    for logical, tensor in read_checkpoint(source).tensors.items():
        if not logical.startswith(("markov_head", "confidence_head")):
            key = logical if logical in loaded else f"{logical}.weight"
            assert torch.equal(loaded[key], tensor.to_dense().float()), logical
    config = read_checkpoint(folder).config
    assert int(model.block_size) == config.block_size
    assert int(model.mask_token_id) == config.mask_token_id
    assert [*model.target_layer_ids] == [*config.target_layer_ids]
