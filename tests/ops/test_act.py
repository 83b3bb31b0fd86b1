"""Packed activations: planes and Q8_1, bit for bit, on every instruction set."""

import gguf
import numpy as np
import pytest
import torch

from torch_dflash import ops
from torch_dflash.testing.child import run_with
from torch_dflash.testing.samples.act import _quant_act, planes
from torch_dflash.testing.samples.matmul import unpack_activations

PLANES, Q8_1 = 1, 2


def same_bytes(x: torch.Tensor, act_mode: int) -> None:
    got, want = ops.quant_act(x, act_mode), _quant_act(x, act_mode)
    assert got.dtype == {PLANES: torch.uint8, Q8_1: torch.int8}[act_mode]
    assert torch.equal(got, want)


def q8_groups(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales ``[rows, quants]`` and codes ``[rows, quants, 32]`` of Q8_1 rows."""
    groups = packed.view(packed.shape[0], -1, 320)
    scale = groups[..., :32].contiguous().view(torch.float32)
    return scale.flatten(1), groups[..., 64:].reshape(packed.shape[0], -1, 32)


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
        # Q8_1's ties, and scales at both ends of a half: the largest that stays finite, the
        # smallest that is rounded to infinity, the smallest above 0, the largest that becomes 0
        (torch.arange(columns) % 255 - 127) * 0.5 + 63.5 * (torch.arange(columns) % 32 == 0),
        *(torch.full((columns,), 127 * s) for s in (65519.0, 65520.0, 2.0**-24, 2.0**-25)),
    ]
    for bad in (torch.nan, torch.inf, -torch.inf):
        row = torch.randn(columns, generator=g)
        row[columns // 2] = bad
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("act_mode", [PLANES, Q8_1])
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 33, 255, 256, 257, 512, 2880, 5120])
def test_hard_values_by_the_formula(columns, act_mode):
    same_bytes(hard_rows(columns), act_mode)


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
    same_bytes(x, PLANES)


def test_error_of_a_value_is_half_a_step():
    x = torch.randn(7, 1000, generator=torch.Generator().manual_seed(1)).double()
    scale, hi, lo = planes(x.float())
    value = (254 * hi + lo).double() * scale[..., None].double()
    back = value.view(7, -1)[:, :1000]
    # half a step, and two roundings of 2^-24 of a code of at most 32385
    step = scale.double().repeat_interleave(256, 1)[:, :1000]
    assert ((back - x.float().double()).abs() <= step * (0.5 + 32385 * 2**-23)).all()


def test_q8_1_is_what_gguf_py_rounds():
    # Q8_0 of gguf-py: llama.cpp's reference of both formats
    x = hard_rows(1024)
    scale, codes = q8_groups(ops.quant_act(x, Q8_1))
    finite, whole = x.isfinite().view(len(x), 32, 32).all(-1), scale.isfinite()
    assert (finite & whole).sum() > 400
    with np.errstate(all="ignore"):
        quants = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    quants = torch.from_numpy(quants).view(len(x), 32, 34)
    want = quants[..., :2].contiguous().view(torch.float16)[..., 0].float()
    assert torch.equal(scale[finite & whole], want[finite & whole])
    assert want[finite & ~whole].isinf().all()  # llama.cpp keeps infinity, and multiplies by it
    used = finite & whole & (scale != 0)
    assert torch.equal(codes[used], quants[..., 2:].view(torch.int8)[used])
    assert (codes[~used] == 0).all()


def test_ties_of_q8_1_go_away_from_zero():
    x = torch.tensor([127.0, 0.5, -0.5, 1.5, 2.5, -2.5, 126.5, -126.5, 0.0, -0.0])
    below = torch.tensor([0.5, 1.5, 2.5, 126.5]).nextafter(torch.zeros(1))
    scale, codes = q8_groups(ops.quant_act(torch.cat([x, below])[None], Q8_1))
    assert scale[0, 0] == 1
    assert codes[0, 0, :14].tolist() == [127, 1, -1, 2, 3, -3, 127, -127, 0, 0, 0, 1, 2, 126]


def test_error_of_a_q8_1_value():
    x = torch.randn(7, 1000, generator=torch.Generator().manual_seed(1))
    step = torch.nn.functional.pad(x, (0, 24)).view(7, 32, 32).abs().amax(-1) / 127
    back = unpack_activations(ops.quant_act(x, Q8_1), 1000)
    # half a step; a scale that is the step within half an ulp of a half, 2^-11, times a code of at
    # most 127; and three float32 roundings of a code
    bound = step.double() * (0.5 + 127 * (2**-11 + 3 * 2**-24))
    assert ((back - x.double()).abs() <= bound.repeat_interleave(32, 1)[:, :1000]).all()


def test_bad_values_poison_only_their_32():
    x = torch.randn(2, 700)
    y = x.clone()
    y[0, 300] = torch.nan
    a, b = ops.quant_act(x, Q8_1), ops.quant_act(y, Q8_1)
    assert torch.equal(a[1], b[1])
    (scale_a, codes_a), (scale_b, codes_b) = q8_groups(a), q8_groups(b)
    changed = torch.arange(24) == 300 // 32
    assert torch.equal(scale_b[0].isnan(), changed)
    assert torch.equal(scale_a[0, ~changed], scale_b[0, ~changed])
    assert torch.equal((codes_a[0] != codes_b[0]).any(-1), changed)


def test_a_bad_group_poisons_only_itself():
    x = torch.randn(2, 700)
    y = x.clone()
    y[0, 300] = torch.nan
    a, b = ops.quant_act(x, 1), ops.quant_act(y, 1)
    assert torch.equal(a[1], b[1])
    changed = (a[0] != b[0]).view(3, 592).any(-1)
    assert changed.tolist() == [False, True, False]
    assert b[0, 592:596].view(torch.float32).isnan().all()


@pytest.mark.parametrize("act_mode", [PLANES, Q8_1])
def test_instruction_sets_agree(act_mode):
    x = hard_rows(1300)
    assert torch.equal(run_with("avx2", "quant_act", x, act_mode), ops.quant_act(x, act_mode))


@pytest.mark.parametrize(
    "x, mode, message",
    [
        (torch.zeros(3), 1, r"quant_act: x must be \[rows, columns\], got shape \[3\]"),
        (torch.zeros(3, 4, dtype=torch.int32), 1, "x must have dtype Float or Half or BFloat16"),
        (torch.zeros(3, 4), 3, r"act_mode must be 0 .*, 1 .* or 2 \(Q8_1\), got 3"),
        (torch.zeros(3, 4), 7, "quant_act: act_mode must be 0 .* got 7"),
        (torch.zeros(3, 0), 1, r"at least one column, got shape \[3, 0\]"),
        (torch.zeros(4, 3).t(), 1, "last stride 1"),
    ],
)
def test_errors(x, mode, message):
    with pytest.raises(RuntimeError, match=message):
        ops.quant_act(x, mode)


def test_bytes_that_would_overflow():
    for mode in (0, 1):
        with pytest.raises(RuntimeError, match=r"act_bytes: columns must be 1 to 2.48, got 4611"):
            ops.act_bytes(2**62, mode)
