"""Between Hugging Face folders and GGUF files: targets and drafters."""

from pathlib import Path
from typing import Any, Final

import torch

from .drafters.checkpoint import read_checkpoint
from .drafters.config import check_against_target
from .drafters.resolve import Overrides
from .drafters.target_shape import target_shape
from .drafters.to_gguf import write_drafter
from .drafters.to_hf import write_folder
from .gguf import (
    GGUFFile,
    Progress,
    QuantTensor,
    qwen35_metadata,
    qwen35_tensors,
    tokenizer_metadata,
    typed_metadata,
    write_gguf,
)
from .hf import CheckpointError, open_safetensors, read_config

__all__ = ["convert_drafter", "convert_target", "prepare_drafter"]

_MODELS: Final = ("qwen3_5", "qwen3_5_text")
# general.file_type by the type of the largest tensor; it is a hint for people
_FILE_TYPES: Final = {"F32": 0, "F16": 1, "BF16": 32}


def convert_target(
    folder: str | Path, path: str | Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write a dense Qwen3.5-type model as a ``qwen35`` GGUF with its tokenizer.

    Args:
        folder: ``config.json``, safetensors, ``tokenizer.json`` and ``tokenizer_config.json``.
        path: the file; it appears complete or not at all.
        dtype: of the matrices: float32, float16 or bfloat16; None keeps each one's own.

    Raises:
        CheckpointError, GGUFError: another model, or a file that is missing or malformed.
        OSError: the file cannot be written.
    """
    folder = Path(folder)
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
    folder: str | Path,
    path: str | Path,
    *,
    target: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a drafter as an upstream ``dflash`` GGUF.

    Args:
        folder: a drafter in the layout of z-lab, speculators or DSpark.
        path: the file; it appears complete or not at all.
        target: GGUF of its target, whose tokenizer the file gets; llama.cpp needs it.
        dtype: of plain matrices: float32, float16 or bfloat16; None keeps each one's own.

    Raises:
        CheckpointError, GGUFError: not a drafter, or one that the format cannot express.
        OSError: the file cannot be written.
    """
    folder = Path(folder)
    checkpoint = read_checkpoint(folder)
    tokenizer = None
    if target is not None:
        with GGUFFile.open(target) as file:
            keys = typed_metadata(file)
        tokenizer = {k: v for k, v in keys.items() if k.startswith("tokenizer.")}
        if "tokenizer.ggml.tokens" not in tokenizer:
            raise CheckpointError(f"{target}: must have a tokenizer, got a file without one")
    write_drafter(
        path,
        checkpoint,
        name=folder.name,
        context_length=_context_length(folder),
        tokenizer=tokenizer,
        dtype=dtype,
        file_type=_file_type([*checkpoint.tensors.items()]) if dtype is None else _of(dtype),
    )


def prepare_drafter(
    path: str | Path,
    folder: str | Path,
    *,
    target: str | Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a drafter as a Hugging Face folder that unmodified vLLM and SGLang load.

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
    shape = None if target is None else target_shape(target)
    overrides = None
    if shape is not None:
        overrides = Overrides(num_target_layers=shape.num_layers, vocab_size=shape.vocab_size)
    checkpoint = read_checkpoint(path, overrides=overrides)
    if shape is not None:
        check_against_target(checkpoint.config, shape, str(path))
    write_folder(folder, checkpoint, dtype=dtype, progress=progress)


def _context_length(folder: Path) -> int:
    config = read_config(folder)
    inner = config.get("transformer_layer_config")
    scope: dict[str, Any] = inner if isinstance(inner, dict) else config
    value = scope.get("max_position_embeddings")
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{folder / 'config.json'}: max_position_embeddings must be at least 1, got {value!r}"
        )
    return value


def _of(dtype: torch.dtype) -> int | None:
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return _FILE_TYPES.get(names.get(dtype, ""))


def _file_type(tensors: list[tuple[str, QuantTensor]]) -> int | None:
    largest = max(tensors, key=lambda t: t[1].nbytes)[1]
    return _FILE_TYPES.get(largest.type_name)
