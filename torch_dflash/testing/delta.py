"""A Gated DeltaNet layer on random numbers, run through any of its operators."""

from typing import Any

import torch
from torch import Tensor

from .samples.delta import delta_inputs

__all__ = ["DeltaLayer", "ints", "starts"]


def ints(*values: Any, device: torch.device | str = "cpu") -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths: list[int], device: torch.device | str = "cpu") -> Tensor:
    """``cu_seqlens`` of sequences of these lengths."""
    return ints(*[sum(lengths[:s]) for s in range(len(lengths) + 1)], device=device)


class DeltaLayer:
    """Inputs of ``rows`` rows and the constants of one layer; every state is the caller's."""

    def __init__(
        self,
        rows: int,
        device: torch.device | str = "cpu",
        *,
        nk: int = 2,
        nv: int = 4,
        dk: int = 128,
        dv: int = 16,
        tiled: bool = True,
        norm: bool = True,
        sigmoid_gate: bool = False,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        device = torch.device(device)
        self.inputs: dict[str, Any] = {}
        self.inputs.update(delta_inputs(self.generator, rows, nk, nv, dk, dv, device))
        if not norm:
            self.inputs["z"] = self.inputs["norm_weight"] = None
        self.heads: dict[str, Any] = {
            "eps": 1e-6,
            "sigmoid_gate": sigmoid_gate,
            "k_heads": nk,
            "k_dim": dk,
        }
        self.nv, self.dv, self.tiled, self.device = nv, dv, tiled, device

    def state(self, slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random; slot 0, which nobody may read, is NaN."""
        shape = (slots, self.nv, self.dv, self.heads["k_dim"])
        state = torch.randn(shape, generator=self.generator).to(dtype).to(self.device)
        state[0] = torch.nan
        return state

    def journal(self, slots: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Empty, that is NaN."""
        nk, dk = self.heads["k_heads"], self.heads["k_dim"]
        shapes = [(nk, dk), (self.nv, self.dv), (self.nv,)]
        full = [torch.full((2, slots, rows, *s), torch.nan, device=self.device) for s in shapes]
        return full[0], full[1], full[2]

    def arguments(self, rows: slice | Tensor | None = None) -> tuple[Any, ...]:
        """The arguments that every operator begins with, of all rows or of some."""
        per_row = ("mixed", "a", "b", "z")
        values = {
            k: v[rows] if rows is not None and k in per_row and v is not None else v
            for k, v in self.inputs.items()
        }
        return (*values.values(), *self.heads.values(), self.tiled)

    def step(
        self,
        state: Tensor,
        indices: list[list[int]],
        lengths: list[int],
        accepted: list[int] | None = None,
        rows: slice | Tensor | None = None,
        act_mode: int = 0,
    ) -> Tensor:
        """``gdn_step``."""
        return torch.ops.dflash.gdn_step(
            *self.arguments(rows),
            state,
            ints(*indices, device=self.device),
            None if accepted is None else ints(*accepted, device=self.device),
            starts(lengths, self.device),
            act_mode,
        )

    def journal_step(
        self,
        state: Tensor,
        journal: tuple[Tensor, Tensor, Tensor],
        slots: list[int],
        lengths: list[int],
        accepted: list[int],
        parity: list[int],
        rows: slice | Tensor | None = None,
        act_mode: int = 0,
    ) -> Tensor:
        """``gdn_journal_step``."""
        return torch.ops.dflash.gdn_journal_step(
            *self.arguments(rows),
            state,
            *(ints(*v, device=self.device) for v in (slots, accepted, parity)),
            *journal,
            starts(lengths, self.device),
            act_mode,
        )

    def commit(
        self,
        state: Tensor,
        journal: tuple[Tensor, Tensor, Tensor],
        slots: list[int],
        accepted: list[int],
        parity: list[int],
    ) -> None:
        """``gdn_commit``."""
        numbers = (ints(*v, device=self.device) for v in (slots, accepted, parity))
        torch.ops.dflash.gdn_commit(state, *numbers, *journal, self.tiled)

    def prefill(
        self,
        state: Tensor,
        slots: list[int],
        lengths: list[int],
        has_state: list[int],
        rows: slice | Tensor | None = None,
        act_mode: int = 0,
    ) -> Tensor:
        """``gdn_prefill``."""
        return torch.ops.dflash.gdn_prefill(
            *self.arguments(rows),
            state,
            *(ints(*v, device=self.device) for v in (slots, has_state)),
            starts(lengths, self.device),
            act_mode,
        )

    def one_by_one(self, state: Tensor, slot: int, rows: range) -> tuple[Tensor, Tensor]:
        """Plain decoding in place: the outputs and the states after each row."""
        out, states = [], []
        for t in rows:
            out.append(self.step(state, [[slot]], [1], rows=slice(t, t + 1)))
            states.append(state[slot].clone())
        return torch.cat(out), torch.stack(states)
