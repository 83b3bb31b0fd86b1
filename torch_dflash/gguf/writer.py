"""Writes GGUF files through gguf-py, whole or not at all."""

import math
import os
import re
import secrets
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from .deferred import Stored, pieces_of
from .header import GGUFArray, GGUFError
from .reader import GGUFFile

__all__ = ["Progress", "Typed", "check_other_file", "error_about", "typed_metadata", "write_gguf"]

# the tensor that is written now, and how many of how many bytes are
Progress = Callable[[str, int, int], None]

_TYPES: Final = {t.name.lower(): t for t in GGUFValueType if t != GGUFValueType.ARRAY}
_INTEGERS: Final = {
    f"{sign}int{bits}": (-(1 << bits - 1) if not sign else 0, (1 << bits - (not sign)) - 1)
    for bits in (8, 16, 32, 64)
    for sign in ("u", "")
}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")  # what UTF-8 cannot hold
_MAX_ALIGNMENT: Final = 1 << 21  # a huge page; more would only be zeros between tensors
_MAX_NAME: Final = 63  # llama.cpp keeps a tensor's name in 64 bytes, the last one zero


class Typed(NamedTuple):
    """A metadata value and the type it is stored as, named as ``GGUFFile.metadata_type`` does.

    >>> Typed("array[int32]", [11, 11, 10, 0]).type
    'array[int32]'
    """

    type: str
    value: Any


def check_other_file(path: Path, *sources: str | os.PathLike[str] | None) -> None:
    """Refuse to write over a file that is read, whose only copy that may be.

    Args:
        path: to be written.
        sources: files, or folders whose files are read, but for GGUF files that lie in them.

    Raises:
        GGUFError: ``path`` is one of them, under this name or another.
    """
    read: list[Path] = []
    for source in (Path(s) for s in sources if s is not None):
        inside = source.iterdir() if source.is_dir() else [source]
        read += [f for f in inside if f == source or f.suffix != ".gguf"]
    if path.exists() and any(file.exists() and file.samefile(path) for file in read):
        raise GGUFError(f"{path}: must be another file than the source; name a new one")


def typed_metadata(file: GGUFFile) -> dict[str, Typed]:
    """Everything :func:`write_gguf` needs to write the metadata of ``file`` again.

    ``general.architecture`` and ``general.alignment`` are arguments there and left out here.
    """
    return {
        key: Typed(file.metadata_type(key), value)
        for key, value in file.metadata.items()
        if key not in ("general.architecture", "general.alignment")
    }


