"""How far two results are apart."""

from torch import Tensor

__all__ = ["nmse"]


def nmse(actual: Tensor, expected: Tensor) -> float:
    """Squared error over the squared size of ``expected``, in float64.

    Args:
        actual: any shape and float dtype.
        expected: the same shape.

    Returns:
        0 for equal tensors, also empty and zero ones; infinity where only ``expected`` is zero;
        NaN where a value is.

    >>> import torch
    >>> round(nmse(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0])), 6)
    0.0004
    """
    error = (actual.double() - expected.double()).square().sum().item()
    size = expected.double().square().sum().item()
    if error == 0:
        return 0.0
    return error / size if size else float("inf")
