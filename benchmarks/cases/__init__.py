"""Families of cases; each yields one case after another and frees what the last one held."""

from collections.abc import Callable, Iterator

from ..work import Case
from .context import MATMUL_TYPES, Context, Wrong
from .layers import attention, conv, delta, head, norm
from .matmul import glus, products
from .roofline import roofline
from .steps import steps

__all__ = ["FAMILIES", "MATMUL_TYPES", "Context", "Wrong"]

# In the order of a run: the roofline gives what floors are against.
FAMILIES: dict[str, Callable[[Context], Iterator[Case]]] = {
    "roofline": roofline,
    "steps": steps,
    "delta": delta,
    "conv": conv,
    "norm": norm,
    "attention": attention,
    "head": head,
    "qmm": products,
    "qmm_glu": glus,
}
