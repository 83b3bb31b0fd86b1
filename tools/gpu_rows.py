"""Rows among others: what gpu_check.py runs to see that a row depends on nothing but its own."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_dflash import ops
from torch_dflash.testing.delta import DeltaLayer, ints, starts
from torch_dflash.testing.samples.quant import random_packed

TOTAL = 40
Run = Callable[[torch.device, list[int], int], Any]
INDEPENDENT: dict[str, Run] = {}  # run(device, rows, keep): what row `keep` gives among `rows`


def independent(run: Run) -> Run:
    INDEPENDENT[run.__name__.strip("_")] = run
    return run


@cache
def random(seed: int, *shape: int) -> Tensor:
    """The same numbers every time; not to be written."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(values: Tensor, rows: list[int], keep: int, device: torch.device) -> Tensor:
    """The rows asked for; all but one are NaN."""
    out = values[rows].clone()
    out[[i for i, r in enumerate(rows) if r != keep]] = torch.nan
    return out.to(device)


@independent
def quant_act(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, ...]:
    x = poisoned(random(0, TOTAL, 700), rows, keep, device)
    at = rows.index(keep)
    return ops.quant_act(x, 1)[at], ops.quant_act(x, 2)[at]


@independent
def add_rms_norm(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, ...]:
    x = poisoned(random(0, TOTAL, 1300), rows, keep, device)
    residual = poisoned(random(1, TOTAL, 1300), rows, keep, device)
    weight = random(2, 1300).to(device)
    y = ops.add_rms_norm(x, residual, weight, 1e-6, False, 1)
    return y[rows.index(keep)], residual[rows.index(keep)]


TYPES, SIZES, COLUMNS = (12, 23, 14, 0, 13, 8, 2, 30), (16, 5, 33, 4, 20, 7, 18, 3), 1280


