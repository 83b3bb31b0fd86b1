"""Residual add and RMSNorm in one operator."""

from torch import Tensor

from .. import ops
from .module import Module

__all__ = ["RMSNorm"]


class RMSNorm(Module):
    """``residual += x; return rms_norm(residual) * weight``.

    Args:
        weight: float32 ``[columns]``, as it multiplies (GGUF files hold ``1 + w`` already).
        eps: added to the mean square.
        out_mode: activations that the next layer reads (its ``act_mode``); 0 is float32.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float, out_mode: int = 0) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.eps, self.out_mode = eps, out_mode

    def forward(self, x: Tensor | None, residual: Tensor, capture: Tensor | None = None) -> Tensor:
        """Add ``x`` (None: nothing) to ``residual`` in place, and normalise the sum.

        Args:
            x: float32 ``[rows, columns]`` or None.
            residual: float32 ``[rows, columns]``, changed in place.
            capture: receives a copy of the sum; None: nobody watches.

        Returns:
            float32 ``[rows, columns]`` or packed activations, as ``out_mode`` says.
        """
        return ops.add_rms_norm(x, residual, self.weight, self.eps, False, self.out_mode, capture)
