"""What a step spends its time on: kernels of one run, summed by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["kernels"]


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
