"""Writes a drafter as a Hugging Face folder, which unmodified vLLM and z-lab's package load."""

import json
import math
import os
import secrets
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..fields import CheckpointError, Fields
from ..gguf import GGUFFile
from ..hf import read_config
from .checkpoint import DrafterCheckpoint
from .config import DrafterConfig
from .rope import RopeConfig

__all__ = ["hf_config", "hf_tensors", "trained_context", "write_folder"]

_ARCHITECTURES: Final = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
_DTYPES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_folder(
    folder: str | Path,
    checkpoint: DrafterCheckpoint,
    *,
    context_length: int,
    num_target_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write ``config.json`` and ``model.safetensors``; the folder appears complete or not at all.

    Tensors are decoded one at a time, so memory stays at the largest of them.

    Args:
        folder: must not exist, or be empty.
        checkpoint: the drafter.
        context_length: positions it was trained for; :func:`trained_context` reads them.
        num_target_layers: depth of its target; None: the checkpoint says.
        dtype: of every float tensor: float32, float16 or bfloat16.

    Raises:
        CheckpointError: the format cannot express the drafter.
        OSError: the folder cannot be written, or is not empty.
    """
    folder = Path(folder)
    if dtype not in _DTYPES:
        raise CheckpointError(f"{folder}: dtype must be float32, float16 or bfloat16, got {dtype}")
    config = hf_config(
        checkpoint.config,
        where=str(folder),
        context_length=context_length,
        num_target_layers=num_target_layers,
        dtype=dtype,
    )
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder.parent}: must be a folder to write {folder.name} to")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        _write_safetensors(temporary / "model.safetensors", checkpoint, dtype)
        mask = checkpoint.tensors.get("mask_embedding")
        if mask is not None:
            state = {
                "mask_token_id": checkpoint.config.mask_token_id,
                "embedding": mask.to_dense().reshape(-1).clone(),
            }
            torch.save(state, temporary / "mask_embedding.pt")
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def trained_context(path: str | Path) -> int:
    """Positions that a drafter was trained for, from its folder or ``.gguf`` file.

    Raises:
        CheckpointError: the file does not say.
    """
    path = Path(path)
    if path.is_dir():
        raw = read_config(path)
        inner = raw.get("transformer_layer_config")
        scope = inner if isinstance(inner, dict) else raw
        fields, key = Fields(str(path / "config.json"), [("", scope)]), "max_position_embeddings"
    else:
        with GGUFFile.open(path) as file:
            fields = Fields(str(path), [("", file.metadata)])
        key = f"{fields.require(str, 'arch', 'general.architecture')}.context_length"
    value = fields.optional(int, "context_length", key, low=1)
    if value is None:
        fields.missing((key,))
    return value


def hf_config(
    config: DrafterConfig,
    *,
    where: str,
    context_length: int,
    num_target_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """``config.json`` of a drafter; arguments and errors as for :func:`write_folder`."""
    c = config
    depth = num_target_layers if c.num_target_layers is None else c.num_target_layers
    if depth is None:
        raise CheckpointError(
            f"{where}: num_target_layers must be known, got a file that does not say; pass the "
            "target"
        )
    draft: dict[str, Any] = {
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": [*c.target_layer_ids],
        "block_size": c.block_size,
    }
    top: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[c.kind]],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": _short(c.rms_norm_eps),
        "hidden_act": c.hidden_act,
        "attention_bias": c.attention_bias,
        "tie_word_embeddings": False,
        "max_position_embeddings": context_length,
        "num_target_layers": depth,
        "block_size": c.block_size,
        "rope_parameters": _rope(where, c.rope, c.head_dim),
    }
    if c.target_hidden_size != c.hidden_size:
        top["target_hidden_size"] = c.target_hidden_size
    if c.draft_vocab_size != c.vocab_size:
        top["draft_vocab_size"] = c.draft_vocab_size
    top |= _attention(where, c)
    for key, value, unset in (
        ("use_aux_hidden_state", c.use_aux_hidden_state, True),
        ("attention_sink_bias", c.attention_sinks, False),
        ("attention_value_scale", c.value_scale, 1.0),
        ("input_embedding_scale", c.input_embedding_scale, 1.0),
        ("output_multiplier", c.output_multiplier, 1.0),
        ("final_logit_softcapping", c.final_logit_softcapping, 0.0),
    ):
        if value != unset:
            draft[key] = _short(value) if isinstance(value, float) else value
    if c.kind == "dflash2":
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            draft[key] = getattr(c, key)
    if c.kind == "dspark":
        draft |= {"projector_type": "dspark"}
        top |= {
            "markov_rank": c.markov_rank,
            "markov_head_type": c.markov_head_type,
            "enable_confidence_head": c.confidence is not None,
            "confidence_head_with_markov": c.confidence == "hidden+markov",
            "sample_from_anchor": c.sample_from_anchor,
        }
        if c.logit_scale != 1:
            top["logit_scale"] = _short(c.logit_scale)
    return top | {"dflash_config": draft}


def hf_tensors(
    checkpoint: DrafterCheckpoint, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, Tensor]]:
    """``(name, shape, dtype, values)`` of every tensor, decoded as it is asked for."""
    for name, _, to in _table(checkpoint, dtype):
        values = checkpoint.tensors[name].to_dense()
        if name == "d2t":  # Hugging Face files hold offsets
            values = values - torch.arange(len(values))
        yield name, tuple(values.shape), to, values.to(to).contiguous()


def _table(
    checkpoint: DrafterCheckpoint, dtype: torch.dtype
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    table = [
        (name, t.shape, torch.int64 if name == "d2t" else dtype)
        for name, t in checkpoint.tensors.items()
        if name != "mask_embedding"  # has a file of its own
    ]
    return sorted(table, key=lambda row: row[2] != torch.int64)  # wide ones first: aligned


def _write_safetensors(path: Path, checkpoint: DrafterCheckpoint, dtype: torch.dtype) -> None:
    """The header first, then one tensor after the other: safetensors' own writer wants them all."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, kind in _table(checkpoint, dtype):
        start, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {
            "dtype": "I64" if kind == torch.int64 else _DTYPES[kind],
            "shape": [*shape],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for *_, values in hf_tensors(checkpoint, dtype):
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _rope(where: str, rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    if rope.freq_factors is not None:
        raise CheckpointError(
            f"{where}: a Hugging Face config must have a plain, linear or yarn rope, got "
            "frequency factors"
        )
    values: dict[str, Any] = {"rope_type": rope.type, "rope_theta": _short(rope.theta)}
    if rope.rotary_dim != head_dim:
        values["partial_rotary_factor"] = rope.rotary_dim / head_dim
    if rope.type == "default":
        return values
    values["factor"] = _short(rope.factor)
    if rope.type == "linear":
        return values
    values |= {
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": _short(rope.beta_fast),
        "beta_slow": _short(rope.beta_slow),
    }
    if rope.attention_factor is not None:
        values["attention_factor"] = _short(rope.attention_factor)
    elif rope.mscale and rope.mscale_all_dim:
        values |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    if not rope.truncate:
        values["truncate"] = False
    return values


def _attention(where: str, c: DrafterConfig) -> dict[str, Any]:
    sliding = [layer.window is not None for layer in c.layers]
    causal = [layer.causal for layer in c.layers]
    windows = {layer.window for layer in c.layers if layer.window is not None}
    if len(windows) > 1:
        raise CheckpointError(
            f"{where}: a Hugging Face config must have one window, got {sorted(windows)}"
        )
    values: dict[str, Any] = {
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "sliding_window": windows.pop() if windows else None,
        "use_sliding_window": any(sliding),
    }
    if len({*causal}) == 1:
        values["is_causal"] = causal[0]
    elif causal != sliding:  # without the key, sliding layers are causal and the others are not
        raise CheckpointError(
            f"{where}: a Hugging Face config must have causality for all layers, for none, or for "
            f"the sliding ones, got causal {causal} with sliding {sliding}"
        )
    return values


def _short(value: float) -> float:
    """A float32 of a GGUF as the decimal that was meant: 1e-06 instead of 9.99999997e-07.

    >>> _short(9.999999974752427e-07), _short(0.1), _short(1.3465735912322998)
    (1e-06, 0.1, 1.3465736)
    """
    near = float(f"{value:.8g}")
    return near if struct.pack("f", near) == struct.pack("f", value) else value
