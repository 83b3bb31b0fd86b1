"""Published configs with their exact sizes, and the rules that configs follow."""

from copy import deepcopy
from dataclasses import fields

import pytest

from torch_dflash.drafters.attention import LayerAttention
from torch_dflash.drafters.config import DrafterConfig, check_against_target
from torch_dflash.drafters.from_gguf import config_from_gguf
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.rope import RopeConfig
from torch_dflash.drafters.tensors import tensor_table
from torch_dflash.fields import CheckpointError
from torch_dflash.testing.published import DFLASH2_27B


@pytest.fixture
def dflash2_27b():
    """z-lab/Qwen3.8-27B-DFlash2."""
    return deepcopy(DFLASH2_27B)


@pytest.fixture
def dspark_27b():
    """RadixArk/Qwen3.8-27B-DSpark v1."""
    return {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "block_size": 7,
        "hidden_size": 5120,
        "intermediate_size": 10240,
        "num_hidden_layers": 5,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 248320,
        "num_target_layers": 64,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_theta": 1e7,
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "enable_confidence_head": True,
        "dflash_config": {
            "target_layer_ids": [4, 16, 28, 40, 52],
            "mask_token_id": 248077,
            "markov_rank": 256,
            "projector_type": "dspark",
        },
    }


def test_published_dflash2(dflash2_27b):
    config = config_from_hf(dflash2_27b)
    table = tensor_table(config)
    assert len(table.required) == 3 + 11 * 5 + 4 * 5 + 3 == 81
    assert table.num_parameters == 1_924_404_480
    assert config.layers == (LayerAttention(2048, False),) * 5
    assert (config.kind, config.max_draft_tokens) == ("dflash2", 7)
    assert config.rope == RopeConfig(1e7, 128)
    assert config.notes == ()


def test_published_dspark(dspark_27b):
    config = config_from_hf(dspark_27b)
    table = tensor_table(config)
    bias = table.optional["confidence_head.proj.bias"]
    assert len(table.required) + 1 == 3 + 11 * 5 + 2 + 2 == 62
    assert table.num_parameters + bias[0] == 1_359_284_737
    assert config.layers == (LayerAttention(None, False),) * 5
    assert config.rope.attention_scaling == pytest.approx(1.3465735902799727)
    assert config.sample_from_anchor
    assert config.max_draft_tokens == 7
    assert config.confidence == "hidden+markov"
    assert table.required["confidence_head.proj.weight"] == (1, 5376)


def test_published_dflash(dflash2_27b):
    """z-lab/Qwen3.6-27B-DFlash: mixed windows, causal by the legacy rule."""
    config = dflash2_27b | {
        "architectures": ["DFlashDraftModel"],
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "is_causal": None,
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 248070,
            "target_layer_ids": [1, 16, 31, 46, 61],
        },
    }
    config = config_from_hf(config)
    assert config.kind == "dflash"
    assert config.layers == (LayerAttention(2048, True),) * 4 + (LayerAttention(None, False),)
    assert config.max_draft_tokens == 15
    assert len(tensor_table(config).required) == 3 + 11 * 5 == 58


def test_row_27_block_seven_is_seven_drafts(dspark_27b):
    assert config_from_hf(dspark_27b).max_draft_tokens == 7
    for change in ({"sample_from_anchor": False}, {"dspark_bonus_anchor": True}):
        assert config_from_hf(dspark_27b | change).max_draft_tokens == 6


def test_row_04_mask_token_of_the_drafter(hf, gguf, shapes_of):
    config = hf(d_mask_token_id=9)
    config["mask_token_id"] = 7
    config = config_from_hf(config)
    assert config.mask_token_id == 9
    assert config.sources["mask_token_id"] == "dflash_config.mask_token_id"
    assert any("wins over mask_token_id = 7" in n for n in config.notes)
    meta = gguf(mask_token_id=9, tokenizer__ggml__mask_token_id=7)
    assert config_from_gguf(meta, shapes_of(hf())).mask_token_id == 9


