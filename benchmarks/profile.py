"""What whole steps spend their time on: kernels of one run of each, summed by name."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .cases import Context
from .cases.steps import steps

__all__ = ["kernels", "profiles"]

_SAID = 20  # kernels of a step that are printed


def profiles(context: Context, say: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """Every whole step once more under the profiler, when all figures are taken.

    Yields:
        its name, and its kernels.
    """
    for case in steps(context):
        if case.work.live:
            continue
        found = kernels(case.work.calls[0], context.device)
        say(f"kernels of {case.case}: {sum(k['us'] for k in found):.0f} us")
        for k in found[:_SAID]:
            say(f"  {k['us']:>10.1f} us {k['count']:>5} x {k['kernel'][:90]}")
        yield case.case, found


def kernels(call: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Run once under the profiler, without a graph.

    Args:
        call: what runs.
        device: whose kernels count; on a CPU operators do.

    Returns:
        ``kernel``, ``count``, ``us`` (of all its runs together), the longest first.
    """
    on_gpu = device.type == "cuda"
    call()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    found = [
        {
            "kernel": event.key,
            "count": event.count,
            "us": event.self_device_time_total if on_gpu else event.self_cpu_time_total,
        }
        for event in seen.key_averages()
    ]
    return sorted((f for f in found if f["us"] > 0), key=lambda f: -f["us"])
