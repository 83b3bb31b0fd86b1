import gguf as oracle
import numpy as np
import pytest
import torch

from torch_dflash.gguf import TYPES, QuantTensor

Q8_0, Q4_K, F32, F16 = 8, 12, 0, 1


def quantized(rows: int, columns: int, ggml_type: int = Q8_0) -> QuantTensor:
    kind = TYPES[ggml_type]
    rng = np.random.default_rng(7)
    packed = torch.from_numpy(rng.integers(0, 60, (rows, kind.row_bytes(columns)), np.uint8))
    return QuantTensor(packed, ggml_type, (rows, columns))


def values(t: QuantTensor) -> np.ndarray:
    """gguf-py's reading of the same bytes."""
    kind = oracle.GGMLQuantizationType(t.ggml_type)
    return oracle.quants.dequantize(t.packed.numpy(), kind).reshape(t.shape)


def test_geometry_is_gguf_pys():
    for kind in TYPES.values():
        want = oracle.GGML_QUANT_SIZES[oracle.GGMLQuantizationType[kind.name]]
        assert (kind.elems, kind.bytes) == want
        assert kind.id == oracle.GGMLQuantizationType[kind.name]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (0, 5)], ids=str)
def test_plain_types_are_views(dtype, shape):
    t = (torch.arange(24)[: int(np.prod(shape))] - 3).reshape(shape).to(dtype)
    q = QuantTensor.from_tensor(t)
    assert (q.shape, q.columns) == (shape, shape[-1] if shape else 1)
    assert q.nbytes == t.numel() * t.element_size()
    dense = q.to_dense()
    assert dense.dtype == dtype
    assert torch.equal(dense, t)
    if t.numel():
        assert dense.data_ptr() == t.data_ptr()


def test_bool_is_kept_as_int8():
    q = QuantTensor.from_tensor(torch.tensor([True, False]))
    assert q.type_name == "I8"
    assert q.to_dense().tolist() == [1, 0]


@pytest.mark.parametrize("ggml_type", [Q8_0, Q4_K])
def test_dense_equals_gguf_py(ggml_type):
    q = quantized(5, 512, ggml_type)
    np.testing.assert_array_equal(q.to_dense().numpy(), values(q))


def test_quantized_3d():
    q = quantized(6, 64)
    q = QuantTensor(q.packed, Q8_0, (2, 3, 64))
    assert (q.rows, q.columns) == (6, 64)
    np.testing.assert_array_equal(q.to_dense().numpy(), values(q))
    np.testing.assert_array_equal(q.take_rows(torch.tensor([1])).to_dense().numpy(), values(q)[1:])


def test_take_rows_moves_whole_quants():
    q = quantized(4, 64)
    index = torch.tensor([3, 0, 0])
    got = q.take_rows(index)
    assert got.shape == (3, 64)
    assert torch.equal(got.packed, q.packed[index])
    np.testing.assert_array_equal(values(got), values(q)[[3, 0, 0]])


def test_vectors_are_taken_by_value():
    q = QuantTensor.from_tensor(torch.tensor([10.0, 20, 30]))
    assert q.rows == 1
    assert q.take_rows(torch.tensor([2, 0])).to_dense().tolist() == [30, 10]
    assert [t.to_dense().tolist() for t in q.split([1, 2])] == [[10], [20, 30]]
    assert QuantTensor.cat([q, q]).shape == (6,)


def test_split_and_cat_are_inverse():
    q = quantized(7, 64)
    parts = q.split([2, 0, 5])
    assert [p.shape for p in parts] == [(2, 64), (0, 64), (5, 64)]
    assert parts[2].packed.data_ptr() == q.packed[2:].data_ptr()
    assert torch.equal(QuantTensor.cat(parts).packed, q.packed)


def test_to_keeps_what_is_there():
    q = quantized(1, 32)
    assert q.to("cpu") is q


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: QuantTensor(torch.zeros(1, 4, dtype=torch.uint8), 4, (1, 1)), "ggml_type must"),
        (lambda: QuantTensor(torch.zeros(1, 4), F32, (1, 1)), "packed must be contiguous uint8"),
        (
            lambda: QuantTensor(torch.zeros(4, 2, dtype=torch.uint8).T, F32, (2, 1)),
            "got strided torch.uint8",
        ),
        (
            lambda: QuantTensor(torch.zeros(1, 34, dtype=torch.uint8), Q8_0, (1, 33)),
            r"last dimension of \[1, 33\] must be a positive multiple of 32 for Q8_0, got 33",
        ),
        (lambda: QuantTensor(torch.zeros(1, 0, dtype=torch.uint8), F32, (1, 0)), "positive"),
        (lambda: QuantTensor(torch.zeros(1, 4, dtype=torch.uint8), F32, (-1, 1)), "positive"),
        (
            lambda: QuantTensor(torch.zeros(2, 34, dtype=torch.uint8), Q8_0, (1, 32)),
            r"packed must be \[1, 34\] for Q8_0 \[1, 32\], got \[2, 34\]",
        ),
        (
            lambda: QuantTensor.from_tensor(torch.zeros(2, dtype=torch.complex64)),
            "got torch.complex64",
        ),
        (lambda: QuantTensor.from_tensor(torch.zeros(2, 3).T), "must be contiguous"),
        (lambda: quantized(2, 32).split([1]), r"sizes must add up to 2, got \[1\]"),
        (lambda: quantized(2, 32).split([3, -1]), r"sizes must add up to 2, got \[3, -1\]"),
        (lambda: QuantTensor.cat([]), "at least one"),
        (lambda: QuantTensor.cat([quantized(1, 32), quantized(1, 64)]), "must match"),
        (lambda: QuantTensor.cat([quantized(1, 256), quantized(1, 256, Q4_K)]), "must match"),
        (lambda: quantized(2, 32).take_rows(torch.tensor([0], dtype=torch.int32)), "int64"),
        (
            lambda: QuantTensor(torch.zeros(1, 68, dtype=torch.uint8), Q8_0, (64,)).split([32, 32]),
            "needs rows that are whole quants",
        ),
        (lambda: QuantTensor.from_tensor(torch.tensor(1.0)).split([1]), "whole quants"),
        (lambda: QuantTensor.from_tensor(torch.zeros(2)).split([0, 2]), "at least one value"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("index", [[-1], [2]])
def test_index_out_of_range(index):
    with pytest.raises(IndexError, match=r"index must be in \[0, 2\)"):
        quantized(2, 32).take_rows(torch.tensor(index))