def test_row_05_mask_token_zero(hf, gguf, shapes_of):
    assert config_from_hf(hf(d_mask_token_id=0)).mask_token_id == 0
    shapes = shapes_of(hf())
    for keys in (
        {"tokenizer__ggml__mask_token_id": 0},
        {"dflash__mask_token_id": 0},
        {"mask_token_id": 0},
    ):
        config = config_from_gguf(gguf(**keys), shapes)
        assert config.mask_token_id == 0
    with pytest.raises(CheckpointError, match="mask_token_id must be present"):
        config_from_gguf(gguf(tokenizer__ggml__mask_token_id=None), shapes)


def test_row_55_radixark_config_is_dense_dspark(dspark_27b):
    assert config_from_hf(dspark_27b).kind == "dspark"
    assert config_from_hf(dspark_27b | {"architectures": ["Qwen3DSparkModel"]}).kind == "dspark"
    for model_type in ("deepseek_v4", "deepseek_v41"):
        with pytest.raises(CheckpointError, match="DeepSeek-V4 DSpark"):
            config_from_hf(dspark_27b | {"model_type": model_type})


def test_row_56_rank_of_the_tensors_wins(hf, shapes_of):
    config = hf("dspark")
    shapes = shapes_of(config)
    config["dflash_config"]["markov_rank"] = 12
    resolved = config_from_hf(config, shapes)
    assert resolved.markov_rank == 10
    assert any("markov_rank" in n and "12" in n for n in resolved.notes)
    shapes["markov_head.markov_w2.weight"] = (32, 12)
    with pytest.raises(
        CheckpointError, match=r"markov_w2.weight' must be \[32, 10\], got \[32, 12"
    ):
        config_from_hf(config, shapes)


def test_row_53_attention_biases(hf, shapes_of, gguf):
    config = hf(attention_bias=True)
    shapes = shapes_of(config)
    assert shapes["layers.1.self_attn.q_proj.bias"] == (64,)
    assert shapes["layers.1.self_attn.o_proj.bias"] == (64,)
    assert len(shapes) == 3 + 15 * 2
    assert config_from_hf(config, shapes).attention_bias
    config["attention_bias"] = None  # the tensors say it as well
    assert config_from_hf(config, shapes).attention_bias
    assert config_from_gguf(gguf(), shapes).attention_bias
    with pytest.raises(
        CheckpointError, match=r"attention_bias is true, so tensor .* must be there"
    ):
        config_from_hf(hf(attention_bias=True), shapes_of(hf()))


def test_describe_names_every_field_and_its_source(hf, shapes_of):
    config = config_from_hf(
        hf("dflash2", d_block_size=None, block_size=4), shapes_of(hf("dflash2"))
    )
    rows = {name: (value, source) for name, value, source in config.describe()}
    assert rows["block_size"] == (4, "block_size")
    assert rows["selector_rank"] == (6, "dflash_config.selector_rank")
    assert rows["kind"] == ("dflash2", "tensors")
    assert rows["rope.theta"] == (1e7, "rope_parameters.rope_theta")
    assert rows["rms_norm_eps"][1] == "rms_norm_eps"
    assert rows["value_scale"] == (1.0, "default")
    assert {f.name for f in fields(DrafterConfig)} - set(rows) == {"rope", "sources", "notes"}


class Target:
    hidden_size, vocab_size, num_layers = 64, 32, 12


def test_row_43_drafter_of_another_target(hf):
    config = config_from_hf(hf())
    check_against_target(config, Target(), "x")
    for name, value, message in (
        ("hidden_size", 128, "hidden size 64, target has 128"),
        ("vocab_size", 33, "vocabulary 32, target has 33"),
        ("num_layers", 24, "target depth 12, target has 24"),
        ("num_layers", 10, r"target_layer_ids \[1, 4, 9\], the target's 10 layers allow 0..8"),
        ("vocab_size", 9, "mask_token_id 9, target has 9 tokens"),
    ):
        target = Target()
        setattr(target, name, value)
        with pytest.raises(CheckpointError, match=f"must match the target, got .*{message}"):
            check_against_target(config, target, "x")


