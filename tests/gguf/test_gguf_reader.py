"""Our GGUF reader on crafted files: values, and every way a file can lie."""

import gc
import os
import random
import struct
import time
from pathlib import Path

import gguf as oracle
import gguf_craft as craft
import numpy as np
import pytest
import torch
from gguf_craft import ARCH, ARR, BOOL, I32, STR, U8, U32, U64, array, gguf, kv, tensor, text

from torch_dflash.gguf import TYPES, GGMLType, GGUFArray, GGUFError, GGUFFile

SMALL = craft.small()
F = [tensor("t", [4])]
VOCABULARY = 248_320  # Qwen3.5's


@pytest.fixture
def write(tmp_path):
    def _write(data: bytes, name: str = "x.gguf"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return _write


def held(path: Path) -> list[str]:
    """Descriptors and mappings of this process that belong to files in the folder of ``path``."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    names += Path("/proc/self/maps").read_text().splitlines()
    return [name for name in names if str(path.parent) in name]


def test_values(write):
    with GGUFFile.open(write(SMALL)) as file:
        assert (file.version, file.alignment, file.architecture) == (3, 32, "qwen35")
        assert [file.metadata[f"n.{k}"] for k in craft.CODES] == [1] * 11
        assert file.metadata["n.7"] is True
        assert file.metadata["a.i32"] == [1, -2, 3]
        assert file.metadata["a.bool"] == [True, False]
        assert file.metadata["a.str"] == ["x", "", "é"]
        assert file.metadata["a.none"] == []
        assert file.metadata_type("a.i32") == "array[int32]"
        assert file.metadata_type("n.10") == "uint64"
        assert file.metadata_type("general.architecture") == "string"
        assert torch.equal(file.tensor("f32").to_dense(), torch.arange(8.0).reshape(2, 4))
        assert torch.equal(file.tensor("i64").to_dense(), torch.arange(5))
        q8 = torch.tensor([[0.0], [0.5], [1.0]]) * torch.arange(-16.0, 16.0)
        assert torch.equal(file.tensor("q8").to_dense(), q8)
        with pytest.raises(GGUFError, match="tensor 'no' must be in the file, got 3 others"):
            file.tensor("no")


def test_version_2(write):
    data = bytearray(SMALL)
    data[4:8] = struct.pack("<I", 2)
    with GGUFFile.open(write(data)) as file:
        assert file.version == 2
        assert file.metadata["a.i32"] == [1, -2, 3]


def test_alignment_of_the_file_is_used(write):
    kvs = [ARCH, kv("general.alignment", U32, 4096)]
    data = gguf(
        kvs,
        [tensor("t", [4], 0, 4096)],
        bytes(4096) + struct.pack("<4f", 1, 2, 3, 4),
        alignment=4096,
    )
    with GGUFFile.open(write(data)) as file:
        assert file.alignment == 4096
        assert file.tensors["t"].offset == 8192
        assert file.tensor("t").to_dense().tolist() == [1, 2, 3, 4]


def test_without_tensors(write):
    with GGUFFile.open(write(gguf([ARCH], alignment=1))) as file:
        assert file.tensors == {}


def test_large_arrays_stay_packed(write):
    words = [f"w{i}é" for i in range(5000)]
    kvs = [
        ARCH,
        array("s", STR, words),
        array("i", I32, range(5000)),
        array("b", BOOL, [True] * 5000),
    ]
    with GGUFFile.open(write(gguf(kvs))) as file:
        strings, ints, bools = (file.metadata[k] for k in "sib")
        assert isinstance(strings, GGUFArray)
        assert (len(strings), strings[4999], strings[1:3]) == (5000, "w4999é", ["w1é", "w2é"])
        assert strings.to_list() == words == list(strings)
        assert repr(strings) == "GGUFArray(string [5000])"
        assert ints.to_list() == [*range(5000)]
        assert ints.to_numpy().dtype == np.int32
        assert bools.to_list() == [True] * 5000
        with pytest.raises(TypeError, match="'s' holds strings"):
            strings.to_numpy()


def test_few_but_long_strings_stay_packed(write):
    words = ["a" * 600_000, "b" * 600_000]
    with GGUFFile.open(write(gguf([ARCH, array("s", STR, words)]))) as file:
        assert isinstance(file.metadata["s"], GGUFArray)
        assert file.metadata["s"].to_list() == words


def test_bad_utf8_in_a_large_array_is_named_when_read(write):
    words = [b"ok"] * 4999 + [b"\xff"]
    array_of = gguf([ARCH, array("s", STR, words)])
    with (
        GGUFFile.open(write(array_of)) as file,
        pytest.raises(GGUFError, match=r"'s'\[4999\] must be UTF-8"),
    ):
        file.metadata["s"].to_list()


def test_a_full_vocabulary_opens_at_once(write):
    """tokens, types, merges: the header of a Qwen3.5 file, 0.5 s on any machine we know."""
    tokens = [f"token{i}" for i in range(VOCABULARY)]
    merges = [f"left{i} right{i}" for i in range(VOCABULARY)]
    kvs = [
        ARCH,
        array("tokenizer.ggml.tokens", STR, tokens),
        array("tokenizer.ggml.token_type", I32, [1] * VOCABULARY),
        array("tokenizer.ggml.merges", STR, merges),
    ]
    path = write(gguf(kvs, F, bytes(16)))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with GGUFFile.open(path) as file:
            seconds.append(time.perf_counter() - start)
            assert len(file.metadata["tokenizer.ggml.tokens"]) == VOCABULARY
    assert min(seconds) < 0.5
    with GGUFFile.open(path) as file:
        assert file.metadata["tokenizer.ggml.tokens"].to_list() == tokens


# Offsets of the float16 scales, added up from ggml-common.h's structs: the oracle of types.py.
HALVES = {
    "F16": [0],
    "Q1_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q8_1": [0, 2],
    "Q2_K": [16 + 64, 16 + 64 + 2],
    "Q3_K": [32 + 64 + 12],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [128 + 64 + 16],
    "IQ1_S": [0],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "TQ1_0": [48 + 4],
    "TQ2_0": [64],
}
PACK = struct.pack
# type -> [(offset, not finite, largest finite)]
SCALES = {
    **{
        name: [(at, PACK("<H", 0x7E00), PACK("<H", 0xFBFF)) for at in h]
        for name, h in HALVES.items()
    },
    # IQ1_M: the high nibbles of four words, 0x7C00 and 0x7BFF
    "IQ1_M": [
        (48, PACK("<4H", 0xFFF, 0xFFF, 0xCFFF, 0x7FFF), PACK("<4H", *[0xFFFF] * 2, 0xBFFF, 0x7FFF))
    ],
    "Q8_K": [(0, PACK("<I", 0x7F800000), PACK("<I", 0x7F7FFFFF))],
    "MXFP4": [(0, b"\xff", b"\xfe")],
    "NVFP4": [(at, b"\xff", b"\x7e") for at in range(4)],
    "BF16": [(0, PACK("<H", 0xFF80), PACK("<H", 0x7F7F))],
    "F32": [(0, PACK("<I", 0xFF800001), PACK("<I", 0xFF7FFFFF))],
    "F64": [(0, PACK("<Q", 0x7FF << 52), PACK("<Q", (0x7FF << 52) - 1))],
}
# ggml gives MXFP4's and NVFP4's NaN a finite value; the others have no decoder in gguf-py.
NO_ORACLE = {"Q8_1", "Q8_K", "Q1_0", "F64", "MXFP4", "NVFP4"}


def two_quants(kind: GGMLType, bad: int | None) -> bytes:
    """All bits set, every scale the largest finite one but scale ``bad`` of the second quant."""
    data = bytearray(b"\xff" * 2 * kind.bytes)
    for quant in range(2):
        for i, (at, wrong, largest) in enumerate(SCALES.get(kind.name, [])):
            value = wrong if quant == 1 and i == bad else largest
            at += quant * kind.bytes
            data[at : at + len(value)] = value
    return gguf([ARCH], [tensor("t", [kind.elems, 2], kind.id)], bytes(data))


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda t: t.name)
def test_nonfinite_scales(write, kind):
    scales = SCALES.get(kind.name, [])
    assert bool(scales) != (kind.name in ("I8", "I16", "I32", "I64"))
    with GGUFFile.open(write(two_quants(kind, None))) as file:
        file.check_finite("t")  # no false alarm
    for bad in range(len(scales)):
        with GGUFFile.open(write(two_quants(kind, bad))) as file:
            with pytest.raises(GGUFError, match=rf"'t' \({kind.name}\) must have finite .* row 1"):
                file.tensor("t")
            t = file.tensor("t", check=False)
            assert t.first_nonfinite() == (1, 0)
        if kind.name not in NO_ORACLE:
            with np.errstate(all="ignore"):
                values = oracle.quants.dequantize(
                    t.packed.numpy(), oracle.GGMLQuantizationType[kind.name]
                )
            assert np.isfinite(values[0]).all()
            assert not np.isfinite(values[1]).all()


def test_the_first_nonfinite_value_is_named(write):
    """In a tensor longer than one piece of the scan (4 MiB)."""
    values = np.zeros((3, 1 << 20), np.float32)
    values[1, 777_777] = np.inf
    values[2, 5] = np.nan
    path = write(gguf([ARCH], [tensor("t", [1 << 20, 3])], values.tobytes()))
    with (
        GGUFFile.open(path) as file,
        pytest.raises(GGUFError, match="got NaN or infinity in row 1, column 777777"),
    ):
        file.tensor("t")


HUGE = 1 << 40
MANY = 1 << 62
HOSTILE = {
    # structure
    "empty": (b"", "must have a header of 24 bytes, got 0"),
    "short": (b"GGUF\3\0\0\0", "must have a header of 24 bytes, got 8"),
    "magic": (gguf(magic=b"ABCD"), "must start with 'GGUF', got b'ABCD'"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "ggml": (gguf(magic=b"tjgg"), "from before GGUF"),
    "version 1": (gguf(version=struct.pack("<I", 1)), "version must be 2 or 3, got 1; convert"),
    "version 4": (gguf(version=struct.pack("<I", 4)), "version must be 2 or 3, got 4"),
    "big-endian": (gguf(version=struct.pack(">I", 3)), "must be little-endian, got a big-endian"),
    "version 0": (gguf(version=struct.pack("<I", 0)), "version must be 2 or 3, got 0"),
    "tensor count 2^62": (gguf([ARCH], n_tensors=MANY), "tensor count must fit"),
    "tensor count one too many": (gguf([ARCH], F, bytes(16), n_tensors=2), "needs|must"),
    "metadata count 2^64-1": (gguf([ARCH], n_kv=(1 << 64) - 1), "metadata count must fit"),
    "metadata count that fits only by the byte": (
        gguf([ARCH], n_kv=40, data=bytes(64)),
        "metadata count must fit the [0-9]+ bytes that follow, got 40 items of at least 13 bytes",
    ),
    "metadata count above the limit": (
        gguf(n_kv=1 << 17) + bytes(13 << 17),
        "metadata count must be at most 65536, got 131072",
    ),
    "tensor count above the limit": (
        gguf(n_tensors=1 << 17) + bytes(32 << 17),
        "tensor count must be at most 65536, got 131072",
    ),
    # metadata
    "empty key": (gguf([kv("", U8, 1)], data=bytes(64)), "metadata key must not be empty"),
    "key of 2^40": (gguf([struct.pack("<Q", HUGE) + b"k" * 64]), "must have at most 65536 bytes"),
    "key that is not UTF-8": (gguf([kv(b"\xc3\x28", U8, 1)]), "metadata key must be UTF-8"),
    "value that is not UTF-8": (gguf([kv("k", STR, b"\xff")]), "value of 'k' must be UTF-8"),
    "surrogates in UTF-8": (gguf([kv("k", STR, b"\xed\xa0\x80")]), "value of 'k' must be UTF-8"),
    "duplicate key": (gguf([ARCH, ARCH]), "metadata keys must be unique, got 'general.arch"),
    "value type 13": (
        gguf([text("k") + struct.pack("<I", 13)], data=bytes(64)),
        "'k' must have value type 0..12, got 13",
    ),
    "bool 2": (
        gguf([text("k") + struct.pack("<IB", BOOL, 2)], data=bytes(64)),
        "'k' must hold bools of 0 or 1, got byte 2",
    ),
    "bool 2 in an array": (
        gguf([array("k", BOOL, [True], 5000) + b"\2" * 4999], data=bytes(64)),
        "'k' must hold bools of 0 or 1",
    ),
    "string of 2^40": (
        gguf([text("k") + struct.pack("<IQ", STR, HUGE)], data=bytes(64)),
        "value of 'k' must have at most 134217728 bytes, got 1099511627776",
    ),
    "string of 2^64-1": (
        gguf([text("k") + struct.pack("<IQ", STR, (1 << 64) - 1)], data=bytes(64)),
        "value of 'k' must have at most 134217728 bytes, got 18446744073709551615",
    ),
    "string longer than the file": (
        gguf([text("k") + struct.pack("<IQ", STR, 100)], data=bytes(64)),
        "value of 'k' needs 100 bytes at offset",
    ),
    "a long key and a long value": (
        gguf([kv("k" * 60000, STR, "v"), kv("k" * 60000, STR, "v" * 60000)]),
        "metadata keys must be unique, got 'kkk",
    ),
    "a long architecture": (
        gguf([kv("general.alignment", STR, "a" * 60000)]),
        "power of two",
    ),
    "array of 2^40 strings": (gguf([array("k", STR, [], HUGE)], data=bytes(64)), "'k' must fit"),
    "array of 2^62 uint64": (gguf([array("k", U64, [], MANY)], data=bytes(64)), "'k' must fit"),
    "array of 2^61 uint64": (gguf([array("k", U64, [], MANY >> 1)], data=bytes(64)), "must fit"),
    "array string of 2^63": (
        gguf([array("k", STR, [], 3) + struct.pack("<Q", 1 << 63)], data=bytes(64)),
        "'k' must hold 3 strings within the file",
    ),
    "array string up to the end": (
        gguf([array("k", STR, ["a"], 2) + struct.pack("<Q", 65)], data=bytes(64), alignment=1),
        "'k' must hold 2 strings within the file",
    ),
    "more strings than the limit": (
        gguf([array("k", STR, [], 1 << 22)], data=bytes(8 << 22)),
        "must be at most 2097152, got 4194304",
    ),
    "two arrays above the limit": (
        gguf([array(k, STR, [], 3 << 19) + bytes(8 * (3 << 19)) for k in "ab"]),
        "all arrays together must hold at most 2097152 strings",
    ),
    "array of arrays": (
        gguf([text("k") + struct.pack("<IIQ", ARR, ARR, 1)], data=bytes(64)),
        "'k' must be a flat array, got an array of arrays",
    ),
    "arrays nested 10000 deep": (
        gguf([text("k") + struct.pack("<I", ARR) + struct.pack("<IQ", ARR, 1) * 10000]),
        "'k' must be a flat array",
    ),
    "array of type 99": (
        gguf([text("k") + struct.pack("<IIQ", ARR, 99, 1)], data=bytes(64)),
        "'k' must have element type 0..8 or 10..12, got 99",
    ),
    # alignment, parts
    "alignment 0": (gguf([kv("general.alignment", U32, 0)], F, bytes(16)), "power of two"),
    "alignment 48": (gguf([kv("general.alignment", U32, 48)], F, bytes(16)), "power of two"),
    "alignment 4": (gguf([kv("general.alignment", U32, 4)], F, bytes(16)), "at least 8"),
    "alignment as string": (
        gguf([kv("general.alignment", STR, "32")], F, bytes(16)),
        r"stored as uint32, got '32' \(string\)",
    ),
    "alignment 2^31": (gguf([kv("general.alignment", U32, 1 << 31)], F, bytes(16)), "are missing"),
    "split": (
        gguf([kv("split.count", craft.U16, 3), kv("split.no", craft.U16, 0)]),
        r"got one of 3 parts \(x-00001-of-00003.gguf \.\.\. x-00003-of-00003.gguf\); join them",
    ),
    # tensors
    "empty name": (gguf([ARCH], [tensor("", [4])], bytes(16)), "tensor name must not be empty"),
    "name of 2^40": (
        gguf([ARCH], [struct.pack("<Q", HUGE) + bytes(64)]),
        "tensor name must have at most 65536 bytes",
    ),
    "name that is not UTF-8": (gguf([ARCH], [tensor(b"\xfe", [4])], bytes(16)), "must be UTF-8"),
    "duplicate name": (
        gguf([ARCH], [tensor("t", [4]), tensor("t", [4], 0, 32)], bytes(64)),
        "tensor names must be unique, got 't' twice",
    ),
    "no dimensions": (gguf([ARCH], [tensor("t", [])], bytes(64)), "1 to 4 dimensions, got 0"),
    "five dimensions": (gguf([ARCH], [tensor("t", [1] * 5)], bytes(64)), "1 to 4 dim.*, got 5"),
    "2^31 dimensions": (
        gguf([ARCH], [text("t") + struct.pack("<I", 1 << 31)], bytes(64)),
        "1 to 4 dimensions, got 2147483648",
    ),
    "dimension 0": (gguf([ARCH], [tensor("t", [4, 0])], bytes(64)), r"dimensions >= 1 .*\[4, 0\]"),
    "dimension 2^63": (gguf([ARCH], [tensor("t", [1 << 63])], bytes(64)), r"< 2\^63 values"),
    "dimensions that overflow to 4": (
        gguf([ARCH], [tensor("t", [(1 << 62) + 1, 4])], bytes(64)),
        r"< 2\^63 values",
    ),
    "bytes that overflow": (
        gguf([ARCH], [tensor("t", [1 << 62], 28)], bytes(64)),
        r"must end below 2\^63",
    ),
    "offset that overflows": (
        gguf([ARCH], [tensor("t", [4], 0, (1 << 64) - 32)], bytes(64)),
        r"must end below 2\^63",
    ),
    "type 4 (gone)": (gguf([ARCH], [tensor("t", [32], 4)], bytes(64)), "GGML type, got number 4"),
    "type 999": (gguf([ARCH], [tensor("t", [32], 999)], bytes(64)), "GGML type, got number 999"),
    "row that is no multiple": (
        gguf([ARCH], [tensor("t", [128, 2], 12)], bytes(512)),
        r"rows of a multiple of 256 values \(Q4_K\), got 128",
    ),
    "offset off the grid": (
        gguf([ARCH], [tensor("t", [4], 0, 8)], bytes(64)),
        "tensor 't' must start at a multiple of 32 bytes, got offset 8",
    ),
    "overlap": (
        gguf([ARCH], [tensor("a", [16]), tensor("b", [16], 0, 32)], bytes(96)),
        "tensors must not overlap, got 'a' .* and 'b'",
    ),
    "overlap, listed backwards": (
        gguf([ARCH], [tensor("b", [16], 0, 32), tensor("a", [16])], bytes(96)),
        "tensors must not overlap, got 'a' .* and 'b'",
    ),
    "same bytes twice": (
        gguf([ARCH], [tensor("a", [4]), tensor("b", [4])], bytes(96)),
        "tensors must not overlap",
    ),
    "last byte missing": (
        gguf([ARCH], F, bytes(15)),
        r"got \d+: 1 are missing; the download is probably incomplete",
    ),
    "data missing": (gguf([ARCH], F), r": 16 are missing; the download is probably incomplete"),
    "tensor of 2^40 bytes": (gguf([ARCH], [tensor("t", [1 << 38])], bytes(64)), "are missing"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file(write, case):
    data, message = HOSTILE[case]
    path = write(data)
    start = time.process_time()  # of this process: neighbours do not count
    with pytest.raises(GGUFError, match=message) as caught:
        GGUFFile.open(path)
    assert time.process_time() - start < 1
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 600
    assert not held(path)


def test_truncated_anywhere(write):
    """Every prefix of a valid file is one clear error; only the whole file opens."""
    for length in range(len(SMALL)):
        with pytest.raises(GGUFError, match=r"needs \d+ bytes|24 bytes|missing|must fit|within"):
            GGUFFile.open(write(SMALL[:length]))
    with GGUFFile.open(write(SMALL)):
        pass


def test_what_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "fifo.gguf")
    for path in (tmp_path, tmp_path / "fifo.gguf"):
        with pytest.raises(GGUFError, match="must be a regular file"):
            GGUFFile.open(path)
    with pytest.raises(FileNotFoundError):
        GGUFFile.open(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("value", [None, 7])
def test_architecture_is_a_string(write, value):
    kvs = [] if value is None else [kv("general.architecture", U32, value)]
    with (
        GGUFFile.open(write(gguf(kvs))) as file,
        pytest.raises(GGUFError, match=f"general.architecture must be a string, got {value}"),
    ):
        _ = file.architecture


def test_failed_opens_leave_nothing(write):
    """Errors are kept, as a server's log would: neither descriptors nor memory follow them."""
    paths = [write(d, f"{i}.gguf") for i, (d, _) in enumerate(HOSTILE.values()) if len(d) < 1 << 20]
    kept = []

    def fail_all():
        for path in paths:
            try:
                GGUFFile.open(path)
            except GGUFError as error:
                kept.append(error)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    fail_all()
    gc.collect()
    before = resident()
    for _ in range(3):
        fail_all()
    assert len(kept) >= 100
    assert not held(paths[0])
    # 100 kept errors with their tracebacks hold a few kB each; the files are not among it
    assert resident() - before < 8 << 20


def test_flipped_bytes_never_crash(write):
    """A flip gives GGUFError or a readable file, nothing else (seeded, about 2 s)."""
    rng = random.Random(20)
    header = len(SMALL) - 200
    outcomes = {True: 0, False: 0}
    stop = time.perf_counter() + 4
    for _ in range(4000):
        data = bytearray(SMALL)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(header if rng.random() < 0.9 else len(SMALL))
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path = write(data)
        try:
            with GGUFFile.open(path) as file:
                for name in file.tensors:
                    file.tensor(name)
                for value in file.metadata.values():
                    if isinstance(value, GGUFArray):
                        value.to_list()
            outcomes[True] += 1
        except GGUFError:
            outcomes[False] += 1
        if time.perf_counter() > stop:
            break
    assert min(outcomes.values()) > 50  # both happen, or the test shows nothing
    assert not held(path)
