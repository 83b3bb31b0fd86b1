"""Residual addition and RMSNorm."""

import torch
from torch import Tensor

from .act import new_activations

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    plus_one: bool,
    act_mode: int,
    capture: Tensor | None = None,
) -> Tensor:
    r"""Add to the residual stream in place, then normalise it.

    .. math::
        r \leftarrow r + x, \qquad y = r \, (\tfrac1K \sum r^2 + \epsilon)^{-1/2} \, w

    The sum is rounded to the dtype of ``residual`` before it is normalised, as a later reader of
    the residual stream sees it.

    Args:
        x: ``[rows, columns]``, float32, float16 or bfloat16, row stride free. None: normalise only,
            the residual stream stays as it is.
        residual: ``[rows, columns]``, float32, float16 or bfloat16, contiguous; written.
        weight: ``[columns]``, float32, float16 or bfloat16.
        eps: added to the mean square.
        plus_one: the weight is stored without its 1, as Hugging Face stores Qwen3.5's; GGUF files
            have it included.
        act_mode: 0 float32; 1 planes or 2 Q8_1, packed for :func:`qmm` as by :func:`quant_act`.
        capture: ``[rows, columns]`` of residual's dtype, row stride free; written: the sum, for
            those who watch the residual stream.

    Returns:
        float32 ``[rows, columns]``, or packed activations.

    Raises:
        RuntimeError: a shape, dtype, device or layout above does not hold, or ``weight`` or ``x``
            shares memory with ``residual``, ``weight`` with ``x``, or ``capture`` with any.

    Formula: ``csrc/core/norm.h``. Backends: CPU, CUDA, HIP. Not differentiable.

    >>> residual = torch.tensor([[1.0, 2.0]])
    >>> add_rms_norm(torch.tensor([[2.0, 2.0]]), residual, torch.ones(2), 0.0, False, 0)
    tensor([[0.8485, 1.1314]])
    >>> residual
    tensor([[3., 4.]])
    """
    return torch.ops.dflash.add_rms_norm.default(
        x, residual, weight, eps, plus_one, act_mode, capture
    )


@torch.library.register_fake("dflash::add_rms_norm")
def _(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    plus_one: bool,
    act_mode: int,
    capture: Tensor | None = None,
) -> Tensor:
    return new_activations(residual, residual.shape[0], residual.shape[1], act_mode)