@cache
def stacked(device: torch.device, types: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    g = torch.Generator().manual_seed(0)
    packed = (
        random_packed(t, n, COLUMNS // ops.quant_geometry(t)[0], g)
        for t, n in zip(types, sizes, strict=True)
    )
    return torch.cat(
        [ops.repack(p.to(device), t, COLUMNS) for p, t in zip(packed, types, strict=True)]
    )


@independent
def qmm(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, Tensor]:
    x = poisoned(random(0, TOTAL, COLUMNS), rows, keep, device)
    weight = stacked(device, TYPES, SIZES)
    both = (
        ops.qmm(v, weight, list(TYPES), list(SIZES), COLUMNS)[rows.index(keep)]
        for v in (x, ops.quant_act(x, 1))
    )
    packed, floats = both
    return packed, floats


@independent
def qmm_glu(device: torch.device, rows: list[int], keep: int) -> Tensor:
    x = poisoned(random(0, TOTAL, COLUMNS), rows, keep, device)
    weight = stacked(device, (23, 12), (300, 300))
    y = ops.qmm_glu(ops.quant_act(x, 1), weight, [23, 12], 300, COLUMNS, 1)
    return y[rows.index(keep)]


@independent
def head_topk(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, ...]:
    logits = random(0, TOTAL, 5000)[rows].to(device)
    if device.type != "cpu":  # there a NaN is an error
        logits[[i for i, r in enumerate(rows) if r != keep]] = torch.nan
    values, ids = ops.head_topk(logits, 16, 0.7, 20.0)
    return values[rows.index(keep)], ids[rows.index(keep)]


@independent
def sampling_probs(device: torch.device, rows: list[int], keep: int) -> Tensor:
    logits = random(0, TOTAL, 3000)[rows].to(device)
    if device.type != "cpu":
        logits[[i for i, r in enumerate(rows) if r != keep]] = torch.nan
    each = (torch.full((len(rows),), v, device=device) for v in (0.8, 50, 0.9))
    return ops.sampling_probs(logits, *each)[rows.index(keep)]


@independent
def grouped_conv(device: torch.device, rows: list[int], keep: int) -> Tensor:
    """A block a row."""
    x = poisoned(random(0, TOTAL, 96), rows, keep, device)
    coef = poisoned(random(1, TOTAL, 2 * 3 * 8), rows, keep, device)
    base = random(2, 2, 3, 96).to(device)
    out = ops.grouped_conv(x, coef, base, 1, starts([1] * len(rows), device), 1)
    return out[rows.index(keep)]


@independent
def qk_norm_rope_store(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, ...]:
    q, k, v = (
        poisoned(random(s, TOTAL, h, 64), rows, keep, device) for s, h in ((0, 4), (1, 2), (2, 2))
    )
    k_cache, v_cache = torch.zeros(2, 8, 8, 2, 64, device=device, dtype=torch.float16)
    positions = (torch.tensor(rows) * 37 % 1000).to(device)
    weight = random(3, 64).to(device)
    slots = torch.tensor(rows).to(device)
    freq = (1e4 ** (-torch.arange(16) / 16)).to(device)
    rotated = ops.qk_norm_rope_store(
        q, k, v, weight, weight, 1e-6, False, positions, freq, 1.0, [], slots, k_cache, v_cache
    )
    at = (keep // 8, keep % 8)
    return rotated[rows.index(keep)], k_cache[at], v_cache[at]


def _attention(
    q: Tensor, caches: Tensor, table: Tensor, lengths: Tensor, cu: Tensor, window: int
) -> Tensor:
    return ops.block_attention(
        q, caches[0], caches[1], table, lengths, cu, 0.125, window, True, None, None, 1.0, 0
    )


def _one_of_many(device: torch.device, rows: list[int], keep: int, dim: int) -> Tensor:
    """A sequence a row, of 1 to 1400 keys, in pages of 16."""
    length = [1 + 97 * r % 1400 for r in range(TOTAL)]
    pages = -(-max(length) // 16)
    caches = random(0, 2, TOTAL, pages * 16, 1, dim).clone()
    caches[:, [r for r in range(TOTAL) if r != keep]] = torch.nan
    caches[:, keep, length[keep] :] = torch.nan
    table = torch.arange(TOTAL * pages, dtype=torch.int32).view(TOTAL, pages)[rows]
    out = _attention(
        poisoned(random(1, TOTAL, 4, dim), rows, keep, device),
        caches.view(2, TOTAL * pages, 16, 1, dim).to(device),
        table.to(device),
        ints(*(length[r] for r in rows), device=device),
        starts([1] * len(rows), device),
        0,
    )
    return out[rows.index(keep)]


@independent
def block_attention(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, ...]:
    """The kernel for any head_dim, and those for 128 and 256."""
    return tuple(_one_of_many(device, rows, keep, dim) for dim in (64, 128, 256))


@independent
def ssm_conv_step(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, Tensor]:
    x = poisoned(random(0, TOTAL, 96), rows, keep, device)
    state = poisoned(random(1, TOTAL + 1, 8, 96), list(range(TOTAL + 1)), keep + 1, device)
    out = ops.ssm_conv_step(
        x,
        state,
        random(2, 96, 4).to(device),
        None,
        True,
        ints(*(r + 1 for r in rows), device=device),
        ints(*(1 + r % 5 for r in rows), device=device),
        starts([1] * len(rows), device),
    )
    return out[rows.index(keep)], state[keep + 1]


def _layer(device: torch.device, rows: list[int], keep: int, dv: int) -> tuple[DeltaLayer, Tensor]:
    layer = DeltaLayer(TOTAL, device, dv=dv)
    for name in ("mixed", "a", "b", "z"):
        values = layer.inputs[name].cpu()
        layer.inputs[name] = poisoned(values, list(range(TOTAL)), keep, device)
    state = layer.state(TOTAL + 1).cpu()
    return layer, poisoned(state, list(range(TOTAL + 1)), keep + 1, device)


def _step(device: torch.device, rows: list[int], keep: int, dv: int) -> tuple[Tensor, Tensor]:
    layer, state = _layer(device, rows, keep, dv)
    at = torch.tensor(rows, device=device)
    out = layer.step(state, [[r + 1] for r in rows], [1] * len(rows), rows=at)
    return out[rows.index(keep)], state[keep + 1]


def _journal_step(device: torch.device, rows: list[int], keep: int, dv: int) -> tuple[Tensor, ...]:
    layer, state = _layer(device, rows, keep, dv)
    journal = layer.journal(TOTAL + 1, 4)
    for i, part in enumerate(journal):
        part[:, keep + 1] = random(9 + i, *part[:, keep + 1].shape).to(device) * 0.1
    accepted = [(r % 5 if r == keep else 4) for r in rows]
    out = layer.journal_step(
        state,
        journal,
        [r + 1 for r in rows],
        [1] * len(rows),
        accepted,
        [r % 2 for r in rows],
        rows=torch.tensor(rows, device=device),
    )
    return (out[rows.index(keep)], state[keep + 1], *(part[:, keep + 1] for part in journal))


V_DIMS = (16, 128)  # heads of 128 x 128 have a kernel of their own


@independent
def gdn_step(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, ...]:
    return sum((_step(device, rows, keep, dv) for dv in V_DIMS), ())


@independent
def gdn_journal_step(device: torch.device, rows: list[int], keep: int) -> tuple[Tensor, ...]:
    return sum((_journal_step(device, rows, keep, dv) for dv in V_DIMS), ())


def block_against_single_rows(device: torch.device) -> Iterator[tuple[str, Any, Any]]:
    """Name, what a block of 32 rows gives, what its rows give one by one."""
    count = 32
    for dv in V_DIMS:
        layer = DeltaLayer(count, device, dv=dv)
        state = layer.state(2 + count)
        block = layer.step(state.clone(), [[1, *range(3, 2 + count)]], [count])
        single, _ = layer.one_by_one(state.clone(), 1, range(count))
        yield f"gdn_step, {dv}", block, single
        journal = layer.journal(2, count)
        yield (
            f"gdn_journal_step, {dv}",
            layer.journal_step(state[:2].clone(), journal, [1], [count], [0], [0]),
            single,
        )
        yield f"gdn_prefill, {dv}", layer.prefill(state[:2].clone(), [1], [count], [1]), single

    x, weight = random(0, count, 96).to(device), random(1, 96, 4).to(device)
    window = random(2, 2, count + 2, 96).to(device)
    slot, one = ints(1, device=device), ints(1, device=device)
    whole = ops.ssm_conv_step(
        x, window.clone(), weight, None, True, slot, one, starts([count], device)
    )
    moving = window.clone()
    rows = [
        ops.ssm_conv_step(x[t : t + 1], moving, weight, None, True, slot, one, starts([1], device))
        for t in range(count)
    ]
    yield "ssm_conv_step", whole, torch.cat(rows)

    committed = 1000
    for dim, width in ((64, 0), (64, 300), (128, 300), (256, 0), (256, 300)):
        caches = random(3, 2, 1, committed + count, 1, dim).to(device)
        q, table = random(4, count, 4, dim).to(device), ints([0], device=device)
        length = ints(committed + count, device=device)
        whole = _attention(q, caches, table, length, starts([count], device), width)
        rows = [
            _attention(
                q[t : t + 1],
                caches,
                table,
                ints(committed + t + 1, device=device),
                starts([1], device),
                width,
            )
            for t in range(count)
        ]
        yield f"block_attention of {dim}, window {width}", whole, torch.cat(rows)
