"""Quantized formats: every bit of gguf-py's values, for every type and any bytes."""

import re

import gguf
import numpy as np
import pytest
import torch

from torch_dflash import ops
from torch_dflash.gguf import TYPES
from torch_dflash.testing.samples.quant import gguf_dequantize

GGMLType = gguf.GGMLQuantizationType
EVERY_TYPE = pytest.mark.parametrize("ggml_type", ops.quant_types(), ids=lambda t: GGMLType(t).name)

# Zeros, subnormals, the least and greatest normals, infinities and NaNs, as halves.
EXTREME_HALVES = [
    *[0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF],
    *[0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF],
]


def random_bytes(rows: int, nbytes: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, nbytes), dtype=torch.uint8, generator=g)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, the sign of zero included; a NaN equals any NaN."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == torch.float32
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    same = (actual.view(torch.int32) == expected.view(torch.int32)) | nan
    wrong = (~same).nonzero()
    where = tuple(wrong[0].tolist()) if len(wrong) else ()
    assert not len(wrong), f"{len(wrong)} differ, first at {where}: {actual[where]}"


def test_types_are_those_of_gguf_py():
    decodable = {GGMLType.F32, GGMLType.F16, *gguf.quants._type_traits}
    assert ops.quant_types() == sorted(decodable)


@EVERY_TYPE
def test_geometry(ggml_type):
    geometry = ops.quant_geometry(ggml_type)
    assert geometry == gguf.GGML_QUANT_SIZES[GGMLType(ggml_type)]
    assert geometry == (TYPES[ggml_type].elems, TYPES[ggml_type].bytes)  # what the reader cuts by


