"""Runs cases one after another and keeps what they gave."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .cases import FAMILIES, Context
from .record import PeerResult, Record, gbps, line
from .timing import measure
from .work import Absent, Case, Work

__all__ = ["Outcome", "run"]


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        failed: what broke off or was wrong, and why.
        records: figures.
        left_out: families that no time was left for.
    """

    failed: dict[str, str]
    records: list[Record] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def run(
    context: Context,
    families: Sequence[str],
    seconds: float,
    say: Callable[[str], None],
    keep: Callable[[Outcome], None] = lambda outcome: None,
    now: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measure.

    Args:
        context: where and of what.
        families: names, in order.
        seconds: after which no further case is begun.
        say: gets one line per figure as it comes.
        keep: gets what there is after every family, so that nothing is lost with the process.
        now: a clock for the budget.
    """
    outcome, end = Outcome(context.failed), now() + seconds
    for name in families:
        if now() >= end:
            outcome.left_out.append(name)
            continue
        began = now()
        try:
            for case in _until(FAMILIES[name](context), end, now):
                record = _measured(context, case)
                outcome.records.append(record)
                say(line(record))
                if record.op == "read":
                    context.read_gbps = record.gbps
        except _OutOfTime:
            outcome.left_out.append(f"the rest of {name}")
        except Exception as error:  # the other families have figures of their own
            outcome.failed[name] = f"{type(error).__name__}: {error}"
            say(f"!! {name}: {outcome.failed[name]}")
        say(f"-- {name}: {now() - began:.1f} s")
        keep(outcome)
    return outcome


class _OutOfTime(Exception):
    pass


def _until(cases: Iterator[Case], end: float, now: Callable[[], float]) -> Iterator[Case]:
    for case in cases:
        yield case
        if now() >= end:
            raise _OutOfTime


def _measured(context: Context, case: Case) -> Record:
    timing = measure(context.clock, case.work.calls, context.repeats, case.work.live)
    peers = {name: _peer(context, work) for name, work in case.peers.items()}
    return Record.of(
        case.op, case.case, case.type, case.n, case.work.nbytes, timing, case.stream_gbps,
        peers=peers, parts=dict(case.parts),
    )  # fmt: skip


def _peer(context: Context, make: Callable[[], Work]) -> PeerResult:
    """A peer that fails costs its own figure alone."""
    try:
        work = make()
        us = measure(context.clock, work.calls, context.repeats).us
    except Absent as error:
        return PeerResult(None, None, str(error))
    except Exception as error:
        return PeerResult(None, None, f"{type(error).__name__}: {error}"[:300])
    return PeerResult(us, gbps(work.nbytes, us), work.note)
