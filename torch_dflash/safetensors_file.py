"""Writes safetensors files a piece at a time, so that a checkpoint need not fit in memory."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .gguf import Progress
from .gguf.deferred import Stored, pieces_of

__all__ = ["write_safetensors"]

_DTYPES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Stored],
    *,
    progress: Progress | None = None,
) -> None:
    """Write a file; the caller sees to it that a half-written one does not stay.

    Args:
        path: the file.
        tensors: name -> tensor of a plain type. Wide types come first in the file, so that every
            tensor is aligned to its own values.
        progress: called after every piece.

    Raises:
        ValueError: a tensor of a type that safetensors does not have.
        OSError: the file cannot be written.
    """
    for name, tensor in tensors.items():
        if tensor.type_name not in _DTYPES:
            raise ValueError(
                f"{path}: tensor {name!r} must be one of {', '.join(_DTYPES)}, "
                f"got {tensor.type_name}"
            )
    ordered = sorted(tensors.items(), key=lambda item: -_DTYPES[item[1].type_name])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": tensor.type_name,
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, tensor in ordered:
            for piece in pieces_of(tensor):
                file.write(piece.contiguous().numpy().data)
                done += piece.numel()
                if progress is not None:
                    progress(name, done, end)
        file.flush()
        os.fsync(file.fileno())
