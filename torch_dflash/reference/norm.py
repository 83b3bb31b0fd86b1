"""RMSNorm."""

from torch import Tensor

__all__ = ["gated_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float64."""
    x, weight = x.double(), weight.double()
    if plus_one:
        weight = weight + 1
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid_gate: bool = False
) -> Tensor:
    """:func:`rms_norm` times ``silu(gate)``, or times ``sigmoid(gate)``."""
    gate = gate.double()
    return rms_norm(x, weight, eps) * gate.sigmoid() * (1 if sigmoid_gate else gate)
