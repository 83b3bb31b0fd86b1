"""One piece of work, as our operators and as peers get it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Absent", "Case", "Conv", "Delta", "Matmul", "Norm", "Peer", "Work"]


class Absent(Exception):
    """A peer does not do this; the message says why."""


@dataclass(frozen=True)
class Work:
    """Calls to time.

    Attributes:
        calls: one for each copy of the operands; they take turns.
        nbytes: what one call must move.
        note: what it does differently.
        live: timed as a program makes the calls, not from a graph.
    """

    calls: Sequence[Callable[[], object]]
    nbytes: int
    note: str = ""
    live: bool = False


@dataclass(frozen=True)
class Matmul:
    """``x W^T`` of quantized weights; ``glu``: silu of the first half times the second.

    Attributes:
        type, rows, columns, n: sizes; ``rows`` are those of gate and up together.
        packed: GGUF bytes ``[rows, bytes]``, a tensor for each copy.
        x: float32 ``[n, columns]``.
        result: float32 of the first copy, to compare with; None: nothing to compare.
    """

    type: int
    type_name: str
    rows: int
    columns: int
    n: int
    glu: bool
    packed: Sequence[Tensor]
    x: Tensor
    result: Tensor | None = None


@dataclass(frozen=True)
class Delta:
    """A gated delta rule step of ``tokens`` rows of one sequence.

    Attributes:
        tokens, k_heads, heads, dim: sizes; K and V heads are equally wide.
        copies: of the state.
        device: where.
    """

    tokens: int
    k_heads: int
    heads: int
    dim: int
    copies: int
    device: torch.device

    @property
    def state_bytes(self) -> int:
        """Of one float32 state."""
        return 4 * self.heads * self.dim * self.dim


@dataclass(frozen=True)
class Conv:
    """A causal convolution step of ``tokens`` rows of one sequence; fields as of Delta."""

    tokens: int
    channels: int
    taps: int
    copies: int
    device: torch.device


@dataclass(frozen=True)
class Norm:
    """Residual addition and RMSNorm of ``n`` rows."""

    n: int
    columns: int
    device: torch.device


class Peer:
    """Somebody else's kernels; what it has no kernel for stays as it is here."""

    name = "peer"

    def matmul(self, work: Matmul) -> Work:
        """The product, or the GLU where that is one kernel."""
        raise Absent("no such kernel")

    def delta(self, work: Delta) -> Work:
        """The recurrence."""
        raise Absent("no such kernel")

    def conv(self, work: Conv) -> Work:
        """The convolution."""
        raise Absent("no such kernel")

    def norm(self, work: Norm) -> Work:
        """Addition and norm."""
        raise Absent("no such kernel")


@dataclass(frozen=True)
class Case:
    """What makes one record.

    Attributes:
        op, case, type, n: see :class:`~benchmarks.record.Record`.
        work: ours.
        stream_gbps: what ``stream_ratio`` is against, None without one.
        peers: by name; called when it is their turn, so that only one works at a time.
        parts: further figures for the record.
    """

    op: str
    case: str
    type: str | None
    n: int
    work: Work
    stream_gbps: float | None = None
    peers: dict[str, Callable[[], Work]] = field(default_factory=dict)
    parts: dict[str, object] = field(default_factory=dict)
