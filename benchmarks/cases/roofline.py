"""What the memory gives to those who do nothing else."""

from collections.abc import Iterator

import torch

from ..work import Case, Work
from .context import Context

__all__ = ["roofline"]


def roofline(c: Context) -> Iterator[Case]:
    """A read (a sum over a buffer) and a copy (its bytes counted twice)."""
    size = c.shapes.stream_bytes
    source = torch.zeros(size // 4, dtype=torch.float32, device=c.device)
    target = torch.empty_like(source)
    yield Case("read", f"sum of {size >> 20} MiB", None, 1, Work([source.sum], size))
    yield Case("copy", f"{size >> 20} MiB", None, 1, Work([lambda: target.copy_(source)], 2 * size))
