"""Drafters written by us against the files that llama.cpp's converter made of the same folders."""

import logging
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from gguf_craft import GGUF_DRAFTERS

from torch_dflash.drafters.attention import LayerAttention
from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.to_gguf import dflash_metadata, dflash_tensors, write_drafter
from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import GGUFFile, QuantTensor, typed_metadata


@pytest.mark.parametrize("case", GGUF_DRAFTERS)
def test_equals_the_converters(fixtures, tmp_path, case):
    folder, path = fixtures / "gguf" / case, tmp_path / "x.gguf"
    checkpoint = read_checkpoint(folder)
    with GGUFFile.open(folder / "model.gguf") as theirs:
        want = typed_metadata(theirs)
        tokenizer = {k: v for k, v in want.items() if k.startswith("tokenizer.")}
        write_drafter(
            path,
            checkpoint,
            name=want["general.name"].value,
            context_length=4096,
            tokenizer=tokenizer,
            file_type=32,
        )
        with GGUFFile.open(path) as ours:
            got = typed_metadata(ours)
            del want["general.size_label"]
            # we always say it; upstream only where config.json does
            causal = got.pop("dflash.attention.causal")
            assert want.pop("dflash.attention.causal", causal) == causal
            assert got == want
            assert ours.tensors.keys() == theirs.tensors.keys()
            for name in theirs.tensors:
                a, b = ours.tensor(name), theirs.tensor(name)
                assert (a.ggml_type, a.shape) == (b.ggml_type, b.shape), name
                assert torch.equal(a.packed, b.packed), name
    again = read_checkpoint(path)
    floats = {  # float32 in a GGUF
        f.name: float(np.float32(value))
        for f in fields(checkpoint.config)
        if isinstance(value := getattr(checkpoint.config, f.name), float)
    }
    assert again.config == replace(checkpoint.config, num_target_layers=None, **floats)
    assert again.tensors.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(again.tensors[name].to_dense().double(), tensor.to_dense().double())


@pytest.fixture
def config(fixtures):
    return read_checkpoint(fixtures / "gguf/dflash_yarn").config


def metadata(config, **options):
    return dflash_metadata(config, where="x.gguf", name="x", context_length=4096, **options)


def test_yarn_magnitudes(config, caplog):
    """The file's attn_factor times llama.cpp's 0.1 ln f + 1 is the magnitude of the checkpoint."""
    rope = replace(config.rope, attention_factor=1.1)
    got = metadata(replace(config, rope=rope))
    # FORMATS A3, measured against llama.cpp: 0.816888 for m = 1.1 and f = 32
    assert got["dflash.rope.scaling.attn_factor"].value == pytest.approx(0.816888, abs=1e-6)
    assert "dflash.rope.scaling.attn_factor" not in metadata(config)
    both = replace(config.rope, mscale=0.7, mscale_all_dim=0.7)
    scale = metadata(replace(config, rope=both))["dflash.rope.scaling.attn_factor"].value
    assert scale == pytest.approx(1 / 1.3465736, rel=1e-6)  # a ratio of equal terms is 1
    with caplog.at_level(logging.WARNING):
        metadata(replace(config, rope=replace(config.rope, beta_fast=4.0)))
    assert "llama.cpp ignores yarn betas other than 32 and 1 in a drafter, got 4 and 1" in (
        caplog.text
    )


def test_mixed_causality_and_linear_rope(config):
    layers = (LayerAttention(8, True), LayerAttention(None, False))
    rope = replace(config.rope, type="linear", factor=4.0)
    got = metadata(replace(config, layers=layers, rope=rope))
    assert "dflash.attention.causal" not in got
    assert got["dflash.attention.causal_pattern"] == ("array[bool]", [True, False])
    assert got["dflash.attention.sliding_window"] == ("uint32", 8)
    assert got["dflash.attention.sliding_window_pattern"] == ("array[bool]", [True, False])
    assert got["dflash.rope.scaling.type"] == ("string", "linear")
    assert "dflash.rope.scaling.original_context_length" not in got
    assert got["dflash.vocab_size"] == ("uint32", config.vocab_size)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_aux_hidden_state": False}, "must have fc .*, got no fc"),
        ({"target_hidden_size": 64}, "own width, got width 64"),
        (
            {"layers": (LayerAttention(8, True), LayerAttention(4, True))},
            r"must have one window, got \[4, 8\]",
        ),
    ],
)
def test_what_the_format_cannot_say(config, change, message):
    with pytest.raises(CheckpointError, match=message):
        metadata(replace(config, **change))


def test_ropes_the_format_cannot_say(config):
    for change, what in (
        ({"truncate": False}, "truncate = false"),
        ({"freq_factors": (1.0,) * 8}, "frequency factors"),
    ):
        with pytest.raises(CheckpointError, match=f"truncated yarn rope, got {what}"):
            metadata(replace(config, rope=replace(config.rope, **change)))


def test_tensors_without_a_place(fixtures):
    checkpoint = read_checkpoint(fixtures / "gguf/dflash")
    one = QuantTensor.from_tensor(torch.ones(32))
    for name, message in (
        ("mask_embedding", "must not hold 'mask_embedding'"),
        ("embed_tokens.weight", "embed_tokens must come with lm_head"),
    ):
        wrong = replace(checkpoint, tensors={**checkpoint.tensors, name: one})
        with pytest.raises(CheckpointError, match=message):
            dict(dflash_tensors(wrong, where="x.gguf"))


def test_tokenizer_of_another_size(fixtures, config):
    with GGUFFile.open(fixtures / "gguf/target_nk2_nv4.gguf") as file:
        tokenizer = {k: v for k, v in typed_metadata(file).items() if k.startswith("tokenizer.")}
    with pytest.raises(CheckpointError, match="tokenizer must have 100 tokens, got 112"):
        metadata(replace(config, vocab_size=100), tokenizer=tokenizer)


def test_dtype_is_for_plain_matrices(fixtures):
    checkpoint = read_checkpoint(fixtures / "gguf/dflash2")
    got = dict(dflash_tensors(checkpoint, where="x.gguf", dtype=torch.float16))
    assert got["blk.0.attn_q.weight"].type_name == "F16"
    assert got["blk.0.attn_conv_base"].type_name == "F32"
    assert got["output_norm.weight"].type_name == "F32"
    packed = QuantTensor(torch.zeros(64, 34, dtype=torch.uint8), 8, (64, 32))
    mixed = {**checkpoint.tensors, "layers.0.self_attn.q_proj.weight": packed}
    got = dict(dflash_tensors(replace(checkpoint, tensors=mixed), where="x", dtype=torch.float32))
    assert got["blk.0.attn_q.weight"] is packed
