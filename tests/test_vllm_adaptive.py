"""Adaptive speculation in vLLM, on a simulated clock and without vLLM."""

import random
from types import SimpleNamespace

import pytest
from torch_dflash_vllm import adaptive, features
from torch_dflash_vllm.adaptive import SCHEDULER, switch_on
from torch_dflash_vllm.controller import Controller, tiers
from torch_dflash_vllm.features import Feature, Outcome

LENGTHS = tiers(7)


def simulate(controller, cost, accept, steps, batch=1, seed=0, ahead=False, regular=True):
    """Tokens, seconds and lengths of a scheduler that verifies what it drafted a step before.

    ``ahead``: decisions are made before the step before them has ended, as in async scheduling.
    """
    rng = random.Random(seed)
    drafted, tokens, seconds, lengths = 0, 0, 0.0, []
    next_choice = controller[batch] if ahead else None
    for _ in range(steps):
        wanted = next_choice if ahead else controller[batch]
        if ahead:
            next_choice = controller[batch]
        took = cost(drafted) * rng.uniform(0.95, 1.05)
        for _ in range(batch):
            got = 0
            while got < drafted and rng.random() < accept[got]:
                got += 1
            controller.observe(batch, drafted, got)
            tokens += got + 1
        seconds += took
        if drafted == wanted and regular:
            controller.time(batch, drafted, took)
        lengths.append(drafted)
        drafted = wanted
    return tokens, seconds, lengths


def best_rate(cost, accept, batch=1):
    rates, alive, expected = [1 / cost(0)], 1.0, 1.0
    for n in range(1, 8):
        alive *= accept[n - 1]
        expected += alive
        if n in LENGTHS:
            rates.append(expected / cost(n))
    return batch * max(rates)


def cheap_rows(n):
    return 1.0 if n == 0 else 1.3 + 0.1 * n


def dear_rows(n):
    return 1.0 if n == 0 else 1.2 + 0.35 * n


