"""add_rms_norm: bits, aliasing, and what must be refused."""

import pytest
import torch

from torch_dflash import ops
from torch_dflash.testing.child import run_and_written

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rows(count, columns, dtype=torch.float32, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, columns, generator=g).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_the_rounded_sum(device, dtype):
    x, residual = rows(5, 700, dtype, 1, device), rows(5, 700, dtype, 2, device)
    expected = (residual.float() + x.float()).to(dtype)
    ops.add_rms_norm(x, residual, torch.ones(700, device=device), 1e-6, False, 0)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_normalised_is_what_is_stored(device, dtype):
    # with a sum that does not fit the dtype the unrounded one would give other bits
    x, residual = rows(4, 300, torch.float32, 1, device), rows(4, 300, dtype, 2, device)
    weight = rows(1, 300, torch.float32, 3, device)[0]
    y = ops.add_rms_norm(x, residual, weight, 1e-6, False, 0)
    assert torch.equal(y, ops.add_rms_norm(None, residual, weight, 1e-6, False, 0))


def test_without_x_the_residual_stays(device):
    residual = rows(3, 64, device=device)
    before = residual.clone()
    ops.add_rms_norm(None, residual, torch.ones(64, device=device), 1e-6, False, 0)
    assert torch.equal(residual, before)


def test_plus_one_adds_one_to_the_weight(device):
    residual, weight = rows(3, 48, device=device), rows(1, 48, seed=1, device=device)[0]
    y = ops.add_rms_norm(None, residual, weight, 1e-6, True, 0)
    assert torch.equal(y, ops.add_rms_norm(None, residual, 1 + weight, 1e-6, False, 0))


def test_known_values(device):
    residual = torch.tensor([[3.0, 4.0, 0.0, 0.0]], device=device)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    # mean square 25/4, plus eps 2.75 = 9: a third of each
    y = ops.add_rms_norm(None, residual, weight, 2.75, False, 0)
    torch.testing.assert_close(y.cpu(), torch.tensor([[1.0, 8 / 3, 0.0, 0.0]]))


def test_a_zero_row_stays_zero(device):
    residual = torch.zeros(2, 130, device=device)
    y = ops.add_rms_norm(None, residual, torch.ones(130, device=device), 1e-6, False, 0)
    assert torch.equal(y, residual)


@pytest.mark.parametrize("columns", [100, 512, 2880])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_output_equals_quant_act_of_the_float_output(device, columns, dtype):
    x, residual = rows(3, columns, dtype, 1, device), rows(3, columns, dtype, 2, device)
    weight = rows(1, columns, torch.float32, 3, device)[0]
    copies = [residual.clone(), residual.clone()]
    y = ops.add_rms_norm(x, residual, weight, 1e-6, False, 0)
    for act_mode, copy in zip((1, 2), copies, strict=True):
        packed = ops.add_rms_norm(x, copy, weight, 1e-6, False, act_mode)
        assert torch.equal(packed, ops.quant_act(y, act_mode))
        assert torch.equal(copy, residual)


@pytest.mark.parametrize("count", [2, 7, 33])
def test_a_row_does_not_see_the_others(device, count):
    x, residual = rows(1, 1500, seed=1, device=device), rows(1, 1500, seed=2, device=device)
    weight = rows(1, 1500, seed=3, device=device)[0]
    at = count // 2
    many_x = torch.full((count, 1500), torch.nan, device=device)
    many_residual = many_x.clone()
    many_x[at], many_residual[at] = x[0], residual[0]
    alone = ops.add_rms_norm(x, residual, weight, 1e-6, False, 0)
    among = ops.add_rms_norm(many_x, many_residual, weight, 1e-6, False, 0)
    assert torch.equal(among[at], alone[0])
    assert torch.equal(many_residual[at], residual[0])


def test_threads_and_instruction_sets_give_the_same_bits():
    for dtype in DTYPES:
        x, residual = rows(40, 2000, dtype, 1), rows(40, 2000, dtype, 2)
        weight = rows(1, 2000, dtype, 3)[0]
        written = residual.clone()
        y = ops.add_rms_norm(x, written, weight, 1e-6, True, 0)
        threads = torch.get_num_threads()
        for other in (1, 2, 3):
            torch.set_num_threads(other)
            copy = residual.clone()
            assert torch.equal(ops.add_rms_norm(x, copy, weight, 1e-6, True, 0), y)
            assert torch.equal(copy, written)
        torch.set_num_threads(threads)
        args = (x, residual, weight, 1e-6, True, 0)
        out, left = run_and_written("avx2", "add_rms_norm", *args)
        assert torch.equal(out, y)
        assert torch.equal(left[1], written)


def test_row_21_a_weight_that_is_written_is_refused(device):
    memory = rows(4, 64, device=device)
    x = rows(4, 64, seed=1, device=device)
    with pytest.raises(RuntimeError, match=r"weight must not share memory with residual"):
        ops.add_rms_norm(x, memory, memory[2], 1e-6, False, 0)
    with pytest.raises(RuntimeError, match=r"weight must not share memory with x"):
        ops.add_rms_norm(memory, x, memory[2], 1e-6, False, 0)
    with pytest.raises(RuntimeError, match=r"x must not share memory with residual"):
        ops.add_rms_norm(memory, memory, x[0], 1e-6, False, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(3, 5)}, r"x must be \[rows, columns\] like residual = \[3, 4\], got"),
        ({"x": torch.zeros(3, 4, dtype=torch.int32)}, r"x must have dtype"),
        ({"x": torch.zeros(4, 3).t()}, r"x must be contiguous in its last dimensions"),
        ({"residual": torch.zeros(12)}, r"residual must be \[rows, columns\], got shape \[12\]"),
        ({"residual": torch.zeros(3, 4, dtype=torch.float64)}, r"residual must have dtype"),
        ({"residual": torch.zeros(3, 8)[:, :4]}, r"residual must be contiguous"),
        ({"residual": torch.zeros(3, 0), "x": None}, r"residual must have columns"),
        ({"weight": torch.ones(5)}, r"weight must be \[columns\] = \[4\], got shape \[5\]"),
        ({"weight": torch.ones(4, dtype=torch.int64)}, r"weight must have dtype"),
        ({"weight": torch.ones(8)[::2]}, r"weight must be contiguous"),
        ({"act_mode": 7}, r"act_mode must be 0 \(float32\), 1"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    args = {
        "x": torch.zeros(3, 4),
        "residual": torch.zeros(3, 4),
        "weight": torch.ones(4),
        "eps": 1e-6,
        "plus_one": False,
        "act_mode": 0,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.add_rms_norm(**{**args, **change})
