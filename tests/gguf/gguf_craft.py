"""Writes GGUF bytes by hand, valid or not; shares nothing with the library or with gguf-py."""

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"} | {
    U64: "Q",
    I64: "q",
    F64: "d",
}

# Drafters among the reference cases that come as GGUF files.
GGUF_DRAFTERS = [
    "dflash",
    "dflash2",
    "dflash2_scaled_taps3",
    "dflash2_swa_w8",
    "dflash_causal",
    "dflash_dc_causal",
    "dflash_interleaved_rope",
    "dflash_partial_rotary",
    "dflash_swa_noncausal_w8",
    "dflash_value_scale_sinks",
    "dflash_yarn",
    "dspark",
    "dspark_speculators_bonus",
    "dspark_speculators_d2t",
]


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value) -> bytes:
    return text(value) if kind == STR else struct.pack("<" + CODES[kind], value)


def kv(key: str | bytes, kind: int, value) -> bytes:
    return text(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(key: str, kind: int, values: Sequence, count: int | None = None) -> bytes:
    head = struct.pack("<IIQ", ARR, kind, len(values) if count is None else count)
    return text(key) + head + b"".join(scalar(kind, v) for v in values)


def tensor(name: str | bytes, ne: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne) + struct.pack("<IQ", kind, offset)
    )


def gguf(
    kvs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    n_tensors: int | None = None,
    n_kv: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + version
    head += struct.pack("<Q", len(tensors) if n_tensors is None else n_tensors)
    head += struct.pack("<Q", len(kvs) if n_kv is None else n_kv)
    head += b"".join(kvs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


ARCH = kv("general.architecture", STR, "qwen35")


def small() -> bytes:
    """A valid file with every kind of value and three tensors."""
    kvs = [
        ARCH,
        *(kv(f"n.{k}", k, 1) for k in CODES),
        array("a.i32", I32, [1, -2, 3]),
        array("a.bool", BOOL, [True, False]),
        array("a.str", STR, ["x", "", "é"]),
        array("a.none", F32, []),
    ]
    tensors = [
        tensor("f32", [4, 2], 0, 0),
        tensor("q8", [32, 3], 8, 32),
        tensor("i64", [5], 27, 160),
    ]
    quants = b"".join(struct.pack("<e32b", 0.5 * i, *range(-16, 16)) for i in range(3))
    data = struct.pack("<8f", *range(8)) + quants.ljust(128, b"\0") + struct.pack("<5q", *range(5))
    return gguf(kvs, tensors, data)
