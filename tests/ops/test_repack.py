"""Tiles hold every bit of the GGUF bytes, and say so when they do not."""

import gguf
import pytest
import torch

from torch_dflash import ops

TILED = (2, 8, 12, 13, 14, 23)
SIZES = {t: ops.quant_geometry(t) for t in ops.quant_types()}


def any_bytes(ggml_type, rows, quants):
    g = torch.Generator().manual_seed(rows * 1000 + quants)
    shape = rows, quants * SIZES[ggml_type][1]
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)


@pytest.mark.parametrize("ggml_type", ops.quant_types())
@pytest.mark.parametrize("rows, quants", [(0, 1), (1, 1), (15, 2), (16, 3), (17, 1), (130, 5)])
def test_unpack_is_the_inverse_for_any_bytes(ggml_type, rows, quants):
    packed, columns = any_bytes(ggml_type, rows, quants), quants * SIZES[ggml_type][0]
    weight = ops.repack(packed, ggml_type, columns)
    assert weight.shape == (ops.repack_bytes(ggml_type, rows, columns),)
    assert weight.numel() % 64 == 0
    assert torch.equal(ops.unpack(weight, ggml_type, rows, columns), packed)


@pytest.mark.parametrize("ggml_type", ops.quant_types())
def test_repacked_bytes_do_not_depend_on_what_memory_held(ggml_type):
    packed, columns = any_bytes(ggml_type, 19, 3), 3 * SIZES[ggml_type][0]
    first = ops.repack(packed, ggml_type, columns)
    torch.empty_like(first).fill_(255)  # what the next allocation may find
    assert torch.equal(ops.repack(packed, ggml_type, columns), first)


@pytest.mark.parametrize("ggml_type", TILED)
def test_a_tile_holds_each_row_alone(ggml_type):
    """A change of one row changes that row's lanes only: bytes 4r..4r+3, or its half of a scale."""
    columns = 2 * SIZES[ggml_type][0]
    packed = any_bytes(ggml_type, 16, 2)
    weight = ops.repack(packed, ggml_type, columns)
    other = packed.clone()
    other[5] ^= 255
    changed = (ops.repack(other, ggml_type, columns) != weight).nonzero()[:, 0] % 64
    lanes, scales = {20, 21, 22, 23}, {10, 11, 42, 43}
    assert lanes <= set(changed.tolist()) <= lanes | scales


# bytes that no repack() writes: Q4_K's first scale and min, IQ4_XS's first scale
@pytest.mark.parametrize("ggml_type, at", [(12, 64), (12, 192), (13, 64), (13, 192), (23, 64)])
def test_garbage_is_refused(ggml_type, at):
    weight = ops.repack(any_bytes(ggml_type, 16, 1), ggml_type, 256)
    weight[at] = 64
    with pytest.raises(RuntimeError, match=r"unpack: weight holds a scale beyond 6 bits"):
        ops.unpack(weight, ggml_type, 16, 256)


def test_types_are_gguf_numbers():
    names = {t: gguf.GGMLQuantizationType(t).name for t in TILED}
    assert sorted(names.values()) == ["IQ4_XS", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.repack_bytes(99, 1, 32), "repack_bytes: no quant format has ggml type 99"),
        (lambda: ops.repack_bytes(12, 1, 32), "columns must be a positive multiple of 256"),
        (lambda: ops.repack_bytes(8, -1, 32), "rows must be at least 0, got -1"),
        (
            lambda: ops.repack_bytes(8, 2**63 - 1, 32),
            "repack_bytes: rows times the 32 columns must",
        ),
        (lambda: ops.repack_bytes(0, 2**31, 2**31), "repack_bytes: rows times the .* at most 2.48"),
        (lambda: ops.repack_bytes(0, 1, 2**62), "repack_bytes: rows times the .* got 1 rows"),
        (
            lambda: ops.unpack(torch.zeros(0, dtype=torch.uint8), 0, 2**61, 2**3),
            "unpack: rows times the 8 columns must be at most 2.48, got 2305843009213693952 rows",
        ),
        (
            lambda: ops.repack(torch.zeros(2, 35, dtype=torch.uint8), 8, 32),
            "repack: 32 values of ggml type 8 take 34 bytes a row, got 35",
        ),
        (lambda: ops.repack(torch.zeros(2, 34), 8, 32), "packed must have dtype Byte, got Float"),
        (
            lambda: ops.unpack(torch.zeros(64, dtype=torch.uint8), 8, 16, 32),
            "weight must be the 576 bytes that repack.. gives .* got 64",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