CASES = {
    "a GPU": (cheap_rows, [0.9] * 7),
    "a CPU": (dear_rows, [0.8] * 7),
    "a cliff": (dear_rows, [0.9, 0.9, 0.2, 0.1, 0.1, 0.1, 0.1]),
    "never pays": (lambda n: 1.0 if n == 0 else 2.5 + 0.5 * n, [0.3] * 7),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("ahead", [False, True])
def test_comes_close_to_the_best_length(name, batch, ahead):
    cost, accept = CASES[name]
    controller = Controller(LENGTHS)
    simulate(controller, cost, accept, 300, batch, ahead=ahead)  # learn
    tokens, seconds, lengths = simulate(controller, cost, accept, 2000, batch, 1, ahead)
    assert {*lengths} <= {*LENGTHS}
    assert tokens / seconds > 0.94 * best_rate(cost, accept, batch)


def test_finds_a_drafter_that_starts_to_pay():
    controller = Controller(LENGTHS)
    simulate(controller, cheap_rows, [0.02] * 7, 1500)
    _, _, lengths = simulate(controller, cheap_rows, [0.95] * 7, 3000, seed=2)
    assert sum(n > 3 for n in lengths[-500:]) > 450


def test_a_drafter_that_never_pays_costs_almost_nothing():
    controller = Controller(LENGTHS)
    tokens, seconds, lengths = simulate(controller, lambda n: 1.0 + 0.8 * n, [0.05] * 7, 3000)
    assert tokens / seconds > 0.96
    assert lengths[-500:].count(0) > 480


def test_batch_sizes_are_timed_apart_and_share_the_acceptance():
    controller = Controller(LENGTHS)
    accept = [0.8] * 7
    simulate(controller, cheap_rows, accept, 400, batch=1)
    simulate(controller, lambda n: 1.0 + 0.9 * n, accept, 400, batch=32)
    assert controller[1] >= 4
    _, _, many = simulate(controller, lambda n: 1.0 + 0.9 * n, accept, 100, batch=32, seed=3)
    assert many.count(0) > 80
    assert controller[1] >= 4


def test_steps_that_are_never_regular_end_in_vllm_s_own_length():
    controller = Controller(LENGTHS)
    _, _, lengths = simulate(controller, cheap_rows, [0.9] * 7, 600, regular=False)
    assert lengths.count(7) > 590


def test_rows_without_draft_tokens_are_handed_over_once():
    controller = Controller(LENGTHS)
    controller.observe_plain(3)
    controller.observe_plain(2)
    assert controller.take_plain() == 5
    assert controller.take_plain() == 0


def test_one_line_says_what_was_chosen(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("torch_dflash_vllm.controller.time.monotonic", lambda: now[0])
    controller = Controller([0, 4])
    for _ in range(4):
        controller[1]
    controller.observe(1, 4, 3)
    assert controller.line() is None
    now[0] = 11.0
    assert controller.line() == (
        "adaptive speculation: draft tokens per step 4: 100 % of 4 steps, accepted 75 % of 4"
    )
    now[0] = 30.0
    assert controller.line() is None  # nothing happened


@pytest.mark.parametrize("lengths", [[], [0], [1, 2], [0, 2, 1], [0, 1, 1]])
def test_lengths_must_ascend_from_plain_decoding(lengths):
    with pytest.raises(ValueError, match="must ascend from 0"):
        Controller(lengths)


@pytest.fixture
def engine(monkeypatch):
    """``engine(**args)``: arguments of an engine whose plugin has both features on."""
    on = {n: Outcome(Feature(n, n, False), "on", "") for n in ("adaptive", "gdn")}
    monkeypatch.setattr(adaptive, "outcomes", lambda: on)
    monkeypatch.setattr(features, "_declined", {})

    def make(**args):
        base = {"scheduler_cls": None, "data_parallel_size": 1, "max_num_seqs": None}
        return SimpleNamespace(**base | args)

    make.on = on
    return make


SPEC = {"num_speculative_tokens": 7}
HERE = {"hybrid": True, "cpu": True, "graphs": False}


def test_hybrids_get_the_scheduler_and_a_length_for_every_graph(engine):
    args = engine()
    added = switch_on(args, SPEC, **HERE)
    assert args.scheduler_cls == SCHEDULER
    [table] = added.values()
    assert sorted(row[2] for row in table) == [0, 1, 2, 4, 7]
    assert [row[:2] for row in table] == [[i, i] for i in range(1, 6)]
    assert switch_on(args, SPEC | added, **HERE) == added  # engines may ask twice


@pytest.mark.parametrize(
    "args, spec, where, reason",
    [
        ({"scheduler_cls": "my.Scheduler"}, {}, {}, "the scheduler is my.Scheduler"),
        (
            {},
            {"num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
            {},
            "num_speculative_tokens_per_batch_size was given",
        ),
        ({}, {"enable_adaptive_verification": True}, {}, "enable_adaptive_verification"),
        ({"data_parallel_size": 2}, {}, {}, "data parallel"),
        ({"max_num_seqs": 4}, {}, {"graphs": True}, "need max_num_seqs >= 5"),
    ],
)
def test_what_speaks_against_it_is_said(engine, caplog, args, spec, where, reason):
    args = engine(**args)
    before = args.scheduler_cls
    with caplog.at_level("WARNING", "vllm.torch_dflash"):
        assert switch_on(args, SPEC | spec, **HERE | where) == {}
    assert args.scheduler_cls == before
    assert reason in caplog.text
    if before is None:
        args.scheduler_cls = SCHEDULER
        with pytest.raises(ValueError, match=f"{SCHEDULER}: .*{reason}"):
            switch_on(args, SPEC | spec, **HERE | where)


def test_dense_models_and_a_switch_leave_it_off(engine, caplog):
    args = engine()
    assert switch_on(args, SPEC, **HERE | {"hybrid": False}) == {}
    engine.on["adaptive"] = Outcome(Feature("adaptive", "a", False), "off", "TORCH_DFLASH_DISABLE")
    assert switch_on(args, SPEC, **HERE) == {}
    assert args.scheduler_cls is None
    assert not caplog.records
    args.scheduler_cls = SCHEDULER
    with pytest.raises(ValueError, match="feature adaptive is not on: TORCH_DFLASH_DISABLE"):
        switch_on(args, SPEC, **HERE)


def test_vllm_s_own_layer_on_the_cpu_needs_whole_blocks(engine, caplog):
    del engine.on["gdn"]
    with caplog.at_level("WARNING", "vllm.torch_dflash"):
        assert switch_on(engine(), SPEC, **HERE) == {}
    assert "feature gdn is not on" in caplog.text
    assert switch_on(engine(), SPEC, **HERE | {"cpu": False}) != {}
