"""The header of a GGUF file: counts, metadata and tensor table, every number checked before use."""

import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias, overload

import numpy as np

from .types import TYPES

__all__ = ["Cursor", "GGUFArray", "GGUFError", "Scalar", "TensorInfo", "Value"]

Scalar: TypeAlias = int | float | bool | str

# id -> (name, struct code) of the fixed-size value types of the format.
_SCALARS: Final = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# The format has no limits of its own. These are far above any published file and keep a hostile
# one from costing more than a second.
MAX_ENTRIES: Final = 1 << 16  # metadata keys, tensors
_MAX_STRINGS: Final = 1 << 21  # strings in one file's arrays
_MAX_NAME: Final = 1 << 16  # bytes of a key or a tensor name
_MAX_TEXT: Final = 1 << 27  # bytes of one string; the longest is a tokenizer.json of 30 MB
_EAGER: Final = 4096  # arrays of up to so many values, and
_EAGER_BYTES: Final = 1 << 20  # so many bytes, are decoded at open


class GGUFError(ValueError):
    """A file that is not what it must be: ``<file>: <what must hold>, got <...>; <next step>``."""


class GGUFArray(Sequence[Scalar]):
    """A large metadata array, decoded when asked for.

    Iterating decodes on the fly; indexing decodes everything once and keeps it.
    """

    def __init__(self, where: str, buf: mmap.mmap, at: int, length: int, kind: int) -> None:
        """View ``length`` checked values of value type ``kind`` from byte ``at`` on."""
        self._where, self._buf, self._at, self._length, self._kind = where, buf, at, length, kind
        self._values: list[Scalar] | None = None

    def __len__(self) -> int:
        """Number of values."""
        return self._length

    def __iter__(self) -> Iterator[Scalar]:
        """Decode one value after the other."""
        if self._values is not None:
            return iter(self._values)
        return self._strings() if self._kind == _STRING else iter(self.to_numpy().tolist())

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> list[Scalar]: ...
    def __getitem__(self, index: int | slice) -> Scalar | list[Scalar]:
        """One value or a list of them."""
        if self._values is None:
            self._values = list(self)
        return self._values[index]

    def __repr__(self) -> str:
        """Type and length; never the values."""
        kind = "string" if self._kind == _STRING else _SCALARS[self._kind][0]
        return f"GGUFArray({kind} [{self._length}])"

    def to_list(self) -> list[Scalar]:
        """All values as a new list.

        Raises:
            GGUFError: a string is not UTF-8; the message names its index.
        """
        return list(self)

    def to_numpy(self) -> np.ndarray:
        """The values of a numeric array, as a copy in their own dtype.

        Raises:
            TypeError: an array of strings.
        """
        if self._kind == _STRING:
            raise TypeError(f"{self._where} holds strings; use to_list()")
        dtype = np.dtype("<" + _SCALARS[self._kind][1])
        return np.frombuffer(self._buf, dtype, self._length, self._at).copy()

    def _strings(self) -> Iterator[str]:
        at, buf, where = self._at, self._buf, self._where
        for i in range(self._length):
            (n,) = _U64.unpack_from(buf, at)
            yield _utf8(buf[at + 8 : at + 8 + n], f"{where}[{i}]")
            at += 8 + n


Value: TypeAlias = "int | float | bool | str | list[Scalar] | GGUFArray"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies; ``shape`` is row-major, ``offset`` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


