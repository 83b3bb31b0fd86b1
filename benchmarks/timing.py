"""Times calls as they run in a step: replayed from a graph, their operands not in the L2 cache."""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["COLD_BYTES", "Clock", "CudaClock", "HostClock", "Timing", "copies_for", "measure"]

COLD_BYTES = 200_000_000  # other bytes between two uses of one operand; an H200's L2 holds 60 MB
_LEAST_US = 1000.0  # of one replay: far above what starting a graph and two events cost
_LEAST_CALLS = 8
Call = Callable[[], object]


def copies_for(nbytes: int, cold: int = COLD_BYTES) -> int:
    """How many copies of an operand take turns, so that ``cold`` bytes lie between two uses of one.

    >>> copies_for(100_270_080), copies_for(3_145_728), copies_for(16 << 30)
    (3, 65, 2)
    """
    return 1 + math.ceil(cold / nbytes)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        us: median over the repeats.
        low, high: the tenth and the ninetieth percentile.
        repeats: replays.
        calls: calls of one replay.
    """

    us: float
    low: float
    high: float
    repeats: int
    calls: int


class Clock(Protocol):
    """Where calls run."""

    def record(self, calls: Sequence[Call]) -> Callable[[int], list[float]]:
        """Make the calls replayable.

        Returns:
            a function that replays them a number of times: microseconds of each replay.
        """

    def live(self, calls: Sequence[Call]) -> Callable[[int], list[float]]:
        """The same without a graph: as a program makes the calls, its own time included."""


class CudaClock:
    """CUDA graphs, timed by events."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        # Graphs follow one another in one pool of memory; it lives as long as a graph that uses it.
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._first.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            self._first.capture_end()
        self._pool = self._first.pool()

    def record(self, calls: Sequence[Call]) -> Callable[[int], list[float]]:
        """Run the first call, which may compile something, then capture all of them."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            calls[0]()
            torch.cuda.synchronize()
            gc.disable()  # a collection may free device memory, which a capture forbids
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    for call in calls:
                        call()
                finally:
                    graph.capture_end()
            finally:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay(times: int) -> list[float]:
            def event() -> torch.cuda.Event:
                return torch.cuda.Event(enable_timing=True)

            marks = [event() for _ in range(times + 1)]
            marks[0].record()
            for mark in marks[1:]:  # queued ahead of the device: it never waits for the host
                graph.replay()
                mark.record()
            torch.cuda.synchronize()
            return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]

        return replay

    def live(self, calls: Sequence[Call]) -> Callable[[int], list[float]]:
        """From an idle device to an idle device, by the host's clock."""
        return _by_the_host(calls, torch.cuda.synchronize)


class HostClock:
    """No graph and no device: what the suite runs on where there is no GPU."""

    def record(self, calls: Sequence[Call]) -> Callable[[int], list[float]]:
        """The calls one after another, timed by the host."""
        return _by_the_host(calls, lambda: None)

    live = record


def _by_the_host(calls: Sequence[Call], wait: Call) -> Callable[[int], list[float]]:
    def replay(times: int) -> list[float]:
        out = []
        for _ in range(times):
            wait()
            start = time.perf_counter()
            for call in calls:
                call()
            wait()
            out.append((time.perf_counter() - start) * 1e6)
        return out

    return replay


def measure(clock: Clock, calls: Sequence[Call], repeats: int = 15, live: bool = False) -> Timing:
    """Time calls that take turns.

    Args:
        clock: where they run.
        calls: one for each copy of the operands.
        repeats: replays that are timed, after two that are not.
        live: as a program makes the calls, not from a graph.

    Returns:
        the time of one call. A replay cycles through the copies until it lasts a millisecond, so
        that starting a graph (some microseconds) does not count.
    """
    record = clock.live if live else clock.record
    once = record(calls)
    guess = once(2)[-1]
    rounds = max(math.ceil(_LEAST_US / max(guess, 1e-3)), math.ceil(_LEAST_CALLS / len(calls)))
    if guess >= _LEAST_US:
        rounds = 1
    rounds = min(rounds, math.ceil(512 / len(calls)))
    replay = once if rounds == 1 else record([*calls] * rounds)
    if rounds > 1:
        replay(2)
    count = rounds * len(calls)
    times = sorted(t / count for t in replay(repeats))
    edge = len(times) // 10
    return Timing(statistics.median(times), times[edge], times[-1 - edge], repeats, count)
