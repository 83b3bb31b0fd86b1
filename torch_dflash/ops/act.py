"""Activations as the matmul reads them."""

import torch
from torch import Tensor

__all__ = ["act_bytes", "quant_act"]


def act_bytes(columns: int, act_mode: int) -> int:
    """Bytes of one row of activations.

    Args:
        columns: values of a row, at least 1.
        act_mode: 0 = float32, 1 = two int8 planes with a scale per 256 values, 2 = Q8_1: int8
            codes with a scale per 32 values.

    Returns:
        Bytes of a row in that mode.

    Raises:
        RuntimeError: no columns, or an unknown mode.

    >>> act_bytes(512, 1), act_bytes(512, 2)
    (1184, 640)
    """
    return torch.ops.dflash.act_bytes.default(columns, act_mode)


def new_activations(like: Tensor, rows: int, columns: int, act_mode: int) -> Tensor:
    """What an operator that emits activations returns, for the fakes."""
    nbytes = act_bytes(columns, act_mode)
    if act_mode == 0:
        return like.new_empty((rows, columns), dtype=torch.float32)
    return like.new_empty((rows, nbytes), dtype=torch.uint8 if act_mode == 1 else torch.int8)


def quant_act(x: Tensor, act_mode: int) -> Tensor:
    r"""Pack rows of activations for :func:`qmm`.

    Planes (mode 1): every group of 256 values (at absolute multiples of 256, the last may be
    shorter) becomes ``x ~ scale * (254 hi + lo)`` with ``scale = max|x| / 32385`` and int8 codes
    within :math:`\pm 127`. A group below :math:`2^{-100}` is zero; one that holds a NaN or an
    infinity gets the scale NaN.

    Q8_1 (mode 2), as llama.cpp rounds: every 32 values become ``x ~ scale * code`` with codes of
    ``max|x| / 127`` within :math:`\pm 127`, ties away from zero, and that step rounded to a half as
    the scale. Where the half is 0, so are the codes; where it is no finite number, the scale is
    NaN. Its relative error is some hundred times that of the planes.

    Args:
        x: float32, float16 or bfloat16 ``[rows, columns]``; the row stride is free.
        act_mode: 1 = two int8 planes; 2 = Q8_1; 0 = float32.

    Returns:
        uint8 ``[rows, act_bytes(columns, 1)]`` or int8 ``[rows, act_bytes(columns, 2)]``, in a
        layout private to the device: the dtype tells readers the mode; or float32
        ``[rows, columns]`` for mode 0.

    Raises:
        RuntimeError: a wrong dtype, rank, mode or last stride, or no columns.

    Formula: ``csrc/core/act.h``. Backends: CPU, CUDA. Not differentiable.
    """
    return torch.ops.dflash.quant_act.default(x, act_mode)


@torch.library.register_fake("dflash::quant_act")
def _(x: Tensor, act_mode: int) -> Tensor:
    return new_activations(x, x.shape[0], x.shape[1], act_mode)