class Cursor:
    """Walks the header; every read checks the bytes that are left first."""

    def __init__(self, path: str, buf: mmap.mmap) -> None:
        """Start at the first byte of ``buf``; ``path`` is for messages."""
        self.path, self.buf, self.at, self.end = path, buf, 0, len(buf)
        self.strings = 0

    def fail(self, text: str, step: str = "") -> NoReturn:
        """Raise in the house form."""
        raise GGUFError(f"{self.path}: {text}" + (f"; {step}" if step else ""))

    def take(self, n: int, what: str) -> int:
        """Step over ``n`` bytes and return where they begin."""
        if n > self.end - self.at:
            self.fail(
                f"{what} needs {n} bytes at offset {self.at}, got {self.end - self.at} to the end "
                "of the file",
                "the download is probably incomplete, fetch the file again",
            )
        at, self.at = self.at, self.at + n
        return at

    def u32(self, what: str) -> int:
        """Read one number."""
        return int(_U32.unpack_from(self.buf, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        """Read one number."""
        return int(_U64.unpack_from(self.buf, self.take(8, what))[0])

    def count(self, what: str, each: int, limit: int) -> int:
        """A number of items that take at least ``each`` bytes; checked before anything loops."""
        n = self.u64(what)
        if n * each > self.end - self.at:
            self.fail(
                f"{what} must fit the {self.end - self.at} bytes that follow, got {n} items of at "
                f"least {each} bytes",
                "the file is damaged or incomplete",
            )
        if n > limit:
            self.fail(f"{what} must be at most {limit}, got {n}")
        return n

    def string(self, what: str, limit: int) -> str:
        """Read a string of at most ``limit`` bytes."""
        n = self.u64(f"length of {what}")
        if n > limit:
            self.fail(f"{what} must have at most {limit} bytes, got {n}")
        at = self.take(n, what)
        return _utf8(self.buf[at : at + n], f"{self.path}: {what}")

    def name(self, what: str) -> str:
        """Read a string that names something."""
        text = self.string(what, _MAX_NAME)
        if not text:
            self.fail(f"{what} must not be empty, got one at offset {self.at}")
        return text

    def preamble(self) -> int:
        """Read magic and version; return the version."""
        magic = self.buf[:4]
        if magic != b"GGUF":
            hint = ""
            if magic == b"vers":
                hint = "this looks like a Git LFS pointer, fetch the file itself"
            elif magic in (b"tjgg", b"lmgg", b"algg", b"fmgg"):
                hint = "this is a GGML file from before GGUF, convert it again from its source"
            self.fail(f"must start with 'GGUF', got {magic!r}", hint)
        self.at = 4
        version = self.u32("version")
        if version in (2, 3):
            return version
        if version == 1:
            self.fail("version must be 2 or 3, got 1", "convert it with a newer llama.cpp")
        if version and version & 0xFFFF == 0:
            self.fail("must be little-endian, got a big-endian file", "fetch the little-endian one")
        self.fail(f"version must be 2 or 3, got {version}")

    def value(self, key: str) -> tuple[str, Value]:
        """Read a typed value; return its type's name and itself."""
        kind = self.u32(f"type of {key!r:.80}")
        if kind == _STRING:
            return "string", self.string(f"value of {key!r:.80}", _MAX_TEXT)
        if kind in _SCALARS:
            return _SCALARS[kind][0], self.numbers(key, kind, 1)[0]
        if kind != _ARRAY:
            self.fail(f"{key!r:.80} must have value type 0..12, got {kind}")
        item = self.u32(f"element type of {key!r:.80}")
        what = f"length of {key!r:.80}"
        if item == _STRING:
            return "array[string]", self.string_array(key, self.count(what, 8, _MAX_STRINGS))
        if item == _ARRAY:
            self.fail(f"{key!r:.80} must be a flat array, got an array of arrays")
        if item not in _SCALARS:
            self.fail(f"{key!r:.80} must have element type 0..8 or 10..12, got {item}")
        name, code = _SCALARS[item]
        size = struct.calcsize("<" + code)
        n = self.count(what, size, self.end)
        if n <= _EAGER:
            return f"array[{name}]", self.numbers(key, item, n)
        at = self.take(n * size, f"value of {key!r:.80}")
        if item == 7 and np.frombuffer(self.buf, np.uint8, n, at).max() > 1:
            self.fail(f"{key!r:.80} must hold bools of 0 or 1, got another byte")
        return f"array[{name}]", GGUFArray(f"{self.path}: {key!r:.80}", self.buf, at, n, item)

    def numbers(self, key: str, kind: int, n: int) -> list[Scalar]:
        """Read ``n`` values of a fixed-size type."""
        code = _SCALARS[kind][1]
        at = self.take(n * struct.calcsize("<" + code), f"value of {key!r:.80}")
        if kind == 7 and (raw := self.buf[at : at + n]).translate(None, b"\0\1"):
            self.fail(f"{key!r:.80} must hold bools of 0 or 1, got byte {max(raw)}")
        return [*struct.unpack_from(f"<{n}{code}", self.buf, at)]

    def string_array(self, key: str, n: int) -> Value:
        """Step over ``n`` strings, checking their lengths; decode them only if they are few."""
        self.strings += n
        if self.strings > _MAX_STRINGS:
            self.fail(f"all arrays together must hold at most {_MAX_STRINGS} strings, got more")
        array = GGUFArray(f"{self.path}: {key!r:.80}", self.buf, self.at, n, _STRING)
        # The one loop that runs half a million times for a real vocabulary: locals, no calls.
        buf, at, last, unpack = self.buf, self.at, self.end - 8, _U64.unpack_from
        for _ in range(n):
            if at > last:
                at = self.end + 1
                break
            at += unpack(buf, at)[0] + 8
        if at > self.end:
            self.fail(
                f"{key!r:.80} must hold {n} strings within the file, got some that lead out",
                "the file is damaged or incomplete",
            )
        small = n <= _EAGER and at - self.at <= _EAGER_BYTES
        self.at = at
        return array.to_list() if small else array

    def tensor(self) -> TensorInfo:
        """Read one entry of the tensor table; its offset still counts from the data's start."""
        name = self.name("tensor name")
        n_dims = self.u32(f"n_dims of tensor {name!r:.80}")
        if not 1 <= n_dims <= 4:
            self.fail(f"tensor {name!r:.80} must have 1 to 4 dimensions, got {n_dims}")
        ne = [self.u64(f"dimension {i} of tensor {name!r:.80}") for i in range(n_dims)]
        kind = self.u32(f"type of tensor {name!r:.80}")
        offset = self.u64(f"offset of tensor {name!r:.80}")
        if kind not in TYPES:
            self.fail(f"tensor {name!r:.80} must have a known GGML type, got number {kind}")
        ggml = TYPES[kind]
        if min(ne) < 1 or math.prod(ne) >= 1 << 63:
            self.fail(f"tensor {name!r:.80} must have dimensions >= 1 and < 2^63 values, got {ne}")
        if ne[0] % ggml.elems:
            self.fail(
                f"tensor {name!r:.80} must have rows of a multiple of {ggml.elems} values "
                f"({ggml.name}), got {ne[0]}"
            )
        nbytes = math.prod(ne) // ggml.elems * ggml.bytes
        if nbytes + offset >= 1 << 63:
            self.fail(f"tensor {name!r:.80} must end below 2^63, got {nbytes} bytes at {offset}")
        return TensorInfo(name, tuple(reversed(ne)), kind, offset, nbytes)


def _utf8(raw: bytes, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        shown = raw[:32]
    raise GGUFError(f"{what} must be UTF-8, got {shown!r}")
