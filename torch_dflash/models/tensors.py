"""The closed set of tensors of a native target, under their GGUF names."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..fields import CheckpointError, shape_text
from .config import DenseConfig, Qwen35Config

__all__ = ["TargetTable", "check_target_tensors", "target_table"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TargetTable:
    """Row-major shapes by GGUF name.

    Attributes:
        top: embedding, final norm, head and such.
        layers: one mapping per layer, without the ``blk.{i}.`` prefix.
    """

    top: dict[str, Shape]
    layers: tuple[dict[str, Shape], ...]

    def items(self) -> Iterable[tuple[str, Shape]]:
        """Full name and shape of every tensor."""
        yield from self.top.items()
        for i, layer in enumerate(self.layers):
            for name, shape in layer.items():
                yield f"blk.{i}.{name}", shape

    @property
    def num_parameters(self) -> int:
        """Values in all tensors."""
        return sum(math.prod(shape) for _, shape in self.items())


def target_table(config: DenseConfig | Qwen35Config) -> TargetTable:
    """Every tensor that a file of this config holds."""
    c = config
    top: dict[str, Shape] = {
        "token_embd.weight": (c.vocab_size, c.hidden_size),
        "output_norm.weight": (c.hidden_size,),
    }
    if not c.tied:
        top["output.weight"] = (c.vocab_size, c.hidden_size)
    if isinstance(c, DenseConfig) and c.rope_freqs:
        top["rope_freqs.weight"] = (c.rope.rotary_dim // 2,)
    layers = []
    for i, kind in enumerate(c.layer_kinds):
        if isinstance(c, DenseConfig):
            layers.append(_dense(c, i))
        else:
            layers.append((_gdn(c) if kind == "gdn" else _gated(c, i)) | _ffn(c))
    return TargetTable(top, tuple(layers))


def _attention(c: DenseConfig | Qwen35Config, layer: int, q_rows: int) -> dict[str, Shape]:
    hidden, kv = c.hidden_size, c.kv_size
    out: dict[str, Shape] = {"attn_output.weight": (hidden, c.q_size)}
    if layer in c.fused_qkv:
        out["attn_qkv.weight"] = (q_rows + 2 * kv, hidden)
    else:
        out |= {
            "attn_q.weight": (q_rows, hidden),
            "attn_k.weight": (kv, hidden),
            "attn_v.weight": (kv, hidden),
        }
    return out


def _dense(c: DenseConfig, layer: int) -> dict[str, Shape]:
    out = _attention(c, layer, c.q_size) | _ffn(c)
    out |= {"attn_norm.weight": (c.hidden_size,), "ffn_norm.weight": (c.hidden_size,)}
    if c.qk_norm:
        out |= {"attn_q_norm.weight": (c.head_dim,), "attn_k_norm.weight": (c.head_dim,)}
    if c.attention_bias:
        if layer in c.fused_qkv:
            out["attn_qkv.bias"] = (c.q_size + 2 * c.kv_size,)
        else:
            out |= {
                "attn_q.bias": (c.q_size,),
                "attn_k.bias": (c.kv_size,),
                "attn_v.bias": (c.kv_size,),
            }
    if c.output_bias:
        out["attn_output.bias"] = (c.hidden_size,)
    return out


def _gated(c: Qwen35Config, layer: int) -> dict[str, Shape]:
    """Full attention: the rows of q are, per head, the head and its output gate."""
    out = _attention(c, layer, 2 * c.q_size)
    return out | {"attn_q_norm.weight": (c.head_dim,), "attn_k_norm.weight": (c.head_dim,)}


def _gdn(c: Qwen35Config) -> dict[str, Shape]:
    hidden, heads = c.hidden_size, c.num_value_heads
    return {
        "attn_qkv.weight": (c.conv_channels, hidden),
        "attn_gate.weight": (c.value_size, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_beta.weight": (heads, hidden),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_conv1d.weight": (c.conv_channels, c.conv_kernel),
        "ssm_norm.weight": (c.value_head_dim,),
        "ssm_out.weight": (hidden, c.value_size),
    }


def _ffn(c: DenseConfig | Qwen35Config) -> dict[str, Shape]:
    hidden, ffn = c.hidden_size, c.intermediate_size
    out: dict[str, Shape] = {
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }
    if isinstance(c, Qwen35Config):
        out |= {"attn_norm.weight": (hidden,), "post_attention_norm.weight": (hidden,)}
    return out


def check_target_tensors(
    config: DenseConfig | Qwen35Config, shapes: Mapping[str, Shape], where: str
) -> None:
    """Check names and shapes of a whole file; NextN blocks are left alone.

    Args:
        config: resolved config.
        shapes: GGUF name -> row-major shape.
        where: the file, for messages.

    Raises:
        CheckpointError: an unknown tensor, a missing one, or a wrong shape.
    """
    wanted = dict(target_table(config).items())
    nextn = config.num_nextn_layers if isinstance(config, Qwen35Config) else 0
    skipped = range(config.num_layers, config.num_layers + nextn)
    unknown = [n for n in shapes if n not in wanted and _block(n) not in skipped]
    if unknown:
        raise CheckpointError(
            f"{where}: a {config.arch} target must hold only its own tensors, got {len(unknown)} "
            f"unknown: {_list(unknown)}" + _hint(unknown)
        )
    for i in skipped:
        named = f"blk.{i}.nextn.eh_proj.weight"
        if named not in shapes and any(_block(n) == i for n in shapes):
            raise CheckpointError(
                f"{where}: blk.{i} must be a NextN layer, got one without {named!r}; "
                "nextn_predict_layers does not fit the file"
            )
    missing = [n for n in wanted if n not in shapes]
    if missing:
        raise CheckpointError(
            f"{where}: a {config.arch} target of {config.num_layers} layers must hold "
            f"{len(wanted)} tensors, got all but {len(missing)}: {_list(missing)}"
        )
    for name, shape in wanted.items():
        if tuple(shapes[name]) != shape:
            raise CheckpointError(
                f"{where}: tensor {name!r} must be {shape_text(shape)}, got "
                f"{shape_text(shapes[name])}"
            )


def _block(name: str) -> int | None:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else None


def _hint(unknown: list[str]) -> str:
    if any(n.endswith((".scale", ".input_scale")) for n in unknown):
        return "; per-tensor scales (NVFP4) are not read yet, requantize the model"
    if any("_exps" in n or "ffn_gate_inp" in n for n in unknown):
        return "; mixture-of-experts models are not supported yet"
    return ""


def _list(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
