"""The short causal convolution of a linear attention layer."""

import torch
from torch import Tensor

__all__ = ["causal_conv"]


def causal_conv(
    x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    """Row i is the weighted sum of the ``taps`` inputs that end with row i of ``x``, in float64.

    Args:
        x: ``[rows, channels]``.
        history: ``[taps - 1, channels]``, the inputs before ``x``, oldest first.
        weight: ``[channels, taps]``, the last tap is the newest.
        bias: ``[channels]`` or None.
        silu: apply SiLU.
    """
    channels, taps = weight.shape
    inputs = torch.cat([history.double(), x.double()])
    out = torch.zeros(x.shape[0], channels, dtype=torch.float64, device=x.device)
    for i in range(x.shape[0]):
        for t in range(taps):
            out[i] += weight[:, t].double() * inputs[i + t]
        if bias is not None:
            out[i] += bias.double()
    return out * out.sigmoid() if silu else out
