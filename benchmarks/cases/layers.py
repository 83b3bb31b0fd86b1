"""The operators between the matmuls, at a target's shapes."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from torch_dflash import ops
from torch_dflash.models.state import GDNShape

from ..work import Case, Conv, Delta, Norm, Work
from .context import Context

__all__ = ["attention", "conv", "delta", "head", "norm"]

OUTPUTS = {"float32": 0, "planes": 1}  # what the next layer reads
_RESIDENT = 1  # copies: what is in the cache stays there
_EPS = 1e-6


def _shape(c: Context) -> GDNShape:
    t = c.shapes.target
    return GDNShape(
        t.num_key_heads, t.num_value_heads, t.key_head_dim, t.value_head_dim, t.conv_kernel
    )


def _turns(c: Context, nbytes: int) -> dict[str, int]:
    """States of 48 layers come from memory; peers' published figures are of one, in the cache."""
    return {"rotated": c.copies(nbytes), "resident": _RESIDENT}


def delta(c: Context) -> Iterator[Case]:
    """The delta rule with gates, unit keys and gated norm: with a journal, with snapshots."""
    s = _shape(c)
    for rows in (r for r in c.rows if r <= 16):
        spec = partial(Delta, rows, s.k_heads, s.v_heads, s.v_dim)
        state_bytes = 4 * s.v_heads * s.v_dim * s.k_dim
        for where, copies in _turns(c, state_bytes).items():
            peers = {n: partial(p.delta, spec(copies, c.device)) for n, p in c.peers.items()}
            for output, mode in OUTPUTS.items():
                beside = peers if output == "float32" else {}
                case = f"T={rows} {where}"
                work = _journal(c, s, rows, copies, mode)
                yield Case("gdn_journal_step", case, output, rows, work, peers=beside)
                work = _snapshots(c, s, rows, copies, mode)
                yield Case("gdn_step", case, output, rows, work, peers=beside)


def _delta_inputs(c: Context, s: GDNShape, rows: int) -> tuple[object, ...]:
    value = s.v_heads * s.v_dim
    return (
        c.random(rows, s.channels),
        c.random(rows, s.v_heads, seed=1),
        c.random(rows, s.v_heads, seed=2),
        -c.random(s.v_heads, seed=3).abs() - 0.05,
        c.random(s.v_heads, seed=4),
        c.random(rows, value, seed=5),
        torch.ones(s.v_dim, device=c.device),
        _EPS,
        False,
        s.k_heads,
        s.k_dim,
        True,
    )


