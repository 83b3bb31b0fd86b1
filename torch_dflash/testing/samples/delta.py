"""Samples of the gated delta rule."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...reference.delta import delta_rule, gates, k_heads_of, l2norm
from ...reference.norm import gated_rms_norm
from .. import operator
from .conv import ints


def delta_inputs(
    g: torch.Generator, rows: int, nk: int, nv: int, dk: int, dv: int, device: torch.device
) -> dict[str, Tensor]:
    """What every form of the rule reads, with decays from almost 0 to almost 1."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device)

    return {
        "mixed": randn(rows, 2 * nk * dk + nv * dv),
        "a": randn(rows, nv) * 2,
        "b": randn(rows, nv) * 2,
        "A": -torch.randn(nv, generator=g).exp().to(device),  # exp has its own bits on a GPU
        "dt_bias": randn(nv),
        "z": randn(rows, nv * dv),
        "norm_weight": randn(dv),
    }


def _split(mixed: Tensor, k_heads: int, k_dim: int, v_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    keys = k_heads * k_dim
    q, k, v = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
    rows = mixed.shape[0]
    return (
        q.reshape(rows, k_heads, k_dim),
        k.reshape(rows, k_heads, k_dim),
        v.reshape(rows, v_heads, v.shape[1] // v_heads),
    )


def _rows(
    begin: int,
    end: int,
    state: Tensor,
    args: tuple[Any, ...],
    state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs and states of rows begin .. end - 1, and what a journal keeps of them."""
    mixed, a, b, A, dt_bias, z, norm_weight, eps, sigmoid_gate, k_heads, k_dim, tiled = args
    nv = A.shape[0]
    q, k, v = _split(mixed[begin:end], k_heads, k_dim, nv)
    decay, strength = gates(a[begin:end], b[begin:end], A, dt_bias)
    out, states = delta_rule(q, k, v, decay, strength, state, tiled, state_dtype)
    before = torch.cat([state.double()[None], states])[:-1]
    key = l2norm(k)[:, k_heads_of(nv, k_heads, tiled)]
    given = (before @ key[..., None])[..., 0]
    kept = {
        "k": l2norm(k),
        "u": strength[..., None] * (v.double() - decay[..., None] * given),
        "decay": decay,
    }
    if norm_weight is not None:
        out = gated_rms_norm(out, z[begin:end].reshape(out.shape), norm_weight, eps, sigmoid_gate)
    return out.flatten(1).float(), states, kept


def _spans(cu_seqlens: Tensor) -> list[tuple[int, int, int]]:
    starts = cu_seqlens.tolist()
    return [(s, starts[s], starts[s + 1]) for s in range(len(starts) - 1)]


def _output(mixed: Tensor, state: Tensor) -> Tensor:
    return torch.zeros(mixed.shape[0], state.shape[1] * state.shape[2], device=mixed.device)


def _gdn_step(*args: Any) -> Tensor:
    *shared, state, state_indices, num_accepted, cu_seqlens, _ = args
    out = _output(shared[0], state)
    for s, begin, end in _spans(cu_seqlens):
        accepted = 1 if num_accepted is None else max(int(num_accepted[s]), 1)
        start = int(state_indices[s, accepted - 1])
        if start <= 0 or begin == end:
            continue
        out[begin:end], states, _ = _rows(begin, end, state[start], tuple(shared), state.dtype)
        for t in range(end - begin):
            if state_indices[s, t] > 0:
                state[state_indices[s, t]] = states[t].to(state.dtype)
    return out


def _gdn_commit(
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    parity: Tensor,
    journal_k: Tensor,
    journal_u: Tensor,
    journal_decay: Tensor,
    tiled: bool,
) -> None:
    heads = k_heads_of(state.shape[1], journal_k.shape[3], tiled)
    for s, slot in enumerate(slots.tolist()):
        if slot <= 0:
            continue
        at = (int(parity[s]), slot)
        for t in range(int(num_accepted[s])):
            written = (
                journal_u[at][t].double()[..., None] * journal_k[at][t, heads].double()[:, None]
            )
            decayed = journal_decay[at][t].double()[:, None, None] * state[slot].double()
            state[slot] = (decayed + written).to(state.dtype)


def _gdn_journal_step(*args: Any) -> Tensor:
    *shared, state, slots, num_accepted, parity, jk, ju, jdecay, cu_seqlens, _ = args
    out = _output(shared[0], state)
    for s, begin, end in _spans(cu_seqlens):
        slot, one = int(slots[s]), slice(s, s + 1)
        if slot <= 0 or begin == end:
            continue
        _gdn_commit(state, slots[one], num_accepted[one], parity[one], jk, ju, jdecay, shared[-1])
        out[begin:end], _, kept = _rows(begin, end, state[slot], tuple(shared), state.dtype)
        to = (1 - int(parity[s]), slot, slice(0, end - begin))
        jk[to], ju[to], jdecay[to] = (kept[n].float() for n in ("k", "u", "decay"))
    return out


def _gdn_prefill(*args: Any) -> Tensor:
    *shared, state, slots, has_state, cu_seqlens, _ = args
    out = _output(shared[0], state)
    for s, begin, end in _spans(cu_seqlens):
        slot = int(slots[s])
        if slot <= 0 or begin == end:
            continue
        start = state[slot] if has_state[s] else torch.zeros_like(state[slot])
        out[begin:end], states, _ = _rows(begin, end, start, tuple(shared), state.dtype)
        state[slot] = states[-1].to(state.dtype)
    return out


# (k heads, v heads, k_dim, v_dim, tiled, rows of each sequence, gated norm, sigmoid gate)
CASES = [
    (1, 1, 128, 128, False, [1], True, False),
    (2, 4, 16, 24, True, [3, 0, 1], True, True),
    (2, 4, 64, 6, False, [2, 5], False, False),
    (1, 3, 8, 8, False, [1, 4, 2], True, False),
    (1, 2, 256, 4, True, [2], True, False),
    (3, 3, 100, 5, False, [17], False, False),
    (1, 3, 128, 128, True, [5, 0, 9], True, True),
]


def _cases(device: torch.device) -> Iterator[tuple[torch.Generator, list[Any], Tensor, list[int]]]:
    """A generator, the arguments up to tiled, a state of 8 slots, and the row counts."""
    g = torch.Generator().manual_seed(0)
    for nk, nv, dk, dv, tiled, lengths, norm, sigmoid in CASES:
        rows = sum(lengths) + 1  # a row of padding
        x = delta_inputs(g, rows, nk, nv, dk, dv, device)
        if not norm:
            x = {**x, "z": None, "norm_weight": None}  # type: ignore[dict-item]
        state = torch.randn(8, nv, dv, dk, generator=g).to(device)
        yield g, [*x.values(), 1e-6, sigmoid, nk, dk, tiled], state, lengths


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return ints([sum(lengths[:s]) for s in range(len(lengths) + 1)], device)


@operator("gdn_step", oracle=_gdn_step)
def gdn_step(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for _, shared, state, lengths in _cases(device):
        columns = max(lengths) + 1
        if columns == 2:  # one row: plain decoding, in place
            indices, accepted = ints([[5, 0]] * len(lengths), device), None
        else:
            state = state.repeat(4, 1, 1, 1)
            first = [[1 + s * columns + t for t in range(columns)] for s in range(len(lengths))]
            first[-1][1] = 0  # a row that nobody wants
            indices = ints(first, device)
            accepted = ints([columns, 0, 1][: len(lengths)], device)
        yield (*shared, state, indices, accepted, _starts(lengths, device), 0)


@operator("gdn_journal_step", oracle=_gdn_journal_step)
def gdn_journal_step(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for g, shared, state, lengths in _cases(device):
        yield (
            *shared,
            state,
            *_journal(g, state, shared[-3], lengths),
            _starts(lengths, device),
            0,
        )


def _journal(g: torch.Generator, state: Tensor, nk: int, lengths: list[int]) -> tuple[Tensor, ...]:
    slots, nv, dv, dk = state.shape
    rows = max(lengths) + 1
    count = len(lengths)
    keys = torch.randn(2, slots, rows, nk, dk, generator=g) / dk**0.5
    return (
        ints([3, 6, -1][:count] if count != 1 else [2], state.device),
        ints([rows, 0, 1][:count], state.device),
        ints([0, 1, 1][:count], state.device),
        keys.to(state.device),
        torch.randn(2, slots, rows, nv, dv, generator=g).to(state.device),
        torch.rand(2, slots, rows, nv, generator=g).to(state.device),
    )


@operator("gdn_commit", oracle=_gdn_commit)
def gdn_commit(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for g, shared, state, lengths in _cases(device):
        yield (state, *_journal(g, state, shared[-3], lengths), shared[-1])


@operator("gdn_prefill", oracle=_gdn_prefill)
def gdn_prefill(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for _, shared, state, lengths in _cases(device):
        slots = ints([4, 0, 7][: len(lengths)], device)
        has_state = ints([0, 1, 1][: len(lengths)], device)
        yield (*shared, state, slots, has_state, _starts(lengths, device), 0)