def write_gguf(
    path: str | os.PathLike[str],
    architecture: str,
    metadata: Mapping[str, Typed],
    tensors: Iterable[tuple[str, Stored]],
    *,
    alignment: int = 32,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF v3 file; it appears under its name complete or not at all.

    Args:
        path: the file; one that exists is replaced, also if ``tensors`` are views of it.
        architecture: ``general.architecture``.
        metadata: the other keys, in the order they are to have.
        tensors: names and tensors in file order; deferred ones are computed piece by piece.
        alignment: of the tensor data; a power of two, 8 to 2 MiB. Written to the file where it
            is not the default of 32.
        progress: called after every piece.

    Raises:
        GGUFError: a key, value or tensor that the format cannot hold, or ``path`` is a folder or a
            device.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: must be a folder to write {path.name} to")
    if path.exists() and not path.is_file():  # replacing would take a device from everybody
        raise GGUFError(f"{path}: must be new or a regular file to write, got a folder or device")
    # a shorter name, so that every name that the disk takes can be written
    temporary = path.with_name(f".{path.name[:60]}.{secrets.token_hex(4)}.tmp")
    writer = GGUFWriter(temporary, architecture)
    try:
        if not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise GGUFError(
                f"{path}: alignment must be a power of two of at least 8 and at most "
                f"{_MAX_ALIGNMENT}, got {alignment}"
            )
        if alignment == 32:
            writer.data_alignment = alignment
        else:
            writer.add_custom_alignment(alignment)
        for key, (kind, value) in metadata.items():
            _add_value(writer, path, key, kind, value)
        held: dict[str, Stored] = {}
        for name, tensor in tensors:
            _check_tensor(path, name, tensor, held)
            held[name] = tensor
            width = tensor.type.row_bytes(tensor.columns)
            writer.add_tensor_info(
                name,
                (*tensor.shape[:-1], width),
                np.dtype(np.uint8),
                tensor.nbytes,
                GGMLQuantizationType(tensor.ggml_type),
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if writer.fout:
            _write_data(writer.fout[0], held, alignment, progress)
            os.fsync(writer.fout[0].fileno())
        writer.close()
        with GGUFFile.open(temporary) as file:  # what we write, we can read
            if file.tensors.keys() != held.keys():
                raise GGUFError(f"{path}: the file must hold the tensors given, got others")
        os.replace(temporary, path)
    except OSError as error:
        raise error_about(error, path) from None
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


def _write_data(
    file: BinaryIO, tensors: Mapping[str, Stored], alignment: int, progress: Progress | None
) -> None:
    done, total = 0, sum(t.nbytes for t in tensors.values())
    file.write(bytes(-file.tell() % alignment))
    for name, tensor in tensors.items():
        for piece in pieces_of(tensor):
            file.write(piece.cpu().contiguous().numpy().data)
            done += piece.numel()
            if progress is not None:
                progress(name, done, total)
        file.write(bytes(-tensor.nbytes % alignment))


def error_about(error: OSError, path: Path) -> OSError:
    """The same error about the file that was asked for, not about the temporary one."""
    if error.errno is None:
        return error
    return OSError(error.errno, error.strerror, str(path))


def _add_value(writer: GGUFWriter, path: Path, key: str, kind: str, value: Any) -> None:
    if key in ("general.architecture", "general.alignment"):
        raise GGUFError(f"{path}: {key} must be given as an argument, got it as metadata")
    item = kind.removeprefix("array[").removesuffix("]")
    if item not in _TYPES or kind not in (item, f"array[{item}]"):
        raise GGUFError(f"{path}: {key!r} must have a type of GGUF, got {kind!r}")
    if kind == item:
        _check_scalar(path, key, item, value)
        writer.add_key_value(key, value, _TYPES[item])
        return
    if not isinstance(value, list | tuple | GGUFArray) or not len(value):
        raise GGUFError(f"{path}: {key!r} must be a non-empty list, got {value!r:.60}")
    values = list(value)
    for v in values:
        _check_scalar(path, key, item, v)
    writer.add_key_value(key, values, GGUFValueType.ARRAY, _TYPES[item])


def _check_scalar(path: Path, key: str, kind: str, value: Any) -> None:
    if kind == "string":
        good = isinstance(value, str) and not _SURROGATE.search(value)
    elif kind == "bool":
        good = isinstance(value, bool)
    elif kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    else:
        largest = 3.4028234663852886e38 if kind == "float32" else math.inf
        good = isinstance(value, float | int) and not isinstance(value, bool)
        good = good and (abs(value) <= largest or math.isinf(value))
    if not good:
        raise GGUFError(f"{path}: {key!r} must be {kind}, got {value!r:.60}")


def _check_tensor(path: Path, name: str, tensor: Stored, names: Container[str]) -> None:
    if not 1 <= len(name.encode()) <= _MAX_NAME:
        raise GGUFError(f"{path}: a tensor name must have 1 to {_MAX_NAME} bytes, got {name!r}")
    if name in names:
        raise GGUFError(f"{path}: tensor names must be unique, got {name!r} twice")
    if not 1 <= len(tensor.shape) <= 4 or not tensor.nbytes:
        raise GGUFError(
            f"{path}: tensor {name!r} must have 1 to 4 dimensions >= 1, got {[*tensor.shape]}"
        )