def test_context_without_fc(hf, shapes_of):
    """use_aux_hidden_state false: the captured layer is the context, so there is one of them."""
    config = hf(d_use_aux_hidden_state=False, d_target_layer_ids=[4])
    shapes = shapes_of(config)
    assert "fc.weight" not in shapes
    resolved = config_from_hf(config, shapes)
    assert (resolved.use_aux_hidden_state, resolved.target_hidden_columns) == (False, 64)
    config["dflash_config"]["target_layer_ids"] = [1, 4]
    with pytest.raises(CheckpointError, match="must fill the 64 columns"):
        config_from_hf(config, shapes)


def test_target_of_another_width(hf, shapes_of, gguf):
    config = hf(target_hidden_size=48)
    shapes = shapes_of(config)
    assert shapes["fc.weight"] == (64, 144)
    assert config_from_hf(config, shapes).target_hidden_size == 48
    resolved = config_from_gguf(gguf(), shapes)  # has no key: fc decides
    assert resolved.target_hidden_size == 48
    assert any("target_hidden_size: 48 by the shape of fc.weight" in n for n in resolved.notes)


def test_absent_block_size_is_sixteen_with_a_note(hf, gguf, shapes_of):
    for config in (
        config_from_hf(hf(d_block_size=None)),
        config_from_gguf(gguf(block_size=None), shapes_of(hf())),
    ):
        assert config.block_size == 16
        assert config.notes == ("block_size: the file does not say, 16 is assumed",)


def test_lucebox_promises_and_gemma_scale(hf, gguf, shapes_of):
    arch = "gemma4-dflash-draft"
    config = config_from_gguf(gguf(arch=arch), shapes_of(hf()))
    assert config.input_embedding_scale == 8.0  # the root of 64
    assert any("rule for Gemma" in n for n in config.notes)
    arch = "qwen35-dflash-draft"
    dspark = shapes_of(hf("dspark"))
    flags = {"dflash__dspark__enabled": 1, "dflash__dspark__confidence__enabled": 1}
    assert config_from_gguf(gguf(arch=arch, **flags), dspark).confidence == "hidden+markov"
    with pytest.raises(CheckpointError, match=r"dspark.enabled = 1, so its tensors must be there"):
        config_from_gguf(gguf(arch=arch, **flags), shapes_of(hf()))
    for name in ("weight", "bias"):
        del dspark[f"confidence_head.proj.{name}"]
    with pytest.raises(CheckpointError, match=r"confidence.enabled = 1, so its tensors must be"):
        config_from_gguf(gguf(arch=arch, **flags), dspark)


def test_source_of_the_layers(hf):
    config = hf(layer_types=["sliding_attention"] * 2, sliding_window=9, is_causal=False)
    source = config_from_hf(config).sources["layers"]
    assert source == "layer_types, window: sliding_window, causal: is_causal"


def test_speculators_layout(hf):
    """The transformer nested, ids one higher, and no anchor sampling in files without the key."""
    config = hf("dspark")
    backbone = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    backbone += ("num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_parameters")
    nested = {k: config[k] for k in backbone}
    top = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": nested,
        "aux_hidden_state_layer_ids": [2, 5, 10],
        "mask_token_id": 9,
        "block_size": 8,
        "markov_rank": 10,
    }
    resolved = config_from_hf(top)
    assert resolved.target_layer_ids == (1, 4, 9)
    assert resolved.sources["target_layer_ids"] == "aux_hidden_state_layer_ids - 1"
    assert resolved.sources["hidden_size"] == "transformer_layer_config.hidden_size"
    assert not resolved.sample_from_anchor
    assert resolved.sources["sample_from_anchor"] == "default of speculators"
    assert config_from_hf(top | {"sample_from_anchor": True}).max_draft_tokens == 8
    assert config_from_hf(hf("dspark")).sample_from_anchor
