"""Samples of quant_act; the oracle restates the formulas of planes and Q8_1 in PyTorch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import operator


def planes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale ``[rows, groups]``, hi and lo ``[rows, groups, 256]`` (int32) of the planes format."""
    rows, columns = x.shape
    groups = -(-columns // 256)
    padded = torch.zeros(rows, groups * 256)
    padded[:, :columns] = x.float().cpu()
    g = padded.view(rows, groups, 256)
    amax = g.abs().amax(-1)  # amax keeps NaN
    bad = ~torch.isfinite(amax)
    small = amax < 2.0**-100
    off = (bad | small)[..., None]
    scale = torch.where(small, 0.0, amax / 32385)
    scale = torch.where(bad, torch.nan, scale)
    # a tensor on both sides: torch turns number / tensor into a product with the reciprocal
    inv = torch.full_like(amax, 32385) / amax
    q = torch.round(torch.where(off, 0.0, g * inv[..., None]))  # ties to even
    q = torch.where(off, 0.0, q).clamp(-32385, 32385).to(torch.int32)
    hi = torch.div(q + q.sign() * 126, 254, rounding_mode="trunc")
    return scale, hi, q - 254 * hi


def q8_1(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale ``[rows, groups, 8]`` and codes ``[rows, groups, 8, 32]`` (int32) of Q8_1."""
    rows, columns = x.shape
    groups = -(-columns // 256)
    padded = torch.zeros(rows, groups * 256)
    padded[:, :columns] = x.float().cpu()
    g = padded.view(rows, groups, 8, 32)
    step = g.abs().amax(-1)  # keeps NaN
    step = step / torch.full_like(step, 127)
    scale = step.half().float()
    off = ((scale == 0) | ~torch.isfinite(scale))[..., None]
    v = torch.where(off, 0.0, g * (torch.ones_like(step) / step)[..., None]).double()
    codes = v.sign() * torch.floor(v.abs() + 0.5)  # exact in float64: ties away from zero
    return torch.where(torch.isfinite(scale), scale, torch.nan), codes.to(torch.int32)


def _q8_rows(x: Tensor) -> Tensor:
    scale, codes = q8_1(x)
    rows, groups = scale.shape[:2]
    sums = codes.view(rows, groups, 16, 16).sum(-1).to(torch.int16)
    parts = [t.view(torch.int8) for t in (scale, sums, codes.view(rows, groups, 256).char())]
    return torch.cat(parts, -1).view(rows, groups * 320).to(x.device)


def _quant_act(x: Tensor, act_mode: int) -> Tensor:
    if act_mode == 0:
        return x.float().contiguous()
    if act_mode == 2:
        return _q8_rows(x)
    scale, hi, lo = planes(x)
    rows, groups = scale.shape
    sums = [p.view(rows, groups, 16, 16).sum(-1).to(torch.int16) for p in (hi, lo)]
    parts = [
        scale.view(rows, groups, 1).view(torch.uint8),
        torch.zeros(rows, groups, 12, dtype=torch.uint8),
        *(s.view(torch.uint8) for s in sums),
        *(p.to(torch.int8).view(torch.uint8) for p in (hi, lo)),
    ]
    return torch.cat(parts, -1).view(rows, groups * 592).to(x.device)


@operator("quant_act", oracle=_quant_act)
def quant_act(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for rows, columns in [(0, 5), (1, 1), (3, 256), (2, 300), (5, 1024)]:
            x = torch.randn(rows, columns, generator=g) * 3
            for act_mode in (1, 2, 0):
                yield x.to(dtype).to(device), act_mode
    for act_mode in (1, 2):  # a free row stride
        yield torch.randn(4, 600, generator=g).to(device)[:, 7:290], act_mode
