"""Drafters as Hugging Face folders: what was read is what the folder says, tensors bit for bit."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.to_gguf import write_drafter
from torch_dflash.drafters.to_hf import hf_config, write_folder
from torch_dflash.fields import CheckpointError
from torch_dflash.load import ASSETS
from torch_dflash.testing.tiny import tiny_drafter

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e7,
    "factor": 32.0,
    "original_max_position_embeddings": 128,
}
SLIDING, FULL = "sliding_attention", "full_attention"
CASES = {
    "dflash": ("dflash", {}),
    "dflash2": ("dflash2", {}),
    "dspark": ("dspark", {}),
    "yarn": ("dspark", {"rope_parameters": YARN}),
    "betas": ("dspark", {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}}),
    "attention factor": ("dflash", {"rope_parameters": YARN | {"attention_factor": 1.1}}),
    "mscale": ("dflash", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "not truncated": ("dflash", {"rope_parameters": YARN | {"truncate": False}}),
    "linear": (
        "dflash",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "partial": (
        "dflash",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            }
        },
    ),
    "legacy mask": (
        "dflash",
        {"layer_types": [SLIDING, FULL], "sliding_window": 32, "is_causal": None},
    ),
    "window": ("dflash2", {"layer_types": [SLIDING, SLIDING], "sliding_window": 48}),
    "causal": ("dflash", {"is_causal": True}),
    "mask token 0": (
        "dflash",
        {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 2, 4]}},
    ),
    "bonus anchor": ("dspark", {"sample_from_anchor": False}),
    "scales": (
        "dflash2",
        {"input_embedding_scale": 3.5, "output_multiplier": 0.3, "final_logit_softcapping": 30.0},
    ),
    "logit scale": ("dspark", {"logit_scale": 0.25}),
}


def rewritten(checkpoint, folder, dtype=torch.bfloat16):
    write_folder(folder, checkpoint, context_length=4096, num_target_layers=6, dtype=dtype)
    return read_checkpoint(folder)


def check_same(before, after):
    def values(config):
        return {k: v for k, v in config.items() if k not in ("sources", "notes")}

    assert values(dataclasses.asdict(after.config)) == values(dataclasses.asdict(before.config))
    assert after.tensors.keys() == before.tensors.keys()
    for name, tensor in before.tensors.items():
        assert torch.equal(after.tensors[name].to_dense(), tensor.to_dense()), name


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_back_unchanged(tmp_path, name):
    kind, changes = CASES[name]
    source = tiny_drafter(tmp_path / "source", kind, **changes)
    check_same(read_checkpoint(source), rewritten(read_checkpoint(source), tmp_path / "out"))


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_gguf_and_back_keeps_every_bit(tmp_path, kind):
    source = read_checkpoint(tiny_drafter(tmp_path / "source", kind))
    write_drafter(tmp_path / "d.gguf", source, name="d", context_length=4096)
    assert read_checkpoint(tmp_path / "d.gguf").config.context_length == 4096
    check_same(source, rewritten(read_checkpoint(tmp_path / "d.gguf"), tmp_path / "out"))


def test_reduced_vocabulary_sinks_biases_and_mask_embedding(tmp_path):
    source = tiny_drafter(tmp_path / "source", "dspark", attention_bias=True, draft_vocab_size=64)
    tensors = load_file(source / "model.safetensors")
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:64].clone()
    tensors["lm_head.weight"] = torch.randn(64, 256).bfloat16()
    tensors["d2t"] = torch.arange(64) * 3  # draft id i is target id 4 i
    for i in range(2):
        for letter, size in (("q", 256), ("k", 128), ("v", 128), ("o", 256)):
            tensors[f"layers.{i}.self_attn.{letter}_proj.bias"] = torch.randn(size).bfloat16()
        tensors[f"layers.{i}.self_attn.attention_sink_bias"] = torch.randn(4).bfloat16()
    save_file(tensors, source / "model.safetensors")
    torch.save(torch.randn(256).bfloat16(), source / "mask_embedding.pt")
    before = read_checkpoint(source)
    after = rewritten(before, tmp_path / "out")
    check_same(before, after)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["d2t"], torch.arange(64) * 3)


def test_quantized_tensors_are_decoded_to_the_dtype_asked_for(tmp_path):
    before = read_checkpoint(ASSETS / "dspark.gguf")
    exact = rewritten(before, tmp_path / "f32", torch.float32)
    rounded = rewritten(before, tmp_path / "bf16")
    for name, tensor in before.tensors.items():
        values = tensor.to_dense().float()
        assert torch.equal(exact.tensors[name].to_dense(), values), name
        assert torch.equal(rounded.tensors[name].to_dense(), values.bfloat16()), name
    config = json.loads((tmp_path / "bf16/config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6  # not the float32 next to it
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["num_target_layers"] == 6


def test_what_the_format_cannot_say_is_refused(tmp_path):
    config = read_checkpoint(tiny_drafter(tmp_path / "source", "dflash")).config
    first, second = config.layers

    def refused(match, **changes):
        with pytest.raises(CheckpointError, match=match):
            hf_config(dataclasses.replace(config, **changes), where="x", context_length=1)

    windows = (dataclasses.replace(first, window=4), dataclasses.replace(second, window=5))
    refused("one window", layers=windows)
    refused("causality", layers=(dataclasses.replace(first, causal=True), second))
    refused("frequency factors", rope=config.rope.with_freq_factors(torch.ones(32)))
    refused("pass the target", num_target_layers=None)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    checkpoint = read_checkpoint(tiny_drafter(tmp_path / "source", "dflash"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(OSError, match="not empty"):
        rewritten(checkpoint, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="must be a folder"):
        rewritten(checkpoint, tmp_path / "gone/out")
    with pytest.raises(CheckpointError, match="dtype must be"):
        rewritten(checkpoint, tmp_path / "new", torch.float64)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
