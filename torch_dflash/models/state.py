"""State of one sequence in a native target: KV caches, convolution windows, GDN states."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import ops
from ..decoding.kv_cache import KVCache

__all__ = ["GDNShape", "RecurrentState", "StateKind", "TargetState"]

StateKind = Literal["journal", "snapshots"]
SLOT = 1  # slot 0 is the null slot


@dataclass(frozen=True)
class GDNShape:
    """Sizes of a Gated DeltaNet layer.

    Attributes:
        k_heads, v_heads: heads of q and k, of v.
        k_dim, v_dim: values per head.
        taps: of the convolution over q, k and v.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Columns of q|k|v."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


class RecurrentState:
    """Convolution windows and GDN states of every recurrent layer, with rollback.

    ``journal`` keeps one base state and the rows of the last verification as (k, u, decay): the
    next step replays those that were accepted. ``snapshots`` keeps the state after every row.

    Args:
        shape: of one layer.
        layers: number of recurrent layers.
        max_rows: most rows of one step.
        kind: how rejected rows are rolled back.
        dtype: of the GDN state, float32 or bfloat16.
        device: where it lives.
    """

    @torch.inference_mode(False)  # to be written from either mode
    def __init__(
        self,
        shape: GDNShape,
        layers: int,
        max_rows: int,
        kind: StateKind,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        s, self.kind, self.max_rows = shape, kind, max_rows
        self.device = device
        slots = 2 if kind == "journal" else 1 + max_rows

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
            return [torch.zeros(*size, dtype=dtype, device=device) for _ in range(layers)]

        self.conv = zeros(2, s.taps - 2 + max_rows, s.channels)
        self.state = zeros(slots, s.v_heads, s.v_dim, s.k_dim, dtype=dtype)
        if kind == "journal":
            self.journal_k = zeros(2, 2, max_rows, s.k_heads, s.k_dim)
            self.journal_u = zeros(2, 2, max_rows, s.v_heads, s.v_dim)
            self.journal_decay = zeros(2, 2, max_rows, s.v_heads)
        self.slots = torch.tensor([SLOT], dtype=torch.int32, device=device)
        self.indices = torch.arange(1, slots, dtype=torch.int32, device=device).view(1, -1)
        # What a step reads: one tensor, so that a commit is one copy from the table of all choices.
        self._control = torch.zeros(3, dtype=torch.int32, device=device)
        self._split()
        rows = torch.arange(1 + max_rows, dtype=torch.int32, device=device)
        choices = [torch.stack([rows, rows, torch.full_like(rows, p)], 1) for p in (0, 1)]
        self._choices = torch.stack(choices)  # [parity, rows, 3]
        self._parity = 0  # what the tensor holds
        self.prefill_slot: Tensor | None = None  # set while rows are committed as they run
        self._pending = 0  # rows of the journal that belong to the sequence but not to the base
        self.reset()

    def _split(self) -> None:
        self.conv_accepted, self.accepted, self.parity = self._control.split(1)

    @torch.inference_mode(False)
    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy by pickle has a tensor for every view of the original."""
        self.__dict__.update(state)
        self._split()

    def reset(self) -> None:
        """Back to the empty sequence."""
        for window in self.conv:
            window.zero_()
        for state in self.state:
            state.zero_()
        self._set(1)
        if self.kind == "journal":
            self.accepted.zero_()
        self._pending = 0

    def _set(self, rows: int, parity: int = 0) -> None:
        """The step to come goes on behind this row of the last one."""
        self._parity = parity
        self._control.copy_(self._choices[parity, rows])

    def begin_prefill(self) -> Tensor:
        """Make one slot hold the state after all committed rows.

        Returns:
            that slot, int32 ``[1]``; the rows of a prefill go on from it, in place.
        """
        self.prefill_slot = self._materialise()
        return self.prefill_slot

    def _materialise(self) -> Tensor:
        if self.kind == "snapshots":
            return self.indices[0, self.accepted.to(torch.int64) - 1]
        if self._pending:
            for i, state in enumerate(self.state):
                ops.gdn_commit(
                    state,
                    self.slots,
                    self.accepted,
                    self.parity,
                    self.journal_k[i],
                    self.journal_u[i],
                    self.journal_decay[i],
                    True,
                )
            self.accepted.zero_()
            self._pending = 0
        return self.slots

    def prefilled(self, rows: int) -> None:
        """Note that a chunk committed all of its ``rows``."""
        self.conv_accepted.fill_(rows)

    def end_prefill(self) -> None:
        """Back to rows that are committed by choice."""
        self.prefill_slot = None

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last verification."""
        journal = self.kind == "journal"
        self._set(rows, 1 - self._parity if journal else 0)
        self._pending = rows if journal else 0


class TargetState:
    """All state of one sequence.

    Attributes:
        length: committed tokens.
        kv: caches of the attention layers.
        recurrent: windows and states of the GDN layers; None without such layers.
    """

    def __init__(self, kv: KVCache, recurrent: RecurrentState | None) -> None:
        self.length, self.kv, self.recurrent = 0, kv, recurrent

    def reset(self) -> None:
        """Back to the empty sequence; K and V rows stay, and are never read."""
        self.length = 0
        if self.recurrent is not None:
            self.recurrent.reset()
