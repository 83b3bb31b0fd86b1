"""Whole steps of a model, each against the bytes that it must read."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torch_dflash.decoding.sampling import GREEDY

from .. import model
from ..work import Case, Work
from .context import Context

__all__ = ["steps"]

VERIFIED_ROWS = (1, 8, 16)


def steps(c: Context) -> Iterator[Case]:
    """Plain and verify steps of the target, a draft, and the drafter's commit."""
    target = model.target(c.shapes.target, c.shapes.context, c.device)
    drafter = model.drafter(c.shapes.drafter, target, c.device)
    target.capture(c.shapes.drafter.target_layer_ids)
    context = f"context {c.shapes.context}"
    for rows in VERIFIED_ROWS:
        floor = model.target_floor(target, rows)
        name = "plain" if rows == 1 else f"verify {rows}"
        yield _case(c, f"{name}, {context}", "Q4_K_M", rows, floor, _verify(target, rows, c))
    rows = c.shapes.drafter.block_size
    anchor = torch.tensor([1], device=c.device)
    draft_tokens = c.shapes.drafter.max_draft_tokens
    floor = model.drafter_floor(drafter, target, rows)
    yield _case(c, f"DFlash2 draft of {draft_tokens}, {context}", "Q8_0", rows, floor,
                lambda: drafter.propose(anchor, draft_tokens, GREEDY))  # fmt: skip
    hidden = c.random(rows, c.shapes.drafter.target_hidden_columns)
    floor = model.append_floor(drafter)
    yield _case(c, f"DFlash2 commit of {rows}, {context}", "Q8_0", rows, floor,
                _commit(drafter, hidden))  # fmt: skip
    target.graphs.enabled = drafter.graphs.enabled = True
    for rows in VERIFIED_ROWS[:2]:
        floor = model.target_floor(target, rows)
        yield _case(c, f"verify {rows} and commit, called from Python", "Q4_K_M", rows, floor,
                    _step(target, rows, c), live=True)  # fmt: skip
    floor = model.drafter_floor(drafter, target, c.shapes.drafter.block_size)
    yield _case(c, "DFlash2 draft, called from Python", "Q8_0", c.shapes.drafter.block_size, floor,
                lambda: drafter.propose(anchor, draft_tokens, GREEDY), live=True)  # fmt: skip


def _case(
    c: Context,
    name: str,
    kind: str,
    rows: int,
    floor: model.Floor,
    call: Callable[[], object],
    live: bool = False,
) -> Case:
    parts: dict[str, object] = {"floor": {"bytes": dict(floor.parts), "read_gbps": c.read_gbps}}
    if c.read_gbps is not None:
        parts["floor_us"] = floor.nbytes / c.read_gbps / 1e3
    return Case(
        "step", name, kind, rows, Work([call], floor.nbytes, live=live), c.read_gbps, parts=parts
    )


def _verify(target: model.Decoder, rows: int, c: Context) -> Callable[[], object]:
    """A verification behind a full acceptance of the last one, which never is committed."""
    recurrent = target.state.recurrent
    assert recurrent is not None
    tokens = torch.arange(rows, device=c.device)
    recurrent.accepted.fill_(rows)
    recurrent.conv_accepted.fill_(rows)

    def run() -> tuple[Tensor, Tensor]:
        target._verified = 0  # the same place again
        return target.verify(tokens)

    return run


def _step(target: model.Decoder, rows: int, c: Context) -> Callable[[], object]:
    """What the runner does with a verification of which everything is accepted."""
    target.reset()
    target.state.length = length = c.shapes.context
    tokens = torch.arange(rows, device=c.device)

    def run() -> None:
        target.verify(tokens)
        target.commit(rows)
        target.state.length = length  # the same place again

    return run


def _commit(drafter: model.DFlash2, hidden: Tensor) -> Callable[[], object]:
    length = drafter.length

    def run() -> None:
        drafter.commit(hidden)
        drafter._length = length  # the same place again

    return run
