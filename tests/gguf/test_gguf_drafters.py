"""Drafters written by us against the files that llama.cpp's converter made of the same folders."""

import logging
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from gguf_craft import GGUF_DRAFTERS

from torch_dflash.drafters.attention import LayerAttention
from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.to_gguf import (
    dflash_metadata,
    dflash_tensors,
    gguf_notes,
    write_drafter,
)
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
    return dflash_metadata(config, where="x.gguf", name="x", **options)


def test_yarn_magnitudes(config):
    """The file's attn_factor times llama.cpp's 0.1 ln f + 1 is the magnitude of the checkpoint."""
    rope = replace(config.rope, attention_factor=1.1)
    got = metadata(replace(config, rope=rope))
    # FORMATS A3, measured against llama.cpp: 0.816888 for m = 1.1 and f = 32
    assert got["dflash.rope.scaling.attn_factor"].value == pytest.approx(0.816888, abs=1e-6)
    assert "dflash.rope.scaling.attn_factor" not in metadata(config)
    both = replace(config.rope, mscale=0.7, mscale_all_dim=0.7)
    scale = metadata(replace(config, rope=both))["dflash.rope.scaling.attn_factor"].value
    assert scale == pytest.approx(1 / 1.3465736, rel=1e-6)  # a ratio of equal terms is 1


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
        ({"use_aux_hidden_state": False}, "must have fc, got use_aux_hidden_state false"),
        ({"context_length": None}, "max_position_embeddings must be known"),
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
    with pytest.raises(CheckpointError, match="linear or yarn rope, got frequency factors"):
        metadata(replace(config, rope=replace(config.rope, freq_factors=(1.0,) * 8)))


def test_what_readers_leave_out(fixtures, tmp_path, caplog):
    """One line each, and logged when the file is written."""
    checkpoint = read_checkpoint(fixtures / "gguf/dflash_yarn")
    c = checkpoint.config
    mixed = (LayerAttention(8, True), LayerAttention(None, False))

    def notes(layout="upstream", **changes):
        return gguf_notes(replace(checkpoint, config=replace(c, **changes)), layout)

    assert notes() == notes("lucebox") == []
    rope = replace(c.rope, beta_fast=4.0, truncate=False)
    assert notes(rope=rope) == [
        "llama.cpp ignores yarn betas other than 32 and 1 in a drafter, got 4 and 1",
        "llama.cpp ignores truncate = false and rounds the ends of yarn's ramp",
    ]
    for changes, said in (
        ({"layers": mixed}, "has one causality for all layers"),
        ({"output_multiplier": 0.5}, "ignores the multiplier"),
        ({"final_logit_softcapping": 20.0}, "ignores the multiplier and the soft cap"),
        ({"selector_top_k": 6}, "refuses selector_top_k 6 at hidden size 32"),
        ({"attention_bias": True}, "refuses a drafter with attention biases"),
        ({"markov_head_type": "rnn"}, "refuses a drafter with the rnn Markov head"),
        ({"confidence": "hidden"}, "confidence head on the hidden state alone"),
        ({"target_hidden_size": 64}, "a target of another width"),
    ):
        [line] = notes(**changes)
        assert said in line
    [line] = notes("lucebox", attention_sinks=True)
    assert line == "lucebox has no place for attention sinks; torch-dflash reads it"
    with caplog.at_level(logging.WARNING):
        changed = replace(checkpoint, config=replace(c, rope=rope))
        write_drafter(tmp_path / "x.gguf", changed, name="x")
    assert "x.gguf: llama.cpp ignores truncate = false" in caplog.text
    assert read_checkpoint(tmp_path / "x.gguf").config.rope == replace(
        rope, attention_factor=None, truncate=False
    )


def test_tensors_without_a_place(fixtures):
    checkpoint = read_checkpoint(fixtures / "gguf/dflash")
    one = QuantTensor.from_tensor(torch.ones(32))
    for name, message in (
        ("t2d", "must not hold 't2d'"),
        ("mask_embedding", "embed_tokens must be there, got none; pass the target"),
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


def test_types_of_matrices(fixtures):
    """Kept, or the one asked for; vectors and bases of convolutions are F32 in any case."""
    checkpoint = read_checkpoint(fixtures / "gguf/dflash2")
    got = dict(dflash_tensors(checkpoint, where="x.gguf", outtype="F16"))
    assert got["blk.0.attn_q.weight"].type_name == "F16"
    assert got["blk.0.attn_conv_base"].type_name == "F32"
    assert got["output_norm.weight"].type_name == "F32"
    packed = QuantTensor(torch.zeros(64, 34, dtype=torch.uint8), 8, (64, 32))
    mixed = replace(
        checkpoint,
        tensors={**checkpoint.tensors, "layers.0.self_attn.q_proj.weight": packed},
    )
    assert dict(dflash_tensors(mixed, where="x"))["blk.0.attn_q.weight"] is packed
    got = dict(dflash_tensors(mixed, where="x", outtype="F32"))
    assert got["blk.0.attn_q.weight"].type_name == "F32"
