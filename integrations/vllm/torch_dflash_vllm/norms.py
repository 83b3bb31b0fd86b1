"""Feature ``norms``: residual addition and RMSNorm of Qwen3.5-type models in one pass.

vLLM's ``GemmaRMSNorm`` (weights stored without their 1) is several kernels in eager mode, and one
that Inductor fuses with its neighbours when it compiles. So only the methods are replaced that
vLLM calls in eager mode; a compiled model calls them if ``custom_ops`` asks for
``+gemma_rms_norm``.
"""

import inspect
from typing import Final

from .features import Declined, NotNeeded

__all__ = ["apply"]

NAME: Final = "GemmaRMSNorm"


def apply() -> str:
    """Register the norm in the place of vLLM's.

    Raises:
        Declined: vLLM's norm looks different, or another plugin was first.
        NotNeeded: the operators are not built for this platform.
    """
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm
    from vllm.platforms import current_platform

    from torch_dflash import _ext

    for method in ("forward_native", "forward_cpu", "forward_cuda"):
        got = tuple(inspect.signature(getattr(GemmaRMSNorm, method)).parameters)[1:]
        if got not in (("x", "residual"), ("args", "kwargs")):
            raise Declined(f"{NAME}.{method} must take x and residual, got {got}")
    if not current_platform.is_cpu() and "cuda" not in _ext.BACKENDS:
        raise NotNeeded(f"the operators are there for {', '.join(_ext.BACKENDS)} only")
    from .norm_layer import DFlashGemmaRMSNorm

    found = op_registry_oot.get(NAME)
    if found is None:
        name = GemmaRMSNorm.name
        CustomOp.register_oot(name=NAME)(DFlashGemmaRMSNorm)
        DFlashGemmaRMSNorm.name = name  # in custom_ops it is still called as before
    elif found is not DFlashGemmaRMSNorm:
        raise Declined(f"{NAME} is already replaced by {found.__module__}.{found.__qualname__}")
    return f"{NAME} in eager mode"
