"""The best candidates of an output head."""

import torch
from torch import Tensor

__all__ = ["head_topk"]


def head_topk(logits: Tensor, k: int, multiplier: float, softcap: float) -> tuple[Tensor, Tensor]:
    r"""Find the k largest logits of every row, after multiplier and soft cap.

    .. math:: z = \text{multiplier} \cdot x, \quad
        \text{value} = c \tanh(z / c) \text{ if } c = \text{softcap} > 0 \text{ else } z

    Args:
        logits: float32 ``[rows, vocabulary]``; infinities are legal.
        k: 1 to ``vocabulary``.
        multiplier: finite and positive; 1 for none.
        softcap: finite and not negative; 0 for none.

    Returns:
        ``(values, ids)``, float32 and int64 ``[rows, k]``: by value descending, of equal values
        (-0 equals +0) the lower id first. ``k = 1`` is the arg max.

    Raises:
        RuntimeError: a shape, dtype or layout above does not hold, an argument is out of range, or
            a logit is NaN (the row is named; on a GPU such a row gets the id -1 instead).

    Order: ``csrc/core/topk.h``. Backends: CPU, CUDA. Not differentiable.

    >>> values, ids = head_topk(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3, 2.0, 0.0)
    >>> values.tolist(), ids.tolist()
    ([[6.0, 6.0, 4.0]], [[1, 2, 3]])
    """
    return torch.ops.dflash.head_topk.default(logits, k, multiplier, softcap)


@torch.library.register_fake("dflash::head_topk")
def _(logits: Tensor, k: int, multiplier: float, softcap: float) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty((rows, k), dtype=torch.float32),
        logits.new_empty((rows, k), dtype=torch.int64),
    )
