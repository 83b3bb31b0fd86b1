"""Writes a drafter as a Hugging Face folder that vLLM, SGLang and z-lab's package load."""

import json
import logging
import os
import secrets
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from ..dtypes import INTEGERS, PLAIN
from ..fields import CheckpointError
from ..gguf import Progress, QuantTensor, Stored, retyped
from ..gguf.types import ggml_type_of
from ..gguf.writer import error_about
from ..safetensors_file import write_safetensors
from .attention import FULL, SLIDING
from .checkpoint import DrafterCheckpoint
from .config import DrafterConfig
from .rope import RopeConfig, magnitude

__all__ = ["hf_config", "hf_notes", "hf_tensors", "write_folder"]

_log = logging.getLogger(__name__)

_ARCHITECTURES: Final = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",  # a bare DSparkDraftModel is DeepSeek-V4 in many vLLM releases
}
_NAMES: Final = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def write_folder(
    folder: str | Path,
    checkpoint: DrafterCheckpoint,
    *,
    context_length: int | None = None,
    num_target_layers: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``; the folder appears complete or not at all.

    What other engines would leave out of the drafter's arithmetic is logged, one line each: see
    :func:`hf_notes`.

    Args:
        folder: must not exist yet, or be empty.
        checkpoint: the drafter, from a GGUF file or a folder.
        context_length: positions it was trained for, where the checkpoint does not know.
        num_target_layers: depth of the target, where the checkpoint does not know it.
        dtype: of the weights: float32, float16 or bfloat16; None: that of the plain matrices if
            they agree, else bfloat16. A vector that would be rounded stays float32.
        progress: called with the tensor's name, bytes done and bytes in all.

    Raises:
        CheckpointError: Hugging Face's keys cannot express the drafter, or the target's depth is
            not known.
        OSError: the folder cannot be written, or is not empty.
    """
    folder = Path(folder)
    where = str(folder)
    dtype = _dtype(checkpoint) if dtype is None else dtype
    if dtype not in _NAMES:
        raise CheckpointError(f"{folder}: dtype must be float32, float16 or bfloat16, got {dtype}")
    config = hf_config(
        checkpoint.config,
        where=where,
        context_length=context_length,
        num_target_layers=num_target_layers,
        dtype=dtype,
    )
    tensors = hf_tensors(checkpoint, dtype)
    mask = tensors.pop("mask_embedding", None)
    if folder.exists():
        if not folder.is_dir():
            raise FileExistsError(f"{folder}: must be a new or an empty folder, got a file")
        if any(folder.iterdir()):
            raise FileExistsError(
                f"{folder}: must not exist yet or be empty, got one that is not empty"
            )
        if folder.samefile(Path.cwd()):  # replaced, it would no longer be where the caller is
            raise FileExistsError(f"{folder}: must not be the current folder; name a new one in it")
    folder = Path(os.path.realpath(folder))  # a link to a folder stays
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{Path(where).parent}: must be a folder to write {folder.name} to")
    temporary = folder.with_name(f".{folder.name[:60]}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        write_safetensors(temporary / "model.safetensors", tensors, progress=progress)
        if isinstance(mask, QuantTensor):
            row = {
                "mask_token_id": checkpoint.config.mask_token_id,
                "embedding": mask.to_dense().clone(),
            }
            torch.save(row, temporary / "mask_embedding.pt")
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        os.replace(temporary, folder)
    except OSError as error:
        raise error_about(error, Path(where)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    known = checkpoint.config.context_length or context_length
    for note in hf_notes(replace(checkpoint.config, context_length=known)):
        _log.warning("%s: %s", where, note)


def hf_config(
    config: DrafterConfig,
    *,
    where: str = "config.json",
    context_length: int | None = None,
    num_target_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """A ``config.json`` in the published layout.

    Float32 numbers of a GGUF file are written as the shortest decimal that is the same float32, so
    that 1e-6 comes back as 1e-06.

    Args:
        config: of the drafter.
        where: the folder, for messages.
        context_length: positions it was trained for, where ``config`` does not say.
        num_target_layers: depth of the target, where ``config`` does not say.
        dtype: of the weights.

    Raises:
        CheckpointError: the layout cannot express the drafter, or the target's depth is not known.
    """
    c = config
    depth = c.num_target_layers or num_target_layers
    if depth is None:
        raise CheckpointError(
            f"{where}: num_target_layers must be known, since z-lab's package and SGLang read it, "
            "got nothing; pass the target"
        )
    inner: dict[str, Any] = {
        "block_size": c.block_size,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": [*c.target_layer_ids],
    }
    out: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[c.kind]],
        "model_type": "qwen3",
        "torch_dtype": _NAMES[dtype],
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.hidden_act,
        "rms_norm_eps": _decimal(c.rms_norm_eps),
        "attention_bias": c.attention_bias,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": c.context_length or context_length or _longest(c.rope),
        "num_target_layers": depth,
        "block_size": c.block_size,
        "rope_parameters": _rope(where, c.rope, c.head_dim),
    }
    if c.target_hidden_size != c.hidden_size:
        out["target_hidden_size"] = c.target_hidden_size
    if c.draft_vocab_size != c.vocab_size:
        out["draft_vocab_size"] = c.draft_vocab_size
    out |= _attention(where, c)
    for key, value, default in (
        ("attention_sink_bias", c.attention_sinks, False),
        ("attention_value_scale", _decimal(c.value_scale), 1.0),
        ("use_aux_hidden_state", c.use_aux_hidden_state, True),
        ("input_embedding_scale", _decimal(c.input_embedding_scale), 1.0),
        ("output_multiplier", _decimal(c.output_multiplier), 1.0),
        ("final_logit_softcapping", _decimal(c.final_logit_softcapping), 0.0),
    ):
        if value != default:
            inner[key] = value
    if c.kind == "dflash" and c.output_multiplier != 1:
        out["logit_scale"] = _decimal(c.output_multiplier)  # what vLLM calls it for DFlash
    if c.kind == "dflash2":
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            inner[key] = getattr(c, key)
    if c.kind == "dspark":
        out |= {
            "markov_rank": c.markov_rank,
            "markov_head_type": c.markov_head_type,
            "enable_confidence_head": c.confidence is not None,
            # not in dflash_config: vLLM would take the drafter for DFlash and refuse it
            "sample_from_anchor": c.sample_from_anchor,
        }
        if c.confidence is not None:
            out["confidence_head_with_markov"] = c.confidence == "hidden+markov"
        inner |= {
            "projector_type": "dspark",
            "markov_rank": c.markov_rank,
            "markov_head_type": c.markov_head_type,
        }
        if c.logit_scale != 1:
            out["logit_scale"] = _decimal(c.logit_scale)
    return {**out, "dflash_config": inner}


def hf_notes(config: DrafterConfig) -> list[str]:
    """What is assumed in the folder, and what other engines leave out of the drafter's arithmetic.

    Output stays what the target would say; what suffers is acceptance.
    """
    c, lines = config, []
    if c.context_length is None:
        lines.append(
            f"max_position_embeddings: the drafter does not say, {_longest(c.rope)} is written, "
            "and engines refuse longer texts"
        )
    if c.kind == "dflash":
        for name, off in (("final_logit_softcapping", 0.0), ("input_embedding_scale", 1.0)):
            if getattr(c, name) != off:
                lines.append(
                    f"vLLM without the torch-dflash plugin ignores {name} in a DFlash drafter"
                )
    if c.rope.rotary_dim != c.head_dim:
        lines.append(
            "z-lab's package and SGLang rotate whole heads and ignore partial_rotary_factor"
        )
    if any(layer.causal == (layer.window is None) for layer in c.layers):
        lines.append("SGLang takes exactly the sliding layers as causal, whatever is_causal says")
    if c.draft_vocab_size != c.vocab_size:
        lines.append("SGLang drafts with the target's whole head, not with a reduced vocabulary")
    if c.kind == "dspark" and not c.sample_from_anchor:
        lines.append("SGLang reads drafts from the anchor's row on: every token one row early here")
    if c.markov_head_type in ("gated", "rnn"):
        lines.append(f"vLLM runs vanilla Markov heads only, not {c.markov_head_type} ones")
    return lines


def hf_tensors(checkpoint: DrafterCheckpoint, dtype: torch.dtype) -> dict[str, Stored]:
    """Tensors under their published names: floats in ``dtype``, ``d2t`` as offsets.

    Args:
        checkpoint: the drafter.
        dtype: of the weights; a vector or convolution base that it would round stays float32.
    """
    out: dict[str, Stored] = {}
    kind = ggml_type_of(dtype)
    if dtype not in _NAMES or kind is None:
        raise CheckpointError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    for name, tensor in checkpoint.tensors.items():
        if tensor.type_name in INTEGERS:
            ids = tensor.to_dense().to(torch.int64)  # only d2t
            out[name] = QuantTensor.from_tensor(ids - torch.arange(len(ids), device=ids.device))
        elif len(tensor.shape) == 1 or name.endswith(".base_kernel"):
            values = tensor.to_dense()
            rounded = values.to(dtype)
            exact = torch.equal(rounded.to(values.dtype), values)
            out[name] = QuantTensor.from_tensor((rounded if exact else values.float()).contiguous())
        else:
            out[name] = retyped(tensor, kind, f"tensor {name!r}")
    return out


def _dtype(checkpoint: DrafterCheckpoint) -> torch.dtype:
    """What the plain matrices agree on, else bfloat16."""
    found = {t.type_name for t in checkpoint.tensors.values() if len(t.shape) > 1}
    found -= INTEGERS
    # a GGUF keeps the bases of convolutions as F32 whatever the rest is
    bases = {n for n in checkpoint.tensors if n.endswith(".base_kernel")}
    if bases and len(found) > 1:
        found = {
            t.type_name
            for n, t in checkpoint.tensors.items()
            if len(t.shape) > 1 and n not in bases
        }
    if len(found) == 1 and (name := next(iter(found))) in PLAIN:
        return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    return torch.bfloat16


def _attention(where: str, c: DrafterConfig) -> dict[str, Any]:
    sliding = [layer.window is not None for layer in c.layers]
    causal = [layer.causal for layer in c.layers]
    windows = sorted({layer.window for layer in c.layers if layer.window is not None})
    if len(windows) > 1:
        raise CheckpointError(f"{where}: config.json must have one window, got {windows}")
    out: dict[str, Any] = {
        "layer_types": [SLIDING if s else FULL for s in sliding],
        "use_sliding_window": any(sliding),
        "sliding_window": windows[0] if windows else None,
        "max_window_layers": c.num_layers,
    }
    if len({*causal}) == 1:
        out["is_causal"] = causal[0]
    elif causal != sliding:  # without is_causal, exactly the sliding layers are causal
        raise CheckpointError(
            f"{where}: config.json must have causality for all, none or the sliding layers, got "
            f"causal {causal} with sliding {sliding}"
        )
    return out


def _rope(where: str, rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    if rope.freq_factors is not None:
        raise CheckpointError(f"{where}: rope_parameters has no place for frequency factors")
    out: dict[str, Any] = {"rope_type": rope.type, "rope_theta": _decimal(rope.theta)}
    if rope.rotary_dim != head_dim:
        part = rope.rotary_dim / head_dim
        # readers take the integer part of the product
        out["partial_rotary_factor"] = (
            part
            if int(head_dim * part) == rope.rotary_dim
            else ((rope.rotary_dim + 0.5) / head_dim)
        )
    if rope.type != "default":
        out["factor"] = _decimal(rope.factor)
    if rope.type != "yarn":
        return out
    out |= {
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": _decimal(rope.beta_fast),
        "beta_slow": _decimal(rope.beta_slow),
    }
    if rope.attention_factor is not None:
        # a GGUF holds the ratio to 0.1 ln f + 1
        unit = magnitude(rope.factor)
        out["attention_factor"] = _decimal(rope.attention_factor, lambda x: _float32(x / unit))
    for key in ("mscale", "mscale_all_dim"):
        if getattr(rope, key) is not None:
            out[key] = _decimal(getattr(rope, key))
    if not rope.truncate:
        out["truncate"] = False
    return out


def _longest(rope: RopeConfig) -> int:
    """Positions a drafter without the key is taken to reach: what transformers' class fills in."""
    original = rope.original_max_position_embeddings
    return 32768 if original is None else int(original * rope.factor)


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _decimal(value: float, stored: Callable[[float], float] = _float32) -> float:
    """The number with the fewest digits that a GGUF would store as the same float32.

    A number that is more precise than float32 comes from JSON and stays as it is.
    """
    if stored is _float32 and _float32(value) != value:
        return value
    for digits in range(1, 17):
        short = float(f"{value:.{digits}g}")
        if stored(short) == stored(value):
            return short
    return value
