"""Writes a drafter as an upstream ``dflash`` GGUF, which llama.cpp and its forks load."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..fields import CheckpointError
from ..gguf import QuantTensor, Typed, write_gguf
from .checkpoint import DrafterCheckpoint
from .config import DrafterConfig
from .names import upstream_name
from .rope import RopeConfig, magnitude

__all__ = ["dflash_metadata", "dflash_tensors", "write_drafter"]

_log = logging.getLogger(__name__)


def write_drafter(
    path: str | Path,
    checkpoint: DrafterCheckpoint,
    *,
    name: str,
    context_length: int,
    tokenizer: Mapping[str, Typed] | None = None,
    dtype: torch.dtype | None = None,
    file_type: int | None = None,
    alignment: int = 32,
) -> None:
    """Write a drafter; the file appears complete or not at all.

    Args:
        path: the file.
        checkpoint: the drafter.
        name: ``general.name``.
        context_length: positions it was trained for (``max_position_embeddings``).
        tokenizer: ``tokenizer.*`` keys of its target; llama.cpp wants them. None leaves only the
            mask token and the vocabulary's size.
        dtype: of plain matrices: float32, float16 or bfloat16; None keeps them. Quantized ones are
            always kept.
        file_type: ``general.file_type``, such as 32 for BF16.
        alignment: of the tensor data.

    Raises:
        CheckpointError: the format cannot express the drafter.
        OSError: the file cannot be written.
    """
    metadata = dflash_metadata(
        checkpoint.config,
        where=str(path),
        name=name,
        context_length=context_length,
        tokenizer=tokenizer,
        file_type=file_type,
    )
    tensors = dflash_tensors(checkpoint, where=str(path), dtype=dtype)
    write_gguf(path, "dflash", metadata, tensors, alignment=alignment)


def dflash_metadata(
    config: DrafterConfig,
    *,
    where: str,
    name: str,
    context_length: int,
    tokenizer: Mapping[str, Typed] | None = None,
    file_type: int | None = None,
) -> dict[str, Typed]:
    """Metadata of a drafter; arguments and errors as for :func:`write_drafter`."""
    c = config
    if not c.use_aux_hidden_state or c.target_hidden_size != c.hidden_size:
        raise CheckpointError(
            f"{where}: a dflash GGUF must have fc with layers of the drafter's own width, got "
            + (f"width {c.target_hidden_size}" if c.use_aux_hidden_state else "no fc")
        )
    values: dict[str, tuple[str, Any]] = {
        "block_count": ("uint32", c.num_layers),
        "context_length": ("uint32", context_length),
        "embedding_length": ("uint32", c.hidden_size),
        "feed_forward_length": ("uint32", c.intermediate_size),
        "attention.head_count": ("uint32", c.num_heads),
        "attention.head_count_kv": ("uint32", c.num_kv_heads),
        "attention.key_length": ("uint32", c.head_dim),
        "attention.value_length": ("uint32", c.head_dim),
        "attention.layer_norm_rms_epsilon": ("float32", c.rms_norm_eps),
        "block_size": ("uint32", c.block_size),
        # the layer whose input it is, one more than the layer whose output it is
        "target_layers": ("array[int32]", [i + 1 for i in c.target_layer_ids]),
    }
    values |= _rope(where, c.rope, c.head_dim) | _attention(where, c) | _head(c)
    if tokenizer is None:
        values["vocab_size"] = ("uint32", c.vocab_size)
    elif len(tokenizer["tokenizer.ggml.tokens"].value) != c.vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer must have {c.vocab_size} tokens, got "
            f"{len(tokenizer['tokenizer.ggml.tokens'].value)}"
        )
    general = {"type": Typed("string", "model"), "name": Typed("string", name)}
    if file_type is not None:
        general["file_type"] = Typed("uint32", file_type)
    general["quantization_version"] = Typed("uint32", 2)
    return (
        {f"general.{k}": v for k, v in general.items()}
        | {f"dflash.{k}": Typed(*v) for k, v in values.items()}
        | dict(tokenizer or {})
        | {"tokenizer.ggml.mask_token_id": Typed("uint32", c.mask_token_id)}
    )


def dflash_tensors(
    checkpoint: DrafterCheckpoint, *, where: str, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, QuantTensor]]:
    """Tensors of a drafter by their upstream names; arguments as for :func:`write_drafter`."""
    tensors = checkpoint.tensors
    if "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors:
        raise CheckpointError(
            f"{where}: embed_tokens must come with lm_head, got it alone: llama.cpp would take it "
            "for the head; leave it out, the target's is used"
        )
    for logical, tensor in tensors.items():
        name = upstream_name(logical)
        if name is None:
            raise CheckpointError(f"{where}: a dflash GGUF must not hold {logical!r}, got it")
        if tensor.type.dtype is not None and tensor.type.dtype.is_floating_point:
            small = len(tensor.shape) == 1 or logical.endswith(".base_kernel")
            to = torch.float32 if small else dtype
            if to is not None:
                tensor = QuantTensor.from_tensor(tensor.to_dense().to(to).contiguous())
        yield name, tensor


def _rope(where: str, rope: RopeConfig, head_dim: int) -> dict[str, tuple[str, Any]]:
    values: dict[str, tuple[str, Any]] = {
        "rope.freq_base": ("float32", rope.theta),
        # M-RoPE of a text: every pair turns by the temporal position
        "rope.dimension_sections": ("array[int32]", [head_dim // 2, 0, 0, 0]),
    }
    if rope.rotary_dim != head_dim:
        values["rope.dimension_count"] = ("uint32", rope.rotary_dim)
    if rope.freq_factors is not None or not rope.truncate:
        raise CheckpointError(
            f"{where}: a dflash GGUF must have a plain, linear or truncated yarn rope, got "
            + ("frequency factors" if rope.freq_factors is not None else "truncate = false")
        )
    if rope.type == "default":
        return values
    values["rope.scaling.type"] = ("string", rope.type)
    values["rope.scaling.factor"] = ("float32", rope.factor)
    if rope.type == "linear":
        return values
    values |= {
        "rope.scaling.original_context_length": ("uint32", rope.original_max_position_embeddings),
        "rope.scaling.yarn_beta_fast": ("float32", rope.beta_fast),
        "rope.scaling.yarn_beta_slow": ("float32", rope.beta_slow),
    }
    # llama.cpp multiplies its own 0.1 ln f + 1 by this key and reads no other magnitude
    scale = rope.attention_scaling / magnitude(rope.factor)
    if abs(scale - 1) > 1e-6:
        values["rope.scaling.attn_factor"] = ("float32", scale)
    if (rope.beta_fast, rope.beta_slow) != (32.0, 1.0):
        _log.warning(
            "%s: llama.cpp ignores yarn betas other than 32 and 1 in a drafter, got %g and %g",
            where,
            rope.beta_fast,
            rope.beta_slow,
        )
    return values


def _attention(where: str, c: DrafterConfig) -> dict[str, tuple[str, Any]]:
    values: dict[str, tuple[str, Any]] = {}
    causal = [layer.causal for layer in c.layers]
    if len({*causal}) == 1:
        values["attention.causal"] = ("bool", causal[0])
    else:  # upstream has one switch for all layers; this key is ours
        values["attention.causal_pattern"] = ("array[bool]", causal)
    windows = [layer.window for layer in c.layers]
    sizes = {w for w in windows if w is not None}
    if len(sizes) > 1:
        raise CheckpointError(f"{where}: a dflash GGUF must have one window, got {sorted(sizes)}")
    if sizes:
        values["attention.sliding_window"] = ("uint32", sizes.pop())
        pattern = [w is not None for w in windows]
        values["attention.sliding_window_pattern"] = ("array[bool]", pattern)
    if c.value_scale != 1:
        values["attention.value_scale"] = ("float32", c.value_scale)
    return values


def _head(c: DrafterConfig) -> dict[str, tuple[str, Any]]:
    values: dict[str, tuple[str, Any]] = {}
    if c.kind == "dflash2":
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            values[key] = ("uint32", getattr(c, key))
    if c.kind == "dspark":
        values["sample_from_anchor"] = ("bool", c.sample_from_anchor)
        values["has_confidence_head"] = ("bool", c.confidence is not None)
        if c.markov_head_type != "vanilla":
            values["markov_head_type"] = ("string", c.markov_head_type)
    scale = c.logit_scale if c.kind == "dspark" else c.output_multiplier
    for key, value, unset in (
        ("logit_scale", scale, 1.0),
        ("final_logit_softcapping", c.final_logit_softcapping, 0.0),
        ("embedding_scale", c.input_embedding_scale, 1.0),
    ):
        if value != unset:
            values[key] = ("float32", value)
    if c.hidden_act != "silu":
        values["hidden_activation"] = ("string", c.hidden_act)
    return values
