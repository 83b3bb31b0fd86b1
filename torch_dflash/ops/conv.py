"""The short causal convolution of a linear attention layer."""

import torch
from torch import Tensor

__all__ = ["ssm_conv_step"]


def ssm_conv_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    slots: Tensor,
    num_accepted: Tensor | None,
    cu_seqlens: Tensor,
) -> Tensor:
    r"""Causal depthwise convolution of a decode or verify block, its window kept in place.

    .. math::
        y_{ic} = b_c + \sum_{t=0}^{T-1} w_{ct} \, v_{i-T+1+t,\,c}

    where :math:`v_j` is row ``j`` of the sequence's block for :math:`j \ge 0` and the window's
    history before it. The state of a sequence holds the raw inputs of its last block behind the
    history of that block: column ``j`` of ``state[slot]`` is one input of all channels. Which of
    them are history now depends on how many rows were accepted: the ``taps - 1`` columns from
    ``max(num_accepted, 1) - 1`` on. Nothing is copied to roll back. After the call, columns
    ``0 .. taps - 3 + n`` are that history without its oldest, then the ``n`` rows of the block.

    A value that a later row reads is first rounded to the dtype of ``state``, so that a block gives
    the bits of the same rows one at a time.

    Args:
        x: ``[rows, channels]``, the rows of all sequences back to back, float32, float16 or
            bfloat16, row stride free.
        state: ``[slots, width, channels]``, float32, float16 or bfloat16, slot stride free;
            ``width >= taps - 2 + n`` for the longest sequence; written.
        weight: float32 ``[channels, taps]``, the last tap is the newest; 2 to 16 taps.
        bias: float32 ``[channels]`` or None.
        silu: apply SiLU to the result.
        slots: int32 ``[sequences]``; 0 and below skips the sequence: its rows are zero and no state
            is touched.
        num_accepted: int32 ``[sequences]``: accepted rows of the last block, the anchor included;
            values below 1 count as 1, as does None.
        cu_seqlens: int32 ``[sequences + 1]``, row offsets from 0. A sequence without rows is left
            alone; rows after the last offset are padding and come out zero.

    Returns:
        float32 ``[rows, channels]``.

    Raises:
        RuntimeError: a shape, dtype, device or layout above does not hold; on CPU also a slot
            outside ``state``, offsets that do not ascend, or a window too narrow. A GPU cannot stop
            for those: it returns NaN rows and writes nothing for such a sequence.

    Formula: ``csrc/core/conv.h``. Backends: CPU, CUDA, HIP. Not differentiable.

    >>> state = torch.tensor([[[0.0], [0.0]], [[1.0], [2.0]]])  # slot 1: inputs 1, 2
    >>> one = torch.tensor([1], dtype=torch.int32)
    >>> rows = torch.tensor([0, 1], dtype=torch.int32)
    >>> weight = torch.tensor([[100.0, 10.0, 1.0]])
    >>> ssm_conv_step(torch.tensor([[3.0]]), state, weight, None, False, one, None, rows)
    tensor([[123.]])
    >>> state[1].tolist()
    [[2.0], [3.0]]
    """
    return torch.ops.dflash.ssm_conv_step.default(
        x, state, weight, bias, silu, slots, num_accepted, cu_seqlens
    )


@torch.library.register_fake("dflash::ssm_conv_step")
def _(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    slots: Tensor,
    num_accepted: Tensor | None,
    cu_seqlens: Tensor,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)
