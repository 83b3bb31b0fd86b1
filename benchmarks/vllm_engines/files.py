"""Targets and drafters with random weights, as the files that a vLLM engine starts from."""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from torch_dflash.drafters.config import DrafterConfig
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.tensors import tensor_table
from torch_dflash.gguf import QuantTensor
from torch_dflash.gguf.writer import Typed, write_gguf
from torch_dflash.models.config import Qwen35Config
from torch_dflash.models.tensors import target_table
from torch_dflash.testing.published import DFLASH2_27B
from torch_dflash.testing.tiny import random_quant, tokenizer_metadata

from ..model import q4_k_m

__all__ = ["short", "write_drafter", "write_gguf_target", "write_hf_target"]


def short(config: Qwen35Config, layers: int, vocab: int) -> Qwen35Config:
    """The same layers, fewer of them, under a smaller vocabulary."""
    return dataclasses.replace(
        config,
        num_layers=layers,
        layer_kinds=config.layer_kinds[:layers],
        vocab_size=vocab,
        context_length=8192,
    )


def write_hf_target(folder: Path, c: Qwen35Config) -> Path:
    """A config.json for vLLM's ``load_format="dummy"``."""
    fraction = c.rope.rotary_dim / c.head_dim
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "attention_bias": False,
        "linear_num_key_heads": c.num_key_heads,
        "linear_num_value_heads": c.num_value_heads,
        "linear_key_head_dim": c.key_head_dim,
        "linear_value_head_dim": c.value_head_dim,
        "linear_conv_kernel_dim": c.conv_kernel,
        "mamba_ssm_dtype": "float32",
        "layer_types": [f"{'linear' if k == 'gdn' else 'full'}_attention" for k in c.layer_kinds],
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.context_length,
        "eos_token_id": 1,
        "partial_rotary_factor": fraction,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope.theta,
            "partial_rotary_factor": fraction,
            "mrope_interleaved": True,
            "mrope_section": list(c.rope_sections[:3]),
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_gguf_target(path: Path, c: Qwen35Config, device: torch.device) -> Path:
    """A GGUF of a Q4_K_M file's types, its quants made on ``device``."""
    g = torch.Generator(device).manual_seed(0)

    def tensor(name: str, shape: tuple[int, ...]) -> QuantTensor:
        if len(shape) == 2 and not name.endswith("ssm_conv1d.weight"):
            return random_quant(*shape, q4_k_m(c, name), g, shape[1] ** -0.5).to("cpu")
        values = torch.rand(shape, generator=g, device=device)
        if name.endswith("ssm_a"):  # -exp(A_log)
            values = -values - 0.05
        return QuantTensor.from_tensor((values + 0.5 if "norm" in name else values).cpu())

    interval = c.layer_kinds.index("full") + 1
    numbers = {
        "block_count": c.num_layers,
        "context_length": c.context_length,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": c.rope.rotary_dim,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.state_size": c.key_head_dim,
        "ssm.group_count": c.num_key_heads,
        "ssm.time_step_rank": c.num_value_heads,
        "ssm.inner_size": c.num_value_heads * c.value_head_dim,
        "full_attention_interval": interval,
    }
    metadata = {f"qwen35.{key}": Typed("uint32", value) for key, value in numbers.items()}
    metadata |= {
        "qwen35.attention.layer_norm_rms_epsilon": Typed("float32", c.rms_norm_eps),
        "qwen35.rope.freq_base": Typed("float32", c.rope.theta),
        "qwen35.rope.dimension_sections": Typed("array[int32]", [*c.rope_sections]),
        **tokenizer_metadata(c.vocab_size),
    }
    shapes = target_table(c).items()
    write_gguf(path, "qwen35", metadata, ((n, tensor(n, tuple(s))) for n, s in shapes))
    return path


def write_drafter(folder: Path, target: Qwen35Config, drafts: int, layers: int = 1) -> Path:
    """A DFlash2 drafter of the published widths, with fewer layers, for blocks of ``drafts``."""
    inner = DFLASH2_27B["dflash_config"]
    captured = sorted({0, target.num_layers // 2, target.num_layers - 2})
    raw = DFLASH2_27B | {
        "num_hidden_layers": layers,
        "layer_types": DFLASH2_27B["layer_types"][:layers],
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "max_position_embeddings": target.context_length,
        "dflash_config": inner
        | {
            "block_size": drafts + 1,
            "mask_token_id": target.vocab_size - 1,
            "target_layer_ids": captured,
        },
    }
    config: DrafterConfig = config_from_hf(raw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    g = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_table(config).required.items():
        values = torch.empty(shape, dtype=torch.bfloat16)
        if len(shape) == 1:
            tensors[name] = values.fill_(1.0)
        else:
            tensors[name] = values.uniform_(-1, 1, generator=g).mul_(shape[-1] ** -0.5)
    save_file(tensors, folder / "model.safetensors")
    return folder
