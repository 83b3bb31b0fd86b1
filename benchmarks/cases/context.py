"""What every family of cases is given."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..record import gbps
from ..shapes import Shapes
from ..timing import Clock, copies_for, measure
from ..work import Peer

__all__ = ["MATMUL_TYPES", "Context", "Wrong"]

MATMUL_TYPES = {
    "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "Q8_0": 8, "Q4_0": 2, "IQ4_XS": 23,
    "IQ3_XXS": 18, "IQ3_S": 21, "IQ2_XXS": 16, "IQ2_XS": 17, "Q3_K": 11, "Q2_K": 10,
}  # fmt: skip


class Wrong(RuntimeError):
    """An operator's result is not what it must be: there is no figure for it."""


@dataclass
class Context:
    """Where and of what cases are made.

    Attributes:
        device, shapes, clock, peers: see there.
        types: names of the weights' types.
        rows: rows of a decode or verify step.
        repeats: replays of a figure.
        read_gbps: what this device reads at, set by the roofline; what byte floors are against.
        failed: what has no figures, and why: a type of weights, a family.
    """

    device: torch.device
    shapes: Shapes
    clock: Clock
    peers: dict[str, Peer]
    types: Sequence[str] = tuple(MATMUL_TYPES)
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32)
    repeats: int = 15
    read_gbps: float | None = None
    failed: dict[str, str] = field(default_factory=dict)
    _streams: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)

    def random(self, *size: int, seed: int = 0) -> Tensor:
        """The same normal numbers every time, float32."""
        g = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*size, generator=g, device=self.device)

    def ints(self, *values: int) -> Tensor:
        """int32 on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def copies(self, nbytes: int) -> int:
        """How many of an operand take turns."""
        return copies_for(nbytes, self.shapes.cold_bytes)

    def stream(self, rows: int, columns: int, n: int) -> tuple[float, float]:
        """S of a shape, measured once: (gbps, us) of the library's bfloat16 product."""
        key = rows, columns, n
        if key not in self._streams:
            nbytes = 2 * rows * columns
            weights = [
                torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16)
                for _ in range(self.copies(nbytes))
            ]
            x = self.random(n, columns).to(torch.bfloat16)
            calls = [lambda w=w: linear(x, w) for w in weights]  # type: ignore[misc]
            us = measure(self.clock, calls, self.repeats).us
            self._streams[key] = gbps(nbytes, us), us
        return self._streams[key]
