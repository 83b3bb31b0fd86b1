"""How long is measured, and on which copies, against a clock that runs nothing."""

import math

import pytest
from fake_clock import FakeClock

from benchmarks.timing import COLD_BYTES, HostClock, copies_for, measure


@pytest.mark.parametrize("nbytes", [1, 3_145_728, 50_000_000, 100_270_080, COLD_BYTES, 16 << 30])
def test_copies_leave_enough_bytes_between_two_uses(nbytes):
    copies = copies_for(nbytes)
    assert (copies - 1) * nbytes >= COLD_BYTES
    assert copies == 2 or (copies - 2) * nbytes < COLD_BYTES  # and not one more


def test_short_calls_fill_a_millisecond_in_whole_turns():
    clock, calls = FakeClock(us=3.0), [object(), object(), object()]
    timing = measure(clock, calls, repeats=11)
    last, times = clock.replays[-1]
    recorded = clock.recorded[last]
    assert times == 11
    assert len(recorded) * 3.0 >= 1000.0
    assert len(recorded) % 3 == 0
    assert recorded == calls * (len(recorded) // 3)  # the copies take turns
    assert (timing.us, timing.repeats, timing.calls) == (3.0, 11, len(recorded))


def test_long_calls_are_recorded_once():
    clock = FakeClock(us=4000.0)
    timing = measure(clock, [object(), object()], repeats=5)
    assert len(clock.recorded) == 1
    assert timing.calls == 2
    assert clock.replays == [(0, 2), (0, 5)]


def test_a_recording_stays_small():
    clock = FakeClock(us=0.01)
    assert measure(clock, [object()] * 65, repeats=3).calls == 65 * math.ceil(512 / 65)


def test_median_and_percentiles():
    # replays of 10.0, 10.5 .. 20.0 us a call: median the eleventh, the second from either end
    timing = measure(FakeClock(us=10.0, jitter=0.5), [object()] * 200, repeats=21)
    assert (timing.low, timing.us, timing.high) == pytest.approx((11.0, 15.0, 19.0))


def test_the_host_clock_runs_every_call_in_order():
    seen = []
    replay = HostClock().record([lambda: seen.append("a"), lambda: seen.append("b")])
    times = replay(3)
    assert seen == ["a", "b"] * 3
    assert len(times) == 3
    assert min(times) > 0
