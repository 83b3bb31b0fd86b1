"""Packed activations: the planes format, bit for bit, on every instruction set."""

import pytest
import torch

from torch_dflash import ops
from torch_dflash.testing.child import run_with
from torch_dflash.testing.samples.act import _quant_act, planes


def same_bytes(x: torch.Tensor) -> None:
    assert torch.equal(ops.quant_act(x, 1), _quant_act(x, 1))


def hard_rows(columns: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(columns)
    rows = [
        torch.randn(columns, generator=g),
        torch.zeros(columns),
        torch.full((columns,), 3.0),
        torch.full((columns,), -1e30),
        torch.randn(columns, generator=g) * 1e-38,
        torch.randn(columns, generator=g).exp() * 1e25,
        torch.full((columns,), 2.0**-100),
        torch.full((columns,), 2.0**-100).nextafter(torch.zeros(1)),
        torch.full((columns,), torch.finfo(torch.float32).max),
        # exact halves of a step: ties
        (torch.arange(columns) % 97 - 48) * 0.5 / 32385 + (torch.arange(columns) == 0),
        torch.full((columns,), -0.0),
    ]
    for bad in (torch.nan, torch.inf, -torch.inf):
        row = torch.randn(columns, generator=g)
        row[columns // 2] = bad
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 255, 256, 257, 512, 2880, 5120])
def test_hard_values_by_the_formula(columns):
    same_bytes(hard_rows(columns))


def test_every_code_splits_by_the_formula():
    # scale 1: amax is 32385 and every integer is its own code
    q = torch.arange(-32385, 32386).float()
    x = torch.zeros(-(-q.numel() // 255), 256)
    x[:, 0] = 32385
    for row, part in enumerate(q.split(255)):
        x[row, 1 : 1 + part.numel()] = part
    scale, hi, lo = planes(x)
    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal((254 * hi + lo).float().view_as(x), x)
    assert hi.abs().max() == 127
    assert lo.abs().max() == 127
    same_bytes(x)


def test_error_of_a_value_is_half_a_step():
    x = torch.randn(7, 1000, generator=torch.Generator().manual_seed(1)).double()
    scale, hi, lo = planes(x.float())
    value = (254 * hi + lo).double() * scale[..., None].double()
    back = value.view(7, -1)[:, :1000]
    # half a step, and two roundings of 2^-24 of a code of at most 32385
    step = scale.double().repeat_interleave(256, 1)[:, :1000]
    assert ((back - x.float().double()).abs() <= step * (0.5 + 32385 * 2**-23)).all()


def test_a_bad_group_poisons_only_itself():
    x = torch.randn(2, 700)
    y = x.clone()
    y[0, 300] = torch.nan
    a, b = ops.quant_act(x, 1), ops.quant_act(y, 1)
    assert torch.equal(a[1], b[1])
    changed = (a[0] != b[0]).view(3, 592).any(-1)
    assert changed.tolist() == [False, True, False]
    assert b[0, 592:596].view(torch.float32).isnan().all()


def test_instruction_sets_agree():
    x = hard_rows(1300)
    assert torch.equal(run_with("avx2", "quant_act", x, 1), ops.quant_act(x, 1))


@pytest.mark.parametrize(
    "x, mode, message",
    [
        (torch.zeros(3), 1, r"quant_act: x must be \[rows, columns\], got shape \[3\]"),
        (torch.zeros(3, 4, dtype=torch.int32), 1, "x must have dtype Float or Half or BFloat16"),
        (torch.zeros(3, 4), 2, r"act_mode 2 \(Q8_1\) is not built; use 1"),
        (torch.zeros(3, 4), 7, "act_mode must be 0 .* got 7"),
        (torch.zeros(3, 0), 1, r"at least one column, got shape \[3, 0\]"),
        (torch.zeros(4, 3).t(), 1, "last stride 1"),
    ],
)
def test_errors(x, mode, message):
    with pytest.raises(RuntimeError, match=message):
        ops.quant_act(x, mode)
