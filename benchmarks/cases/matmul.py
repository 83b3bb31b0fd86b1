"""Products with quantized weights, beside S and peers."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from torch_dflash import ops
from torch_dflash.gguf.types import TYPES
from torch_dflash.testing.tiny import random_quant

from ..work import Case, Matmul, Work
from .context import MATMUL_TYPES, Context, Wrong

__all__ = ["glus", "products"]

PLANES, FLOAT = 1, 0
_CHECKED_ROWS = 256  # of a weight, against float64
_NMSE = 1e-7  # docs/numerics.md: of two planes


def products(c: Context) -> Iterator[Case]:
    """``qmm`` of every shape, type and number of rows."""
    for name, (rows, columns) in c.shapes.matmuls.items():
        for kind in c.types:
            yield from _apart(c, "qmm", name, kind, rows, columns)


def glus(c: Context) -> Iterator[Case]:
    """``qmm_glu`` of the stacked gate and up."""
    rows, columns = c.shapes.matmuls["gate+up"]
    for kind in c.types:
        yield from _apart(c, "qmm_glu", "gate+up", kind, rows, columns)


def _apart(c: Context, op: str, name: str, kind: str, rows: int, columns: int) -> Iterator[Case]:
    """A type that is wrong or breaks off costs its own figures alone."""
    try:
        yield from _cases(c, op, name, kind, rows, columns)
    except Exception as error:
        c.failed[f"{op} {name} {kind}"] = f"{type(error).__name__}: {error}"


def _cases(c: Context, op: str, name: str, kind: str, rows: int, columns: int) -> Iterator[Case]:
    t = MATMUL_TYPES[kind]
    nbytes = rows * TYPES[t].row_bytes(columns)
    g = torch.Generator(c.device).manual_seed(t)
    packed = [
        random_quant(rows, columns, t, g, columns**-0.5).packed for _ in range(c.copies(nbytes))
    ]
    halves = 2 if op == "qmm_glu" else 1
    weights = [_repacked(p, t, columns, halves) for p in packed]
    x = c.random(max(c.rows), columns)
    everything = _result(op, x, weights[0], t, rows, columns, FLOAT)
    if op == "qmm":
        _check_values(everything, x, packed[0], t, kind)
    for n in c.rows:
        result = _result(op, x[:n], weights[0], t, rows, columns, FLOAT)
        if not torch.equal(result, everything[:n]):
            raise Wrong(f"{op} {name} {kind}: rows must be the same among 1 .. {n}, they are not")
        act = ops.quant_act(x[:n], PLANES)
        call = partial(_run, op, act, t, rows, columns, PLANES)
        work = Work([partial(call, weight=w) for w in weights], nbytes)
        spec = Matmul(t, kind, rows, columns, n, op == "qmm_glu", packed, x[:n], result)
        rate, us = c.stream(rows, columns, n)
        yield Case(
            op, f"{name} {rows}x{columns}", kind, n, work, rate,
            {peer: partial(p.matmul, spec) for peer, p in c.peers.items()},
            {"stream": {"us": us, "gbps": rate}},
        )  # fmt: skip


def _repacked(packed: Tensor, t: int, columns: int, segments: int) -> Tensor:
    return torch.cat([ops.repack(part, t, columns) for part in packed.chunk(segments)])


def _run(
    op: str, act: Tensor, t: int, rows: int, columns: int, act_mode: int, weight: Tensor
) -> Tensor:
    if op == "qmm_glu":
        return ops.qmm_glu(act, weight, [t, t], rows // 2, columns, act_mode)
    return ops.qmm(act, weight, [t], [rows], columns)


def _result(
    op: str, x: Tensor, weight: Tensor, t: int, rows: int, columns: int, act_mode: int
) -> Tensor:
    return _run(op, ops.quant_act(x, PLANES), t, rows, columns, act_mode, weight)


def _check_values(y: Tensor, x: Tensor, packed: Tensor, t: int, kind: str) -> None:
    """Some rows of a weight against float64 values of its own bytes."""
    w = ops.dequantize(packed[:_CHECKED_ROWS], t).double()
    want = x.double() @ w.t()
    off = (y[:, : len(w)].double() - want).pow(2).sum() / want.pow(2).sum()
    if not off.item() <= _NMSE:
        raise Wrong(f"qmm {kind}: NMSE must be at most {_NMSE}, got {off.item():.1e}")
