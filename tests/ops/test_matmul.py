"""qmm and qmm_glu: the contract's bits, independence of rows, and the bounds against float64."""

import numpy as np
import pytest
import torch
from restated import BLOCKS, TILED, float_dot, matmul, matmul_q8

from torch_dflash import ops
from torch_dflash.testing.child import run_with
from torch_dflash.testing.samples.quant import gguf_dequantize, random_packed

RESTATED = {1: matmul, 2: matmul_q8}  # by act_mode
CODES = {1: (592, 80), 2: (320, 64)}  # bytes of a group, and where its codes start
MIXED = ([12, 23, 14, 8, 2, 13, 0, 1, 3], [16, 5, 33, 20, 17, 1, 4, 3, 2])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weights(ggml_type, rows, columns, seed=0):
    """Random quants whose values stay below 1e6, so that no sum overflows."""
    g = generator(seed)
    values, nbytes = ops.quant_geometry(ggml_type)
    packed = random_packed(ggml_type, rows * columns // values, 1, g)
    while (huge := gguf_dequantize(packed, ggml_type).abs().amax(1) > 1e6).any():
        packed[huge] = random_packed(ggml_type, int(huge.sum()), 1, g)
    return packed.view(rows, columns // values * nbytes)


def plain(ggml_type, packed, x):
    """qmm of one segment."""
    columns = columns_of(ggml_type, packed)
    return ops.qmm(x, ops.repack(packed, ggml_type, columns), [ggml_type], [len(packed)], columns)


def columns_of(ggml_type, packed):
    values, nbytes = ops.quant_geometry(ggml_type)
    return packed.shape[1] // nbytes * values


def stacked(types, rows, columns):
    parts = [
        weights(t, n, columns, seed) for seed, (t, n) in enumerate(zip(types, rows, strict=True))
    ]
    return torch.cat([ops.repack(p, t, columns) for p, t in zip(parts, types, strict=True)]), parts


def activations(rows, columns, seed=1):
    return torch.randn(rows, columns, generator=generator(seed))


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def widths(ggml_type):
    return [32, 64, 256, 2880, 1312] if ggml_type in BLOCKS else [256, 1280, 5120]


@pytest.mark.parametrize("act_mode", RESTATED)
@pytest.mark.parametrize("ggml_type", TILED)
def test_bits_by_the_contract(ggml_type, act_mode):
    for columns in widths(ggml_type):
        packed, x = weights(ggml_type, 21, columns), activations(5, columns)
        got = plain(ggml_type, packed, ops.quant_act(x, act_mode))
        np.testing.assert_array_equal(got.numpy(), RESTATED[act_mode](packed, ggml_type, x))


@pytest.mark.parametrize("ggml_type", ops.quant_types())
def test_bits_of_the_float_route(ggml_type):
    columns = 1280
    packed, x = weights(ggml_type, 18, columns), activations(3, columns)
    want = float_dot(gguf_dequantize(packed, ggml_type).numpy(), x.numpy())
    np.testing.assert_array_equal(plain(ggml_type, packed, x).numpy(), want)
    if ggml_type not in TILED:
        for act_mode, restated in RESTATED.items():
            got = plain(ggml_type, packed, ops.quant_act(x, act_mode))
            np.testing.assert_array_equal(got.numpy(), restated(packed, ggml_type, x))


# Q8_1: a step of max / 127 is wrong by a twelfth of its square, and the largest of 32 normal values
# is about 2.1 times their deviation: 2.3e-5 of the energy. Types whose rows are a few large values
# see a few roundings, not their mean.
@pytest.mark.parametrize("act_mode, bound", [(1, 1e-7), (2, 5e-4)])
@pytest.mark.parametrize("ggml_type", ops.quant_types())
def test_error_against_float64(ggml_type, act_mode, bound):
    packed, x = weights(ggml_type, 40, 2048), activations(6, 2048)
    want = x.double() @ gguf_dequantize(packed, ggml_type).double().T
    got = plain(ggml_type, packed, ops.quant_act(x, act_mode)).double()
    assert (got - want).square().sum() <= bound * want.square().sum()


# codes and activations at their ends: every byte of the quant the same, every activation +-amax
@pytest.mark.parametrize("act_mode", RESTATED)
@pytest.mark.parametrize("ggml_type", TILED)
def test_extremes_do_not_saturate(ggml_type, act_mode):
    columns = 1024
    nbytes = ops.quant_geometry(ggml_type)[1]
    packed = weights(ggml_type, 32, columns).view(32, -1, nbytes)
    kept = [o for offset in TILED[ggml_type] if offset is not None for o in (offset, offset + 1)]
    for row, byte in enumerate([0x00, 0xFF, 0x80, 0x7F, 0x81, 0x3F, 0xF0, 0x0F] * 4):
        scales = packed[row, :, kept].clone()
        packed[row] = byte
        packed[row, :, kept] = scales
    packed = packed.view(32, -1)
    x = torch.stack([torch.ones(columns), -torch.ones(columns), activations(1, columns)[0].sign()])
    xp = ops.quant_act(x, act_mode)
    nbytes, first = CODES[act_mode]
    assert (xp.view(3, -1, nbytes)[:, :, first:].view(torch.int8).abs() == 127).all()
    got = plain(ggml_type, packed, xp)
    np.testing.assert_array_equal(got.numpy(), RESTATED[act_mode](packed, ggml_type, x))
    weight = ops.repack(packed, ggml_type, columns)
    assert same(run_with("avx2", "qmm", xp, weight, [ggml_type], [32], columns), got)


@pytest.mark.parametrize("act_mode", [0, 1, 2])
def test_a_row_depends_on_itself_alone(act_mode):
    columns = 2304
    types, rows = MIXED
    weight, _ = stacked(types, rows, columns)
    x = activations(40, columns)

    def pack(t):
        return ops.quant_act(t, act_mode)

    alone = torch.cat([ops.qmm(pack(row[None]), weight, types, rows, columns) for row in x])
    for n in range(1, 41):
        assert same(ops.qmm(pack(x[:n]), weight, types, rows, columns), alone[:n]), n
    order = torch.randperm(40, generator=generator(2))
    assert same(ops.qmm(pack(x[order]), weight, types, rows, columns), alone[order])
    for bad in (torch.nan, torch.inf):
        poisoned = x.clone()
        poisoned[::2, 700] = bad
        got = ops.qmm(pack(poisoned), weight, types, rows, columns)
        assert same(got[1::2], alone[1::2])
        assert not got[::2].isfinite().any()


def test_stacked_equals_separate():
    columns = 1280
    types, rows = MIXED[0][:-1], MIXED[1][:-1]
    weight, parts = stacked(types, rows, columns)
    bias = torch.randn(sum(rows), generator=generator(3))
    for act_mode in (0, 1, 2):
        x = ops.quant_act(activations(3, columns), act_mode)
        got = ops.qmm(x, weight, types, rows, columns)
        apart = torch.cat([plain(t, p, x) for t, p in zip(types, parts, strict=True)], 1)
        assert same(got, apart)
        assert same(ops.qmm(x, weight, types, rows, columns, bias), apart + bias)


def test_instruction_sets_and_threads_agree():
    columns = 2304
    types, rows = MIXED[0], [r * 9 for r in MIXED[1]]
    weight, _ = stacked(types, rows, columns)
    threads = torch.get_num_threads()
    for act_mode in (0, 1, 2):
        x = ops.quant_act(activations(7, columns), act_mode)
        args = (x, weight, types, rows, columns)
        want = ops.qmm(*args)
        assert same(run_with("avx2", "qmm", *args), want)
        try:
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                assert same(ops.qmm(*args), want)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("act_mode, least", [(1, 1e-30), (2, 1e-6)])
@pytest.mark.parametrize("ggml_type", TILED)
def test_zero_and_tiny_activations(ggml_type, act_mode, least):
    packed = weights(ggml_type, 17, 512)
    x = torch.zeros(4, 512)
    x[1] = activations(1, 512).clamp(-3, 3) * least * 0.1  # below 2^-100, or half the least half
    x[2] = activations(1, 512) * least * 10
    x[3, 300] = 1.0  # the first group is zero, the second not
    got = plain(ggml_type, packed, ops.quant_act(x, act_mode))
    np.testing.assert_array_equal(got.numpy(), RESTATED[act_mode](packed, ggml_type, x))
    assert (got[:2] == 0).all()
    assert (got[2] != 0).any()


@pytest.mark.parametrize("act_mode", RESTATED)
def test_a_bad_scale_spoils_its_weight_row_only(act_mode):
    packed = weights(12, 20, 512)
    x = ops.quant_act(activations(2, 512), act_mode)
    want = plain(12, packed, x)
    packed[7, 0:2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # d of row 7 is a NaN
    got = plain(12, packed, x)
    assert got[:, 7].isnan().all()
    kept = torch.arange(20) != 7
    assert same(got[:, kept], want[:, kept])


@pytest.mark.parametrize("types", [[12, 12], [23, 12], [14, 8], [0, 13]])
@pytest.mark.parametrize("rows", [1, 16, 250, 256, 530])
@pytest.mark.parametrize("act_mode", RESTATED)
def test_glu_is_its_parts(types, rows, act_mode):
    columns = 1280
    weight, parts = stacked(types, [rows, rows], columns)
    x = activations(9, columns)
    # gates up to 20: exp(-gate) stays finite
    x *= 20 / (x.double() @ gguf_dequantize(parts[0], types[0]).double().T).abs().amax()
    x = ops.quant_act(x, act_mode)
    gate, up = ops.qmm(x, weight, types, [rows, rows], columns).double().split(rows, 1)
    plain_result = ops.qmm_glu(x, weight, types, rows, columns, 0)
    want = gate * torch.sigmoid(gate) * up
    # exp within an ulp, then an addition, a division and a product of half an ulp each
    torch.testing.assert_close(plain_result.double(), want, rtol=6 * 2.0**-24, atol=0)
    for out_mode in (1, 2):  # whatever x is
        packed_result = ops.qmm_glu(x, weight, types, rows, columns, out_mode)
        assert torch.equal(packed_result, ops.quant_act(plain_result, out_mode))
        for n in range(9):
            row = ops.qmm_glu(x[n : n + 1], weight, types, rows, columns, out_mode)
            assert torch.equal(row, packed_result[n : n + 1])


@pytest.mark.parametrize("act_mode", RESTATED)
def test_glu_on_every_instruction_set_and_thread_count(act_mode):
    columns, rows, types = 512, 1100, [12, 14]
    weight, _ = stacked(types, [rows, rows], columns)
    x = ops.quant_act(activations(3, columns) * 0.01, act_mode)
    args = (x, weight, types, rows, columns, act_mode)
    want = ops.qmm_glu(*args)
    assert torch.equal(run_with("avx2", "qmm_glu", *args), want)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for _ in range(20):
                assert torch.equal(ops.qmm_glu(*args), want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("act_mode", RESTATED)
@pytest.mark.parametrize("seed", range(30))
def test_random_shapes(seed, act_mode):
    g = generator(100 + seed)

    def pick(low, high):
        return int(torch.randint(low, high, (1,), generator=g))

    ggml_type = list(TILED)[seed % len(TILED)]
    step = 32 if ggml_type in BLOCKS else 256
    rows, columns, n = pick(1, 70), step * pick(1, 3000 // step), pick(1, 13)
    packed, x = weights(ggml_type, rows, columns, seed), activations(n, columns, seed)
    x *= 10.0 ** (pick(-20, 20) if act_mode == 1 else pick(-7, 7))
    got = plain(ggml_type, packed, ops.quant_act(x, act_mode))
    np.testing.assert_array_equal(got.numpy(), RESTATED[act_mode](packed, ggml_type, x))


def bytes_(n):
    return torch.zeros(n, dtype=torch.uint8)


X = torch.zeros(2, 256)


@pytest.mark.parametrize(
    "args, message",
    [
        ((X, bytes_(64), [12], [16], 256), "weight must be the 2368 bytes .* got 64"),
        ((X, bytes_(64), [12, 8], [16], 256), "must name the same segments, got 2 and 1"),
        ((X, bytes_(64), [], [], 256), "must name the same segments, got 0 and 0"),
        ((X, bytes_(64), [99], [16], 256), "qmm: no quant format has ggml type 99"),
        (
            (X, bytes_(64), [12], [16], 128),
            r"float32 x must be \[rows, 128\] .* got shape \[2, 256",
        ),
        ((X[:, :32].contiguous(), bytes_(64), [12], [16], 32), "positive multiple of 256"),
        ((X, bytes_(64), [12], [0], 256), "rows must be at least 1, got 0"),
        ((X, bytes_(64), [12], [2**60], 256), "qmm: rows times the 256 columns must be at most"),
        (
            (bytes_(500)[None], bytes_(64), [12], [16], 256),
            r"packed \(uint8: planes\) x must be \[rows, 592\] for 256 columns, got shape \[1, 500",
        ),
        (
            (bytes_(320)[None], bytes_(64), [12], [16], 256),  # Q8_1's width as planes
            r"packed \(uint8: planes\) x must be \[rows, 592\]",
        ),
        (
            (bytes_(592).to(torch.int8)[None], bytes_(64), [12], [16], 256),
            r"packed \(int8: Q8_1\) x must be \[rows, 320\] for 256 columns, got shape \[1, 592",
        ),
        (
            (X.half(), bytes_(64), [12], [16], 256),
            "x must have dtype Float or Byte or Char, got Half",
        ),
        ((X, bytes_(2368), [12], [16], 256, torch.zeros(3)), r"bias must be contiguous \[16\]"),
    ],
)
def test_errors(args, message):
    with pytest.raises(RuntimeError, match=message):
        ops.qmm(*args)


def test_glu_errors():
    with pytest.raises(RuntimeError, match="types must be those of gate and up, got 1 types"):
        ops.qmm_glu(X, bytes_(64), [12], 16, 256, 0)
    weight, _ = stacked([8, 8], [3, 3], 32)
    # tiles of this many rows had, by overflow, the size of this weight
    with pytest.raises(RuntimeError, match=r"qmm_glu: rows times the 32 columns must be at most"):
        ops.qmm_glu(X[:, :32].contiguous(), weight, [8, 8], 2**63 - 1, 32, 0)
    with pytest.raises(RuntimeError, match=r"act_mode must be 0 .* or 2 \(Q8_1\), got 3"):
        ops.qmm_glu(X, bytes_(2 * 2368), [12, 12], 16, 256, 3)


def test_planes_and_q8_1_of_one_width_are_told_apart():
    # 20 groups of planes and 37 of Q8_1 are as many bytes
    planes = ops.quant_act(activations(1, 20 * 256), 1)
    q8 = ops.quant_act(activations(1, 37 * 256), 2)
    assert planes.shape == q8.shape
    for x, columns, wanted in ((planes, 37 * 256, 37 * 592), (q8, 20 * 256, 20 * 320)):
        weight = bytes_(ops.repack_bytes(8, 1, columns))
        with pytest.raises(RuntimeError, match=rf"x must be \[rows, {wanted}\]"):
            ops.qmm(x, weight, [8], [1], columns)


def test_no_rows():
    weight, _ = stacked([12, 0], [16, 3], 256)
    for x in (X[:0], ops.quant_act(X[:0], 1), ops.quant_act(X[:0], 2)):
        assert ops.qmm(x, weight, [12, 0], [16, 3], 256).shape == (0, 19)
