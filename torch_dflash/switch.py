"""The A/B switch: named operators run through their float64 reference instead of their kernel.

A result that changes with ``DFLASH_REFERENCE=qmm`` (or ``--reference qmm``) points at that kernel.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import ops

__all__ = ["reference_of", "replaced", "switchable", "use_reference"]

Function = Callable[..., Any]
_LAYOUTS = {"repack", "unpack"}  # their results only mean something to the kernels that read them


def switchable() -> list[str]:
    """Operators that have a reference."""
    from .testing import OPERATORS, samples  # noqa: F401 - importing the samples registers them

    return sorted(set(OPERATORS) - _LAYOUTS)


def reference_of(name: str) -> Function:
    """What ``ops.name`` does, computed by the operator's oracle on the CPU.

    Args:
        name: an operator of :func:`switchable`.

    Returns:
        a function of the operator's arguments, results, dtypes and mutations.

    Raises:
        ValueError: there is no such reference; the message lists the known ones.
    """
    from .testing import OPERATORS

    if name not in switchable():
        raise ValueError(f"no reference of operator {name!r}; known: {', '.join(switchable())}")
    oracle, pack = OPERATORS[name].oracle, OPERATORS["quant_act"].oracle
    arguments = getattr(torch.ops.dflash, name).default._schema.arguments
    names = [a.name for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def through(*args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        for argument, value in given.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                raise RuntimeError(
                    f"dflash::{name}: {argument} must be on the CPU where its reference runs, "
                    f"got {value.device}"
                )
        mode = 0
        if name != "quant_act" and "act_mode" in given:
            mode, given["act_mode"] = given["act_mode"], 0
        out = _as_returned(oracle(*(given[n] for n in names)))
        return pack(out, mode) if mode else out

    return through


def _as_returned(out: Any) -> Any:
    """An oracle's result as the operator returns it: float32 instead of float64, contiguous."""
    if isinstance(out, tuple):
        return tuple(_as_returned(o) for o in out)
    if not isinstance(out, Tensor):
        return out
    return (out.float() if out.is_floating_point() else out).contiguous()


def _set(functions: Mapping[str, Function]) -> dict[str, Function]:
    before = {name: getattr(ops, name) for name in functions}
    for name, function in functions.items():
        setattr(ops, name, function)
    ops.REPLACED.update(functions)
    return before


@contextmanager
def replaced(functions: Mapping[str, Function]) -> Iterator[None]:
    """Within the block, ``ops.name`` is the given function: models call it through ``ops``."""
    already = set(ops.REPLACED)
    before = _set(functions)
    try:
        yield
    finally:
        _set(before)
        ops.REPLACED.intersection_update(already)


def use_reference(names: Sequence[str]) -> None:
    """Run these operators through their references from now on, and say so.

    Args:
        names: operators of :func:`switchable`.

    Raises:
        ValueError: one of them has no reference.
    """
    names = [name.strip() for name in names]
    _set({name: reference_of(name) for name in names})
    logging.getLogger("torch_dflash").warning(
        "operators through their float64 reference: %s", ", ".join(names)
    )