def _journal(c: Context, s: GDNShape, rows: int, copies: int, mode: int) -> Work:
    """Every row of the last step is replayed, as where all of it was accepted."""
    inputs = _delta_inputs(c, s, rows)
    slots, accepted, parity = c.ints(1), c.ints(rows), c.ints(0)
    cu_seqlens = c.ints(0, rows)
    calls, nbytes = [], 0
    for _ in range(copies):
        state = torch.zeros(2, s.v_heads, s.v_dim, s.k_dim, device=c.device)
        size = 2, 2, rows, s.v_heads
        k = torch.zeros(*size[:3], s.k_heads, s.k_dim, device=c.device)
        u = torch.zeros(*size, s.v_dim, device=c.device)
        decay = torch.ones(*size, device=c.device)
        calls.append(
            partial(
                ops.gdn_journal_step,
                *inputs,
                state,
                slots,
                accepted,
                parity,
                k,
                u,
                decay,
                cu_seqlens,
                mode,
            )
        )
        journal = sum(t.numel() for t in (k, u, decay))  # bytes of one slot of one half
        nbytes = 2 * (state.numel() * 4 // 2 + journal)  # read and written
    return Work(calls, nbytes)


def _snapshots(c: Context, s: GDNShape, rows: int, copies: int, mode: int) -> Work:
    inputs = _delta_inputs(c, s, rows)
    slots = 1 + rows * copies
    state = torch.zeros(slots, s.v_heads, s.v_dim, s.k_dim, device=c.device)
    indices = torch.arange(1, slots, dtype=torch.int32, device=c.device).view(copies, 1, rows)
    accepted, cu_seqlens = c.ints(1), c.ints(0, rows)
    calls = [
        partial(ops.gdn_step, *inputs, state, index, accepted, cu_seqlens, mode)
        for index in indices
    ]
    return Work(calls, (1 + rows) * 4 * state[0].numel())


def conv(c: Context) -> Iterator[Case]:
    """The causal convolution with silu."""
    s = _shape(c)
    weight = c.random(s.channels, s.taps)
    for rows in c.rows:
        width = s.taps - 2 + max(c.rows)
        touched = 4 * s.channels * (s.taps - 1 + s.taps - 2 + rows)  # history read, window written
        x, cu_seqlens = c.random(rows, s.channels, seed=1), c.ints(0, rows)
        nbytes = touched + 4 * (2 * x.numel() + weight.numel())
        for where, copies in _turns(c, touched).items():
            copies = min(copies, 256)  # of 0.3 MB and more, with room between them: 350 MB
            windows = torch.zeros(1 + copies, width, s.channels, device=c.device)
            slots = torch.arange(1, 1 + copies, dtype=torch.int32, device=c.device).view(-1, 1)
            calls = [
                partial(
                    ops.ssm_conv_step, x, windows, weight, None, True, slot, c.ints(1), cu_seqlens
                )
                for slot in slots
            ]
            spec = Conv(rows, s.channels, s.taps, copies, c.device)
            peers = {n: partial(p.conv, spec) for n, p in c.peers.items()}
            yield Case("ssm_conv_step", f"T={rows} {where}", None, rows, Work(calls, nbytes),
                       peers=peers)  # fmt: skip


def norm(c: Context) -> Iterator[Case]:
    """Residual addition and norm; packing alone. Their rows are in the cache, just written."""
    columns = c.shapes.target.hidden_size
    weight = torch.ones(columns, device=c.device)
    for rows in c.rows:
        x, residual = c.random(rows, columns), c.random(rows, columns, seed=1)
        peers = {n: partial(p.norm, Norm(rows, columns, c.device)) for n, p in c.peers.items()}
        for output, mode in OUTPUTS.items():
            call = partial(ops.add_rms_norm, x, residual, weight, _EPS, False, mode)
            out = 4 if mode == 0 else 2  # bytes a value
            work = Work([call], rows * columns * (12 + out))
            beside = peers if mode else {}
            yield Case("add_rms_norm", f"{columns}", output, rows, work, peers=beside)
        for width in (columns, c.shapes.target.intermediate_size):
            call = partial(ops.quant_act, c.random(rows, width), OUTPUTS["planes"])
            yield Case("quant_act", f"{width}", "planes", rows, Work([call], rows * width * 6))


def attention(c: Context) -> Iterator[Case]:
    """Attention with an output gate over a context in float16."""
    t = c.shapes.target
    for context in c.shapes.contexts:
        for rows in (r for r in c.rows if r <= 16):
            keys = context + rows
            nbytes = 2 * 2 * keys * t.kv_size
            copies = c.copies(nbytes)
            cache = torch.randn(
                copies, 2, 1, keys, t.num_kv_heads, t.head_dim, device=c.device, dtype=torch.float16
            )
            q = c.random(rows, t.num_heads, t.head_dim)
            gate = c.random(rows, t.num_heads, t.head_dim, seed=1)
            pages, lengths, cu_seqlens = c.ints(0).view(1, 1), c.ints(keys), c.ints(0, rows)

            def call(kv: Tensor, *rest: Tensor) -> Tensor:
                q, gate, pages, lengths, cu_seqlens = rest
                return ops.block_attention(
                    q, kv[0], kv[1], pages, lengths, cu_seqlens, t.head_dim**-0.5, 0, True, None,
                    gate, 1.0, 1,
                )  # fmt: skip

            rest = q, gate, pages, lengths, cu_seqlens
            calls = [partial(call, kv, *rest) for kv in cache]
            yield Case("block_attention", f"context {context}", "planes", rows, Work(calls, nbytes))


def head(c: Context) -> Iterator[Case]:
    """The best of a vocabulary, and the candidates of DFlash2's selector."""
    vocabulary, top = c.shapes.target.vocab_size, c.shapes.drafter.selector_top_k
    assert top is not None
    for rows in c.rows:
        logits = c.random(rows, vocabulary)
        for k in (1, top):
            call = partial(ops.head_topk, logits, k, 1.0, 0.0)
            yield Case(
                "head_topk", f"{k} of {vocabulary}", None, rows, Work([call], logits.numel() * 4)
            )
