"""Reads GGUF v2 and v3 files: memory-mapped, every number checked before it is used.

Nothing is copied and nothing large is decoded at open: tensors are views of the file, and the
vocabulary stays bytes until somebody asks for it.
"""

import math
import mmap
import os
import re
import stat
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

import torch

from .header import MAX_ENTRIES, Cursor, GGUFArray, GGUFError, TensorInfo, Value
from .tensor import QuantTensor

__all__ = ["GGUFArray", "GGUFError", "GGUFFile", "TensorInfo", "Value"]

_NO_RESERVE: Final = 0x4000  # Linux MAP_NORESERVE; Python names it from 3.13 on


class GGUFFile:
    """An open GGUF file.

    ``with GGUFFile.open(path) as file`` releases the file at the end of the block, or when the
    last tensor read from it is gone.

    Attributes:
        path: the file.
        version: 2 or 3.
        alignment: of the tensor data, in bytes.
        metadata: key -> scalar, list, or (above 4096 elements) :class:`GGUFArray`.
        tensors: name -> :class:`TensorInfo`, in file order.
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: dict[str, TensorInfo]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open ``path``; see :meth:`open`."""
        self.path = Path(path)
        self._checked: set[str] = set()
        buf = _map(self.path)
        self._buf: mmap.mmap | None = buf
        try:
            self._parse(buf)
        except BaseException:
            # No view of the mapping exists yet, so it can be closed here and now; a traceback
            # that somebody keeps must not keep the file.
            self._buf = None
            buf.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GGUFFile":
        """Map a file and check everything but the tensor data.

        Raises:
            OSError: the file cannot be opened.
            GGUFError: it is not a complete, valid, little-endian GGUF v2 or v3 file. Nothing
                stays open.
        """
        return cls(path)

    def __enter__(self) -> "GGUFFile":
        """The file itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Let go of the file."""
        self.close()

    def close(self) -> None:
        """Let go of the file; tensors and arrays already taken from it stay valid."""
        self._buf = None  # torch views do not pin the mapping's buffer: never unmap by force

    @property
    def architecture(self) -> str:
        """``general.architecture``.

        Raises:
            GGUFError: the key is missing or not a string.
        """
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            self._fail(f"general.architecture must be a string, got {value!r:.80}")
        return value

    def metadata_type(self, key: str) -> str:
        """Type of a key as stored: ``uint32``, ``string``, ``array[int32]`` ...

        Raises:
            KeyError: no such key.
        """
        return self._types[key]

    def tensor(self, name: str, *, check: bool = True) -> QuantTensor:
        """A tensor as a view of the file, which stays mapped as long as the tensor lives.

        Writing to it changes the process's own copy of the page, never the file.

        Args:
            name: a key of ``tensors``.
            check: look for NaN and infinite scales first (once per tensor).

        Raises:
            GGUFError: no such tensor, or ``check`` found something.
            ValueError: the file is closed.
        """
        info = self.tensors.get(name)
        if info is None:
            self._fail(f"tensor {name!r:.80} must be in the file, got {len(self.tensors)} others")
        if self._buf is None:
            raise ValueError(f"{self.path}: the file is closed; take tensors while it is open")
        if check:
            self.check_finite(name)
        data = torch.frombuffer(self._buf, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        rows = math.prod(info.shape[:-1])
        return QuantTensor(data.view(rows, -1), info.ggml_type, info.shape)

    def check_finite(self, name: str) -> None:
        """Look at every scale of a tensor (plain floats: every value) for NaN and infinity.

        Raises:
            GGUFError: one was found; the message names the tensor and the first row.
        """
        if name in self._checked:
            return
        tensor = self.tensor(name, check=False)
        bad = tensor.first_nonfinite()
        if bad is not None:
            what = "value" if tensor.type.dtype else "scale"
            self._fail(
                f"tensor {name!r:.80} ({tensor.type_name}) must have finite {what}s, got NaN or "
                f"infinity in row {bad[0]}, {'column' if tensor.type.dtype else 'quant'} {bad[1]}",
                "the file is damaged or was made from a broken checkpoint",
            )
        self._checked.add(name)

    def _fail(self, text: str, step: str = "") -> NoReturn:
        raise GGUFError(f"{self.path}: {text}" + (f"; {step}" if step else ""))

    def _parse(self, buf: mmap.mmap) -> None:
        cursor = Cursor(str(self.path), buf)
        self.version = cursor.preamble()
        n_tensors = cursor.count("tensor count", each=32, limit=MAX_ENTRIES)
        n_keys = cursor.count("metadata count", each=13, limit=MAX_ENTRIES)
        metadata: dict[str, Value] = {}
        self._types: dict[str, str] = {}
        for _ in range(n_keys):
            key = cursor.name("metadata key")
            if key in metadata:
                self._fail(f"metadata keys must be unique, got {key!r:.80} twice")
            self._types[key], metadata[key] = cursor.value(key)
        self.metadata = MappingProxyType(metadata)
        self._check_split()
        self.alignment = self._alignment()
        infos = [cursor.tensor() for _ in range(n_tensors)]
        start = -(-cursor.at // self.alignment) * self.alignment
        self.tensors = {}
        for info in infos:
            if info.name in self.tensors:
                self._fail(f"tensor names must be unique, got {info.name!r:.80} twice")
            if info.offset % self.alignment:
                self._fail(
                    f"tensor {info.name!r:.80} must start at a multiple of {self.alignment} bytes, "
                    f"got offset {info.offset}"
                )
            at = start + info.offset
            self.tensors[info.name] = TensorInfo(
                info.name, info.shape, info.ggml_type, at, info.nbytes
            )
        self._check_layout(len(buf))

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        kind = self._types.get("general.alignment", "uint32")
        if kind != "uint32" or not isinstance(value, int) or value < 8 or value & (value - 1):
            self._fail(
                "general.alignment must be a power of two of at least 8, stored as uint32, got "
                f"{value!r:.80} ({kind})"
            )
        return value

    def _check_split(self) -> None:
        parts = self.metadata.get("split.count", 1)
        if not isinstance(parts, int) or parts <= 1:
            return
        name = re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", self.path.name).removesuffix(".gguf")
        part = "{}-{:05d}-of-{:05d}.gguf".format
        self._fail(
            f"must be one whole file, got one of {parts} parts "
            f"({part(name, 1, parts)} ... {part(name, parts, parts)})",
            f"join them: llama-gguf-split --merge {part(name, 1, parts)} {name}.gguf",
        )

    def _check_layout(self, size: int) -> None:
        ordered = sorted(self.tensors.values(), key=lambda t: t.offset)
        for a, b in pairwise(ordered):
            if a.offset + a.nbytes > b.offset:
                self._fail(
                    f"tensors must not overlap, got {a.name!r:.80} at "
                    f"{a.offset}..{a.offset + a.nbytes} and {b.name!r:.80} at {b.offset}"
                )
        if ordered and (end := ordered[-1].offset + ordered[-1].nbytes) > size:
            self._fail(
                f"must hold {end} bytes (tensor {ordered[-1].name!r:.80} ends there), got {size}: "
                f"{end - size} are missing",
                "the download is probably incomplete, fetch the file again",
            )


def _map(path: Path) -> mmap.mmap:
    """Map a regular file, private and copy-on-write.

    Writable, because torch has no read-only tensors and a stray in-place operation should not
    kill the process. Not reserved, because a file may be larger than memory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hang
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise GGUFError(f"{path}: must be a regular file, got a folder or device")
        if info.st_size < 24:
            raise GGUFError(
                f"{path}: must have a header of 24 bytes, got {info.st_size}; "
                "the download is probably incomplete, fetch the file again"
            )
        return mmap.mmap(
            fd,
            info.st_size,
            flags=mmap.MAP_PRIVATE | _NO_RESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    finally:
        os.close(fd)
