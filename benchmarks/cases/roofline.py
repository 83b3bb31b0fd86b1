"""What the memory gives to those who do nothing else."""

from collections.abc import Iterator
from functools import partial

import torch

from ..work import Case, Work
from .context import Context

__all__ = ["roofline"]


def roofline(c: Context) -> Iterator[Case]:
    """A read, which is a sum over a buffer, and a copy, whose bytes count twice.

    The copy is a kernel that negates: copies of memory may go by another engine.
    """
    size = c.shapes.stream_bytes
    source = torch.zeros(size // 4, dtype=torch.float32, device=c.device)
    target = torch.empty_like(source)
    yield Case("read", f"sum of {size >> 20} MiB", None, 1, Work([source.sum], size))
    copy = partial(torch.neg, source, out=target)
    yield Case("copy", f"{size >> 20} MiB", None, 1, Work([copy], 2 * size))
