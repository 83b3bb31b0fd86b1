"""Feature ``cpu_sampling``: sampled (not greedy) requests under speculation, on a CPU.

Two faults of vLLM's CPU rejection sampler. The kernel that hands every draft token its request's
temperature and ``top_k`` writes them to a converted copy, so that a verification reads memory that
nobody wrote. And in a step without drafts, the first one of every request among them, top-k takes
the maximum of nothing and the engine stops.
"""

import inspect
from typing import Any, Final

import torch
from torch import Tensor

from .features import Declined, NotNeeded

__all__ = ["apply"]

_EXPAND: Final = ("output", "input_val", "cu_num_tokens", "replace_from", "replace_to")
_TOP_K: Final = ("logits", "k", "p")


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Give every token the value of its request.

    Args:
        output: ``[tokens]``, any dtype; written.
        input_val: ``[requests]``, same dtype.
        cu_num_tokens: ``[requests]``, tokens of all requests up to and with this one.
        replace_from, replace_to: a value that is written as another.
        MAX_NUM_TOKENS: not needed.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    rows = values.repeat_interleave(counts)
    output[: rows.shape[0]] = rows


def _check(function: Any, wanted: tuple[str, ...]) -> None:
    got = tuple(inspect.signature(function).parameters)[: len(wanted)]
    if got != wanted:
        raise Declined(f"{function.__name__} must take {wanted}, got {got}")


def apply() -> str:
    """Replace the one, and keep the other from what has no rows.

    Raises:
        Declined: a function takes other arguments.
        NotNeeded: not on a CPU, or Triton runs there.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        raise NotNeeded("only CPU kernels have the fault")
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.apply_top_k_top_p
    _check(original, _TOP_K)
    _check(cpu_triton_utils._expand_kernel_impl, _EXPAND)

    def apply_top_k_top_p(logits: Tensor, k: Any, p: Any, *args: Any, **kwargs: Any) -> Any:
        return original(logits, k, p, *args, **kwargs) if logits.numel() else logits

    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p
    # The platform registers its kernels from here later on, in the worker.
    cpu_triton_utils._expand_kernel_impl = expand
    return "temperature and top_k of draft tokens"
