"""What a run keeps: figures, absences, failures, what no time was left for."""

import json

import pytest
import torch
from fake_clock import FakeClock

from benchmarks import suite
from benchmarks.cases import Context
from benchmarks.record import KEYS, table, to_json
from benchmarks.shapes import TINY
from benchmarks.work import Absent, Case, Work


def context(us=10.0):
    return Context(device=torch.device("cpu"), shapes=TINY, clock=FakeClock(us), peers={})


def case(name="a", **more):
    return Case("qmm", name, "Q4_K", 8, Work([object()], 30_000), **more)


@pytest.fixture
def families(monkeypatch):
    found = {}
    monkeypatch.setattr(suite, "FAMILIES", found)
    return found


def run(families, seconds=1e9, now=lambda: 0.0, us=10.0):
    said = []
    kept = []

    def keep(outcome):
        kept.append(len(outcome.records))

    outcome = suite.run(context(us), list(families), seconds, said.append, keep, now)
    assert kept == sorted(kept)
    assert not outcome.records or kept[-1] == len(outcome.records)
    return outcome, said


def test_a_figure_has_every_key_and_its_ratio(families):
    def faster():
        return Work([object()], 60_000, "twice the bytes")

    def absent():
        raise Absent("no kernel for it")

    def broken():
        raise ValueError("bad pointer")

    peers = {"faster": faster, "absent": absent, "broken": broken}
    families["qmm"] = lambda c: iter([case(stream_gbps=4.0, peers=peers, parts={"more": 1})])
    outcome, said = run(families)
    record = outcome.records[0].to_dict()
    assert set(KEYS) <= set(record)
    assert (record["op"], record["case"], record["type"], record["n"]) == ("qmm", "a", "Q4_K", 8)
    assert (record["us"], record["gbps"], record["stream_ratio"]) == (10.0, 3.0, 0.75)
    assert record["more"] == 1
    assert record["peers"] == {
        "faster": {"us": 10.0, "gbps": 6.0, "note": "twice the bytes"},
        "absent": {"absent": "no kernel for it"},
        "broken": {"absent": "ValueError: bad pointer"},
    }
    assert "faster 10.0 (1.00x)" in said[0]
    assert "absent" not in said[0]
    assert len(table(outcome.records).splitlines()) == 2


def test_the_file_has_a_line_for_every_record():
    kernels = {"plain": [{"kernel": "qmm", "count": 2, "us": 3.5}], "verify": []}
    result = {"date": "d", "records": [{"op": "a", "n": 1}, {"op": "b", "n": 2}], "x": {"y": [1]}}
    for more in ({}, {"kernels": {}}, {"kernels": kernels}):
        text = to_json(result | more)
        assert json.loads(text) == result | more
        assert '  {"op": "a", "n": 1},\n  {"op": "b", "n": 2}\n' in text


def test_a_family_that_breaks_leaves_the_others_their_figures(families):
    def broken(c):
        yield case("first")
        raise RuntimeError("rows differ")

    families["broken"], families["good"] = broken, lambda c: iter([case("second")])
    outcome, said = run(families)
    assert [r.case for r in outcome.records] == ["first", "second"]
    assert outcome.failed == {"broken": "RuntimeError: rows differ"}
    assert any(line.startswith("!! broken") for line in said)


def test_out_of_time_is_said(families):
    hands = iter(range(100))  # every look at the clock is a second later
    families["long"] = lambda c: (case(str(i)) for i in range(50))
    families["last"] = lambda c: iter([case("never")])
    outcome, _ = run(families, seconds=5, now=lambda: float(next(hands)))
    assert 0 < len(outcome.records) < 6
    assert outcome.left_out == ["the rest of long", "last"]
    assert not outcome.failed


def test_the_read_rate_is_what_floors_are_against(families):
    seen = []

    def steps(c):
        seen.append(c.read_gbps)
        yield case()

    families["roofline"] = lambda c: iter([Case("read", "sum", None, 1, Work([object()], 50_000))])
    families["steps"] = steps
    run(families)
    assert seen == [5.0]  # 50 000 bytes in 10 us