@EVERY_TYPE
class TestDequantize:
    # 2048 quants of 256 values look up 65536 grid rows: every one of IQ1's 2048 is seen.
    @pytest.mark.parametrize("rows, quants", [(1, 1), (1, 2048), (3, 2), (7, 5), (64, 8)])
    def test_random_bytes(self, ggml_type, rows, quants):
        packed = random_bytes(rows, quants * ops.quant_geometry(ggml_type)[1], seed=rows)
        assert_same_bits(ops.dequantize(packed, ggml_type), gguf_dequantize(packed, ggml_type))

    def test_extreme_scales(self, ggml_type):
        """Each half of a quant in turn takes each extreme value: wherever the scales lie."""
        nbytes = ops.quant_geometry(ggml_type)[1]
        offsets = np.arange(nbytes - 1)
        packed = random_bytes(len(offsets) * len(EXTREME_HALVES), nbytes, seed=3)
        cases = packed.numpy().reshape(len(EXTREME_HALVES), len(offsets), nbytes)
        for case, half in zip(cases, EXTREME_HALVES, strict=True):
            case[offsets, offsets] = half & 255
            case[offsets, offsets + 1] = half >> 8
        expected = gguf_dequantize(packed, ggml_type)
        # the cases reach what they are for: infinities or NaNs, unless a type cannot store them
        assert (~expected.isfinite()).any() or GGMLType(ggml_type).name in ("MXFP4", "NVFP4")
        assert_same_bits(ops.dequantize(packed, ggml_type), expected)

    @pytest.mark.parametrize("byte", [0x00, 0x01, 0x7F, 0x80, 0xFF])
    def test_constant_bytes(self, ggml_type, byte):
        nbytes = ops.quant_geometry(ggml_type)[1]
        packed = torch.full((2, 3 * nbytes), byte, dtype=torch.uint8)
        assert_same_bits(ops.dequantize(packed, ggml_type), gguf_dequantize(packed, ggml_type))

    def test_no_rows_and_no_columns(self, ggml_type):
        values, nbytes = ops.quant_geometry(ggml_type)
        assert ops.dequantize(random_bytes(0, 2 * nbytes), ggml_type).shape == (0, 2 * values)
        assert ops.dequantize(random_bytes(2, 0), ggml_type).shape == (2, 0)

    def test_rows_are_independent_of_each_other_and_of_threads(self, ggml_type):
        values, nbytes = ops.quant_geometry(ggml_type)
        packed = random_bytes(40, max(4, 1024 // values) * nbytes)  # at least five pieces of work
        together = ops.dequantize(packed, ggml_type)
        threads = torch.get_num_threads()
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert_same_bits(ops.dequantize(packed, ggml_type), together)
        finally:
            torch.set_num_threads(threads)
        for row in (0, 7, 39):
            alone = ops.dequantize(packed[row : row + 1], ggml_type)
            assert_same_bits(alone, together[row : row + 1])


@pytest.mark.parametrize("byte, value", [(0, 2.0**-128), (1, 2.0**-127), (2, 2.0**-126)])
def test_mxfp4_scales_below_the_normal_range(byte, value):
    packed = torch.tensor([[byte, *[0x11] * 16]], dtype=torch.uint8)  # codes 1: the value is d
    assert_same_bits(ops.dequantize(packed, 39), torch.full((1, 32), value))


@EVERY_TYPE
class TestEmbedRows:
    @pytest.mark.parametrize("scale", [1.0, 11.313708498984761, -0.1])
    def test_rows_times_scale(self, ggml_type, scale):
        packed = random_bytes(9, 3 * ops.quant_geometry(ggml_type)[1], seed=5)
        ids = torch.tensor([8, 0, 3, 3, 8])
        expected = gguf_dequantize(packed, ggml_type)[ids] * torch.tensor(scale)
        assert_same_bits(ops.embed_rows(packed, ggml_type, ids, scale), expected)

    def test_no_ids(self, ggml_type):
        values, nbytes = ops.quant_geometry(ggml_type)
        ids = torch.empty(0, dtype=torch.int64)
        for rows in (0, 4):
            out = ops.embed_rows(random_bytes(rows, 2 * nbytes), ggml_type, ids, 1.0)
            assert out.shape == (0, 2 * values)


def test_embed_rows_of_a_wide_table_over_threads():
    packed = random_bytes(50, 64 * 34)  # 2048 values a row: pieces of four rows
    ids = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(2))
    assert_same_bits(ops.embed_rows(packed, 8, ids, 1.0), gguf_dequantize(packed, 8)[ids])


PACKED = random_bytes(4, 2 * 34)
IDS = torch.tensor([0, 3])
KNOWN = ", ".join(f"{GGMLType(t).name} ({t})" for t in ops.quant_types())
ROWS_ERRORS = [
    (PACKED[0], r"packed must be \[rows, bytes\], got shape \[68\]"),
    (PACKED[None], r"packed must be \[rows, bytes\], got shape \[1, 4, 68\]"),
    (PACKED.to(torch.int8), "packed must have dtype Byte, got Char"),
    (PACKED.float(), "packed must have dtype Byte, got Float"),
    (PACKED[:, :34], "packed must be contiguous"),
    (PACKED[:, :50].contiguous(), "packed must have rows of a multiple of 34 bytes, got 50"),
]


@pytest.mark.parametrize("packed, message", ROWS_ERRORS)
def test_packed_rows_are_checked(packed, message):
    with pytest.raises(RuntimeError, match=f"dflash::dequantize: {message}"):
        ops.dequantize(packed, 8)
    with pytest.raises(RuntimeError, match=f"dflash::embed_rows: {message}"):
        ops.embed_rows(packed, 8, IDS, 1.0)


@pytest.mark.parametrize("ggml_type", [-1, 4, 5, 9, 15, 24, 31, 41, 1000, 2**32 + 8])
@pytest.mark.parametrize(
    "call",
    [
        lambda t: ops.quant_geometry(t),
        lambda t: ops.dequantize(PACKED, t),
        lambda t: ops.embed_rows(PACKED, t, IDS, 1.0),
    ],
    ids=["quant_geometry", "dequantize", "embed_rows"],
)
def test_unknown_types_list_the_known_ones(call, ggml_type):
    expected = f"ggml_type must be one of {KNOWN}, got {ggml_type}"
    with pytest.raises(RuntimeError, match=re.escape(expected) + r"$"):
        call(ggml_type)


@pytest.mark.parametrize(
    "ids, message",
    [
        (IDS[None], r"ids must be \[N\], got shape \[1, 2\]"),
        (IDS.int(), "ids must have dtype Long, got Int"),
        (torch.zeros(4, dtype=torch.int64)[::2], "ids must be contiguous, got stride 2"),
        (torch.tensor([0, 4]), r"ids must be in \[0, 4\), got 4 at position 1"),
        (torch.tensor([-1]), r"ids must be in \[0, 4\), got -1 at position 0"),
    ],
)
def test_ids_are_checked(ids, message):
    with pytest.raises(RuntimeError, match=f"dflash::embed_rows: {message}"):
        ops.embed_rows(PACKED, 8, ids, 1.0)
