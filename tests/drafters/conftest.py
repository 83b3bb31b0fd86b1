"""Drafter configs and shapes to start from."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.tensors import tensor_table

_BACKBONE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "num_target_layers": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "dflash_config": {"block_size": 8, "mask_token_id": 9, "target_layer_ids": [1, 4, 9]},
}
_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 5}
_MARKOV = {"markov_rank": 10, "enable_confidence_head": True}


@pytest.fixture
def hf():
    """``hf(kind, **top)``: a valid config.json; ``dflash_config`` keys behind ``d_``."""

    def make(kind="dflash", **changes):
        config = copy.deepcopy(_BACKBONE)
        config["dflash_config"] |= {"dflash2": _SELECTOR, "dspark": _MARKOV}.get(kind, {})
        config["architectures"] = [
            {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}.get(
                kind, "Qwen3DSparkModel"
            )
        ]
        for name, value in changes.items():
            where = config["dflash_config"] if name.startswith("d_") else config
            where[name.removeprefix("d_")] = value
        return config

    return make


@pytest.fixture
def shapes_of():
    """``shapes_of(config)``: the tensors that a config.json promises."""

    def make(config):
        table = tensor_table(config_from_hf(config))
        shapes = dict(table.required)
        if "confidence_head.proj.weight" in shapes:
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    return make


@pytest.fixture
def gguf():
    """``gguf(kind, arch)``: metadata and logical shapes of a valid GGUF drafter."""

    def make(kind="dflash", arch="dflash", **changes):
        keys = {
            "block_count": 2,
            "context_length": 4096,
            "embedding_length": 64,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e7,
            "block_size": 8,
            "target_layers": [2, 5, 10],
        }
        if kind == "dflash2":
            keys |= _SELECTOR
        meta = {f"{arch}.{k}": v for k, v in keys.items()}
        meta |= {
            "general.architecture": arch,
            "tokenizer.ggml.tokens": [str(i) for i in range(32)],
            "tokenizer.ggml.mask_token_id": 9,
        }
        for name, value in changes.items():
            key = name.replace("__", ".")
            key = key if key.startswith("tokenizer.") else f"{arch}.{key}"
            meta[key] = value
            if value is None:
                del meta[key]
        return meta

    return make


@pytest.fixture
def folder(tmp_path, hf, shapes_of):
    """``folder(kind, tensors=..., **changes)``: a random checkpoint on disk."""

    def make(kind="dflash", tensors=None, **changes):
        config = hf(kind, **changes)
        generator = torch.Generator().manual_seed(3)
        state = {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in shapes_of(hf(kind)).items()
        }
        state |= tensors or {}
        state = {k: v for k, v in state.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(state, tmp_path / "model.safetensors")
        return tmp_path

    return make
