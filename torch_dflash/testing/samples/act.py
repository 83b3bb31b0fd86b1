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


def cpu_planes(packed: Tensor) -> Tensor:
    """Planes ``uint8 [rows, groups * 592]`` as a GPU lays them out, the way the CPU does."""
    g = packed.cpu().view(packed.shape[0], -1, 592)
    k = torch.arange(256)
    place = k // 64 * 64 + k // 4 % 4 * 16 + k // 32 % 2 * 8 + k // 16 % 2 * 4 + k % 4
    hi, lo = g[..., :256][..., place], g[..., 320:576][..., place]
    sixteens = [
        p.view(torch.int8).unflatten(-1, (16, 16)).sum(-1).to(torch.int16) for p in (hi, lo)
    ]
    both = sum(
        f * s.int().unflatten(-1, (8, 2)).sum(-1) for f, s in zip((254, 1), sixteens, strict=True)
    )
    sums = g[..., 256:288].contiguous().view(torch.int32)
    rest = torch.cat([g[..., 292:320], g[..., 576:]], -1)
    if not torch.equal(both, sums) or rest.any():
        raise AssertionError("sums of planes that are not those of their codes")
    parts = [g[..., 288:292], torch.zeros(*g.shape[:2], 12, dtype=torch.uint8)]
    parts += [s.view(torch.uint8) for s in sixteens] + [hi, lo]
    return torch.cat(parts, -1).view(packed.shape)


def equal_planes(gpu: Tensor, cpu: Tensor) -> bool:
    """Whether a GPU's and the CPU's tensor are planes of the same codes and scales."""
    if gpu.dtype != torch.uint8 or gpu.dim() != 2 or gpu.shape[1] % 592 or gpu.shape != cpu.shape:
        return False
    return torch.equal(cpu_planes(gpu), cpu)


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
