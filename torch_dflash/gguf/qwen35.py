"""Hugging Face Qwen3.5-type targets as ``qwen35`` GGUF files, in llama.cpp's layout.

llama.cpp wants the V heads of a Gated DeltaNet layer *tiled*: head ``r * nk + k`` instead of
``k * (nv / nk) + r``, so that head ``j`` reads K head ``j mod nk``. Norm weights carry their +1,
and ``A_log`` its exponential.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from .header import GGUFError
from .tensor import QuantTensor
from .writer import Typed

__all__ = ["group_v_heads", "qwen35_metadata", "qwen35_tensors", "tile_v_heads"]

_PLAIN: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "linear_attn.norm": "ssm_norm",
}
_PLUS_ONE: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_TOP: Final = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tile_v_heads(t: Tensor, nk: int, nv: int, width: int = 1) -> Tensor:
    """Hugging Face's order of V heads (grouped by K head) -> GGUF's (tiled).

    Args:
        t: ``[nv * width, ...]``, each head's ``width`` rows together.
        nk: K heads.
        nv: V heads, a multiple of ``nk``.

    >>> tile_v_heads(torch.arange(6), 3, 6)
    tensor([0, 2, 4, 1, 3, 5])
    """
    return t.reshape(nk, nv // nk, width, *t.shape[1:]).transpose(0, 1).reshape(t.shape)


def group_v_heads(t: Tensor, nk: int, nv: int, width: int = 1) -> Tensor:
    """The inverse of :func:`tile_v_heads`."""
    return tile_v_heads(t, nv // nk, nv, width)


def qwen35_metadata(
    config: Mapping[str, Any], *, name: str, file_type: int | None = None
) -> dict[str, Typed]:
    """Metadata of a target, without its tokenizer.

    Args:
        config: ``config.json`` of a dense Qwen3.5-type model, or its ``text_config``.
        name: ``general.name``.
        file_type: ``general.file_type``: 0 F32, 1 F16, 32 BF16, 15 Q4_K_M.

    Raises:
        GGUFError: a field is missing or of the wrong type.
    """
    c = _Config(config)
    rope = c.get("rope_parameters", dict)
    head_dim = c.get("head_dim", int)
    sections = [int(s) for s in rope["mrope_section"]]
    rotary = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    kinds = c.get("layer_types", list)
    values: dict[str, tuple[str, Any]] = {
        "block_count": ("uint32", c.get("num_hidden_layers", int)),
        "context_length": ("uint32", c.get("max_position_embeddings", int)),
        "embedding_length": ("uint32", c.get("hidden_size", int)),
        "feed_forward_length": ("uint32", c.get("intermediate_size", int)),
        "attention.head_count": ("uint32", c.get("num_attention_heads", int)),
        "attention.head_count_kv": ("uint32", c.get("num_key_value_heads", int)),
        "rope.dimension_sections": ("array[int32]", (sections + [0] * 4)[:4]),
        "rope.freq_base": ("float32", float(rope["rope_theta"])),
        "attention.layer_norm_rms_epsilon": ("float32", c.get("rms_norm_eps", float)),
        "attention.key_length": ("uint32", head_dim),
        "attention.value_length": ("uint32", head_dim),
        "ssm.conv_kernel": ("uint32", c.get("linear_conv_kernel_dim", int)),
        "ssm.state_size": ("uint32", c.get("linear_key_head_dim", int)),
        "ssm.group_count": ("uint32", c.get("linear_num_key_heads", int)),
        "ssm.time_step_rank": ("uint32", c.get("linear_num_value_heads", int)),
        "ssm.inner_size": (
            "uint32",
            c.get("linear_value_head_dim", int) * c.get("linear_num_value_heads", int),
        ),
        "attention.recurrent_layers": ("array[bool]", [k == "linear_attention" for k in kinds]),
        "full_attention_interval": ("uint32", config.get("full_attention_interval") or 4),
        "rope.dimension_count": ("uint32", int(head_dim * rotary)),
    }
    general = {"type": Typed("string", "model"), "name": Typed("string", name)}
    if file_type is not None:
        general["file_type"] = Typed("uint32", file_type)
    general["quantization_version"] = Typed("uint32", 2)
    return {f"general.{k}": v for k, v in general.items()} | {
        f"qwen35.{k}": Typed(*v) for k, v in values.items()
    }


def qwen35_tensors(
    config: Mapping[str, Any],
    source: Mapping[str, QuantTensor],
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, QuantTensor]]:
    """Name, reorder and transform the tensors of a checkpoint.

    Args:
        config: as for :func:`qwen35_metadata`.
        source: Hugging Face name -> tensor, as ``open_safetensors`` gives it.
        dtype: of the matrices, float32, float16 or bfloat16; None keeps each one's own. Vectors
            and the convolution are float32, as llama.cpp wants them.

    Raises:
        GGUFError: a tensor that a ``qwen35`` file has no place for.
    """
    c = _Config(config)
    nk, nv = c.get("linear_num_key_heads", int), c.get("linear_num_value_heads", int)
    dv, kd = c.get("linear_value_head_dim", int), 2 * nk * c.get("linear_key_head_dim", int)

    def values_only(t: Tensor) -> Tensor:  # q and k rows keep their place
        return torch.cat([t[:kd], tile_v_heads(t[kd:], nk, nv, dv)])

    for name, tensor in source.items():
        t = tensor.to_dense()
        short = re.sub(r"^model\.(language_model\.)?", "", name)
        layer = re.fullmatch(r"layers\.(\d+)\.(.+?)(?:\.weight)?", short)
        if layer:
            to, part = f"blk.{layer[1]}.", layer[2]
        if not layer and short in _TOP:
            to = _TOP[short]
            t = t.float() + 1 if short == "norm.weight" else t
        elif layer and part in _PLAIN:
            to += f"{_PLAIN[part]}.weight"
        elif layer and part in _PLUS_ONE:
            to += f"{_PLUS_ONE[part]}.weight"
            t = t.float() + 1
        elif layer and part == "linear_attn.in_proj_qkv":
            to, t = to + "attn_qkv.weight", values_only(t)
        elif layer and part == "linear_attn.conv1d":
            to, t = to + "ssm_conv1d.weight", values_only(t.squeeze(1)).float()
        elif layer and part == "linear_attn.in_proj_z":
            to, t = to + "attn_gate.weight", tile_v_heads(t, nk, nv, dv)
        elif layer and part == "linear_attn.in_proj_b":
            to, t = to + "ssm_beta.weight", tile_v_heads(t, nk, nv)
        elif layer and part == "linear_attn.in_proj_a":
            to, t = to + "ssm_alpha.weight", tile_v_heads(t, nk, nv)
        elif layer and part == "linear_attn.A_log":
            to, t = to + "ssm_a", tile_v_heads(-t.float().exp(), nk, nv)
        elif layer and part == "linear_attn.dt_bias":
            to, t = to + "ssm_dt.bias", tile_v_heads(t, nk, nv)
        elif layer and part == "linear_attn.out_proj":
            to, t = to + "ssm_out.weight", tile_v_heads(t.T, nk, nv, dv).T
        else:
            raise GGUFError(
                f"tensor {name!r} must belong to a dense Qwen3.5 text model; "
                "leave vision and MTP tensors out"
            )
        if t.dim() == 1 or to.endswith("ssm_conv1d.weight"):
            t = t.float()
        elif dtype is not None:
            t = t.to(dtype)
        yield to, QuantTensor.from_tensor(t.contiguous())


class _Config:
    """Typed access to a config; a missing field is an error, not a default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def get(self, key: str, kind: type) -> Any:
        value = self.config.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise GGUFError(f"config.json: {key} must be {kind.__name__}, got {value!r:.60}")
        return value
