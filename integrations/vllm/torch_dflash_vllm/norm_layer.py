"""``GemmaRMSNorm`` of vLLM on ``torch.ops.dflash.add_rms_norm``."""

from torch import Tensor
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from torch_dflash import ops

__all__ = ["DFlashGemmaRMSNorm"]


class DFlashGemmaRMSNorm(GemmaRMSNorm):
    """Drop-in for vLLM's norm; what is not a dense matrix (heads of q and k) stays with vLLM's."""

    def forward_cuda(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``x`` normalised, or ``x + residual`` normalised together with the sum itself.

        Args:
            x: ``[rows, hidden]``; with ``residual`` it becomes the sum.
            residual: like ``x``, or None.
        """
        if x.dim() != 2 or not x.is_contiguous():
            native: Tensor | tuple[Tensor, Tensor] = self.forward_native(x, residual)
            return native
        weight, eps = self.weight.detach(), self.variance_epsilon
        # The sum goes where the layer's output was, a temporary of nobody else: the residual
        # stream may be the embedding's output, which a drafter can ask for.
        y = ops.add_rms_norm(residual, x, weight, eps, True, 0).to(x.dtype)
        return y if residual is None else (y, x)

    forward_cpu = forward_cuda
    forward_hip = forward_cuda
