"""Writes a drafter as a GGUF file: upstream's ``dflash``, which llama.cpp loads, or lucebox's."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..fields import CheckpointError
from ..gguf import GGUFError, Progress, QuantTensor, Stored, Typed, retyped, with_row, write_gguf
from ..gguf.deferred import pieces_of
from .checkpoint import DrafterCheckpoint
from .config import DrafterConfig
from .lucebox import LUCEBOX_ARCH, lucebox_keys, lucebox_notes
from .names import Layout, gguf_name
from .outtypes import FILE_TYPES, storage_type
from .rope import RopeConfig, magnitude

__all__ = ["dflash_metadata", "dflash_tensors", "gguf_notes", "write_drafter"]

_log = logging.getLogger(__name__)


def write_drafter(
    path: str | Path,
    checkpoint: DrafterCheckpoint,
    *,
    name: str,
    context_length: int | None = None,
    tokenizer: Mapping[str, Typed] | None = None,
    outtype: str | None = None,
    layout: Layout = "upstream",
    alignment: int = 32,
    progress: Progress | None = None,
) -> None:
    """Write a drafter; the file appears complete or not at all.

    What llama.cpp (or lucebox) would leave out or refuse is logged, one line each: see
    :func:`gguf_notes`.

    Args:
        path: the file.
        checkpoint: the drafter.
        name: ``general.name``.
        context_length: positions it was trained for, where the checkpoint does not know.
        tokenizer: ``tokenizer.*`` keys of its target; llama.cpp wants them, lucebox has none. None
            leaves only the mask token and the vocabulary's size.
        outtype: type of most matrices, a value of :data:`~.outtypes.OUTTYPES`; None keeps each
            one's own. :func:`~.outtypes.storage_type` says what the others get.
        layout: whose file it is.
        alignment: of the tensor data.
        progress: called with the tensor's name, bytes done and bytes in all.

    Raises:
        CheckpointError: the format cannot express the drafter.
        OSError: the file cannot be written.
    """
    where = str(path)
    stored = dict(dflash_tensors(checkpoint, where=where, outtype=outtype, layout=layout))
    metadata = dflash_metadata(
        checkpoint.config,
        where=where,
        name=name,
        context_length=context_length,
        tokenizer=tokenizer,
        file_type=_file_type(stored),
        layout=layout,
    )
    arch = "dflash" if layout == "upstream" else LUCEBOX_ARCH
    try:
        write_gguf(path, arch, metadata, stored.items(), alignment=alignment, progress=progress)
    except (CheckpointError, GGUFError):
        raise
    except ValueError as error:  # a value that the type cannot hold, found while it was written
        raise CheckpointError(f"{where}: {error}") from None
    for note in gguf_notes(checkpoint, layout):
        _log.warning("%s: %s", where, note)


def dflash_metadata(
    config: DrafterConfig,
    *,
    where: str,
    name: str,
    context_length: int | None = None,
    tokenizer: Mapping[str, Typed] | None = None,
    file_type: int | None = None,
    layout: Layout = "upstream",
) -> dict[str, Typed]:
    """Metadata of a drafter.

    Args:
        config: of the drafter.
        where: the file, for messages.
        name, context_length, tokenizer, layout: as for :func:`write_drafter`.
        file_type: ``general.file_type``, such as 32 for BF16.

    Raises:
        CheckpointError: the format cannot express the drafter.
    """
    c = config
    if not c.use_aux_hidden_state:
        raise CheckpointError(
            f"{where}: a drafter GGUF must have fc, got use_aux_hidden_state false"
        )
    positions = c.context_length or context_length
    if positions is None:
        raise CheckpointError(
            f"{where}: max_position_embeddings must be known, got a checkpoint that does not say; "
            "add it to config.json"
        )
    values: dict[str, tuple[str, Any]] = {
        "block_count": ("uint32", c.num_layers),
        "context_length": ("uint32", positions),
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
    if layout == "lucebox":
        tokenizer = None
        values = lucebox_keys(c, values)
    if tokenizer is None:
        values["vocab_size"] = ("uint32", c.vocab_size)
    elif len(tokenizer["tokenizer.ggml.tokens"].value) != c.vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer must have {c.vocab_size} tokens, got "
            f"{len(tokenizer['tokenizer.ggml.tokens'].value)}; use the target that the drafter was "
            "trained for"
        )
    general = {"type": Typed("string", "model"), "name": Typed("string", name)}
    if file_type is not None:
        general["file_type"] = Typed("uint32", file_type)
    general["quantization_version"] = Typed("uint32", 2)
    prefix = "dflash" if layout == "upstream" else LUCEBOX_ARCH
    mask = {"tokenizer.ggml.mask_token_id": Typed("uint32", c.mask_token_id)}
    return (
        {f"general.{k}": v for k, v in general.items()}
        | {f"{prefix}.{k}": Typed(*v) for k, v in values.items()}
        | dict(tokenizer or {})
        | (mask if layout == "upstream" else {})
    )


def dflash_tensors(
    checkpoint: DrafterCheckpoint,
    *,
    where: str,
    outtype: str | None = None,
    layout: Layout = "upstream",
) -> Iterator[tuple[str, Stored]]:
    """Tensors of a drafter by their names in the file; arguments as for :func:`write_drafter`.

    A mask embedding becomes a row of the embedding, which must then be there.
    """
    tensors = checkpoint.tensors
    mask = tensors.get("mask_embedding")
    if mask is not None and "embed_tokens.weight" not in tensors:
        raise CheckpointError(
            f"{where}: mask_embedding.pt becomes a row of the embedding, so embed_tokens must be "
            "there, got none; pass the target"
        )
    if "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors:
        raise CheckpointError(
            f"{where}: embed_tokens must come with lm_head, got it alone: llama.cpp would take it "
            "for the head; pass the target, whose head is meant"
        )
    for logical, tensor in tensors.items():
        if logical == "mask_embedding":
            continue
        name = gguf_name(logical, layout)
        if name is None:
            raise CheckpointError(f"{where}: a drafter GGUF must not hold {logical!r}, got it")
        about = f"tensor {logical!r}"
        stored = retyped(tensor, storage_type(logical, tensor, outtype), about)
        if logical == "embed_tokens.weight" and mask is not None:
            row = QuantTensor.from_tensor(mask.to_dense().float().view(1, -1))
            packed = torch.cat([*pieces_of(retyped(row, stored.ggml_type, about))])
            row = QuantTensor(packed, stored.ggml_type, row.shape)
            stored = with_row(stored, checkpoint.config.mask_token_id, row, about)
        yield name, stored


def gguf_notes(checkpoint: DrafterCheckpoint, layout: Layout = "upstream") -> list[str]:
    """What readers of the layout leave out of this drafter or refuse, one line each."""
    c, tensors = checkpoint.config, checkpoint.tensors
    if layout == "lucebox":
        return lucebox_notes(c, tensors)
    lines = []
    if (c.rope.beta_fast, c.rope.beta_slow) != (32.0, 1.0) and c.rope.type == "yarn":
        lines.append(
            "llama.cpp ignores yarn betas other than 32 and 1 in a drafter, got "
            f"{c.rope.beta_fast:g} and {c.rope.beta_slow:g}"
        )
    if c.rope.type == "yarn" and not c.rope.truncate:
        lines.append("llama.cpp ignores truncate = false and rounds the ends of yarn's ramp")
    if len({layer.causal for layer in c.layers}) > 1:
        lines.append("llama.cpp has one causality for all layers and runs this one non-causal")
    if c.kind == "dflash" and (c.output_multiplier != 1 or c.final_logit_softcapping):
        lines.append("llama.cpp ignores the multiplier and the soft cap of a DFlash drafter")
    if c.selector_top_k is not None and c.selector_top_k * (c.selector_top_k + 1) > c.hidden_size:
        lines.append(
            f"llama.cpp refuses selector_top_k {c.selector_top_k} at hidden size {c.hidden_size}"
        )
    for what, is_so in (
        ("attention biases", c.attention_bias),
        (f"the {c.markov_head_type} Markov head", c.markov_head_type in ("gated", "rnn")),
        ("a confidence head on the hidden state alone", c.confidence == "hidden"),
        ("a target of another width", c.target_hidden_size != c.hidden_size),
    ):
        if is_so:
            lines.append(f"llama.cpp refuses a drafter with {what}; torch-dflash loads it")
    return lines


def _file_type(stored: Mapping[str, Stored]) -> int | None:
    """By the type that most values have."""
    sizes: dict[str, int] = {}
    for tensor in stored.values():
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.rows * tensor.columns
    return FILE_TYPES.get(max(sizes, key=lambda name: sizes[name]))


def _rope(where: str, rope: RopeConfig, head_dim: int) -> dict[str, tuple[str, Any]]:
    values: dict[str, tuple[str, Any]] = {
        "rope.freq_base": ("float32", rope.theta),
        # M-RoPE of a text: every pair turns by the temporal position
        "rope.dimension_sections": ("array[int32]", [head_dim // 2, 0, 0, 0]),
    }
    if rope.rotary_dim != head_dim:
        values["rope.dimension_count"] = ("uint32", rope.rotary_dim)
    if rope.freq_factors is not None:
        raise CheckpointError(
            f"{where}: a drafter GGUF must have a plain, linear or yarn rope, got frequency factors"
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
    if not rope.truncate:  # this key is ours
        values["rope.scaling.truncate"] = ("bool", False)
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
        raise CheckpointError(f"{where}: a drafter GGUF must have one window, got {sorted(sizes)}")
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
