"""Samples of add_rms_norm."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...reference.norm import rms_norm
from .. import operator


def _add_rms_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    plus_one: bool,
    act_mode: int,
    capture: Tensor | None = None,
) -> Tensor:
    if x is not None:
        # a float32 sum first, which every kernel rounds once more: float64 would round only once
        residual.copy_((residual.float() + x.float()).to(residual.dtype))
    if capture is not None:
        capture.copy_(residual)
    return rms_norm(residual, weight, eps, plus_one).float()


@operator("add_rms_norm", oracle=_add_rms_norm)
def add_rms_norm(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype).to(device)

    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for rows, columns in [(0, 8), (1, 1), (3, 512), (2, 2053), (5, 100)]:
        yield randn(rows, columns), randn(rows, columns), randn(columns), 1e-6, False, 0
    yield randn(3, 64), randn(3, 64), randn(64), 1e-6, False, 0, torch.zeros(3, 64, device=device)
    wide = torch.zeros(2, 200, device=device, dtype=bf16)
    x, residual = randn(2, 96), randn(2, 96, dtype=bf16)
    yield x, residual, randn(96), 1e-6, False, 0, wide[:, 100:196]
    yield None, randn(2, 40), randn(40), 1e-6, False, 0, torch.zeros(2, 40, device=device)
    yield None, randn(4, 96), randn(96), 1e-5, True, 0
    for dtype in (f16, bf16):
        x, residual, weight = (randn(*s, dtype=dtype) for s in [(3, 640), (3, 640), (640,)])
        yield x, residual, weight, 1e-6, True, 0
    yield randn(3, 70, dtype=bf16)[:, 3:67], randn(3, 64), randn(64, dtype=f16), 1e-6, False, 0
    yield randn(2, 64), randn(2, 64, dtype=f16), randn(64, dtype=f32), 1e-6, False, 0
