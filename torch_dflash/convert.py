"""Between Hugging Face folders and GGUF files: targets and drafters."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from .drafters.checkpoint import DrafterCheckpoint, read_checkpoint
from .drafters.config import check_against_target
from .drafters.names import Layout
from .drafters.outtypes import FILE_TYPES, OUTTYPES
from .drafters.resolve import Overrides
from .drafters.target_ends import with_target_ends
from .drafters.target_shape import target_shape
from .drafters.to_gguf import write_drafter
from .drafters.to_hf import write_folder
from .gguf import (
    GGUFFile,
    Progress,
    QuantTensor,
    Typed,
    qwen35_metadata,
    qwen35_tensors,
    tokenizer_metadata,
    typed_metadata,
    write_gguf,
)
from .gguf.writer import check_other_file
from .hf import CheckpointError, open_safetensors, read_config

__all__ = ["convert_drafter", "convert_target", "prepare_drafter"]

_log = logging.getLogger(__name__)

_MODELS: Final = ("qwen3_5", "qwen3_5_text")


def convert_target(
    folder: str | Path, path: str | Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write a dense Qwen3.5-type model as a ``qwen35`` GGUF with its tokenizer.

    Args:
        folder: ``config.json``, safetensors, ``tokenizer.json`` and ``tokenizer_config.json``.
        path: the file, none of these; it appears complete or not at all.
        dtype: of the matrices: float32, float16 or bfloat16; None keeps each one's own.

    Raises:
        CheckpointError, GGUFError: another model, or a file that is missing or malformed.
        OSError: the file cannot be written.
    """
    folder = Path(folder)
    check_other_file(Path(path), folder)
    config = read_config(folder)
    text = config.get("text_config", config)
    if not isinstance(text, dict) or config.get("model_type") not in _MODELS:
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type must be {' or '.join(_MODELS)}, got "
            f"{config.get('model_type')!r}"
        )
    source = open_safetensors(folder)
    tensors = list(qwen35_tensors(text, source, dtype=dtype))
    metadata = qwen35_metadata(text, name=folder.name, file_type=_file_type(tensors))
    metadata |= tokenizer_metadata(folder, vocab_size=text["vocab_size"])
    write_gguf(path, "qwen35", metadata, tensors)


def convert_drafter(
    source: str | Path,
    path: str | Path,
    *,
    target: str | Path | None = None,
    outtype: str | None = None,
    layout: Layout = "upstream",
    alignment: int | None = None,
    overrides: Overrides | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a drafter as a GGUF file.

    Memory beyond the mapped files stays at a few tens of megabytes, whatever the size.

    Args:
        source: a folder in the layout of z-lab, speculators or DSpark, or a GGUF file of any
            layout.
        path: another file than what is read of these two; it appears complete or not at all.
        target: GGUF or folder of its target. The file gets its tokenizer, without which llama.cpp
            does not load it, and what the drafter leaves to it; that they match is checked.
        outtype: ``f32``, ``f16``, ``bf16``, ``q8_0``, ``q6_k``, ``q5_k``, ``q4_k``, ``iq4_xs`` or
            ``q4_0``: type of most matrices; None keeps each one's own.
            :func:`~torch_dflash.drafters.outtypes.storage_type` says what the others get.
        layout: ``upstream``, which llama.cpp and its forks load, or ``lucebox``.
        alignment: of the tensor data; None: that of a GGUF source, else 32.
        overrides: what the caller knows better than the source.
        progress: called with the tensor's name, bytes done and bytes in all.

    Raises:
        CheckpointError, GGUFError: not a drafter, one that does not match the target, or one that
            the format cannot express; ``path`` is a file of ``source`` or ``target``.
        OSError: the file cannot be written.
    """
    source = Path(source)
    if outtype is not None and outtype.lower() not in OUTTYPES:
        raise CheckpointError(
            f"{path}: outtype must be one of {', '.join(OUTTYPES)}, got {outtype!r}"
        )
    if layout not in ("upstream", "lucebox"):
        raise CheckpointError(f"{path}: layout must be upstream or lucebox, got {layout!r}")
    check_other_file(Path(path), source, target)
    checkpoint = _read(source, target, overrides)
    own: dict[str, Typed] = {}
    if checkpoint.format == "gguf":
        with GGUFFile.open(source) as file:
            own, found = typed_metadata(file), file.alignment
        alignment = found if alignment is None else alignment
    tokenizer = _tokenizer(target, own, checkpoint.config.vocab_size)
    if tokenizer is None and layout == "upstream":
        _log.warning("%s: without a tokenizer llama.cpp does not load it; pass the target", path)
    # a folder's name may have dots: Qwen3.8-27B-DFlash2
    name = source.resolve().name if source.is_dir() else source.stem
    name = os.fsencode(name).decode(errors="replace")
    if "general.name" in own:
        name = own["general.name"].value
    write_drafter(
        path,
        with_target_ends(checkpoint, target),
        name=name,
        tokenizer=tokenizer,
        outtype=None if outtype is None else OUTTYPES[outtype.lower()],
        layout=layout,
        alignment=32 if alignment is None else alignment,
        progress=progress,
    )


def prepare_drafter(
    path: str | Path,
    folder: str | Path,
    *,
    target: str | Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a drafter as a Hugging Face folder that unmodified vLLM (and SGLang) load.

    Args:
        path: a GGUF file (or a folder in another layout, such as speculators').
        folder: must not exist yet, or be empty; it appears complete or not at all.
        target: its target, a GGUF file or a folder with ``config.json``. It says how deep it is
            and how large its vocabulary, which a GGUF drafter leaves to it, and is checked.
        dtype: of the weights: float32, float16 or bfloat16; None: that of the plain matrices if
            they agree, else bfloat16. Quantized weights are decoded.
        progress: called with the tensor's name, bytes done and bytes in all.

    Raises:
        CheckpointError, GGUFError: not a drafter, one that does not match the target, or one that
            the layout cannot express.
        OSError: the folder cannot be written.
    """
    write_folder(folder, _read(Path(path), target, None), dtype=dtype, progress=progress)


def _read(
    source: Path, target: str | Path | None, overrides: Overrides | None
) -> DrafterCheckpoint:
    """A drafter, checked against its target if there is one."""
    if target is None:
        return read_checkpoint(source, overrides=overrides)
    shape = target_shape(target)
    overrides = replace(
        overrides or Overrides(),
        num_target_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
    )
    checkpoint = read_checkpoint(source, overrides=overrides)
    check_against_target(checkpoint.config, shape, str(source))
    return checkpoint


def _tokenizer(
    target: str | Path | None, own: dict[str, Typed], vocab_size: int
) -> dict[str, Typed] | None:
    """``tokenizer.*`` keys of the target, or of a GGUF source that has them."""
    keys = own
    if target is not None and Path(target).is_dir():
        keys = tokenizer_metadata(target, vocab_size=vocab_size)
    elif target is not None:
        with GGUFFile.open(target) as file:
            keys = typed_metadata(file)
    found = {k: v for k, v in keys.items() if k.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" in found:
        return found
    if target is not None:
        raise CheckpointError(f"{target}: must have a tokenizer, got a file without one")
    return None


def _file_type(tensors: list[tuple[str, QuantTensor]]) -> int | None:
    largest = max(tensors, key=lambda t: t[1].nbytes)[1]
    return FILE_TYPES.get(largest.type_name)
