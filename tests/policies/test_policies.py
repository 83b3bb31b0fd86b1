"""Policies on a simulated clock: what pays is found, what does not is left, junk is ignored."""

import logging
import random

import pytest
import torch

from torch_dflash.decoding.proposal import Proposal
from torch_dflash.policies import ConfidencePolicy, CostPolicy, FixedPolicy


def simulate(policy, cost, accept, steps, most=7, seed=0):
    """Emitted tokens, seconds and lengths; ``accept[i]`` is P(token i accepted | before it)."""
    rng = random.Random(seed)
    tokens, seconds, lengths = 0, 0.0, []
    for _ in range(steps):
        n = policy.draft_tokens(most)
        assert 0 <= n <= most
        got = 0
        while got < n and rng.random() < accept[got]:
            got += 1
        took = cost(n) * rng.uniform(0.95, 1.05)
        policy.observe(n, got, took)
        tokens, seconds = tokens + got + 1, seconds + took
        lengths.append(n)
    return tokens, seconds, lengths


def best_rate(cost, accept, most=7):
    rates, alive, expected = [1 / cost(0)], 1.0, 1.0
    for n in range(1, most + 1):
        alive *= accept[n - 1]
        expected += alive
        rates.append(expected / cost(n))
    return max(rates)


@pytest.mark.parametrize(
    "cost, accept",
    [
        (lambda n: 1.0 if n == 0 else 1.3 + 0.1 * n, [0.9] * 7),  # a GPU: rows are cheap
        (lambda n: 1.0 if n == 0 else 1.2 + 0.35 * n, [0.8] * 7),  # a CPU: rows cost
        (lambda n: 1.0 if n == 0 else 1.2 + 0.35 * n, [0.9, 0.9, 0.2, 0.1, 0.1, 0.1, 0.1]),
        (lambda n: 1.0 if n == 0 else 2.5 + 0.5 * n, [0.3] * 7),  # never pays
    ],
)
def test_cost_policy_comes_close_to_the_best_length(cost, accept):
    policy = CostPolicy()
    simulate(policy, cost, accept, 200)  # learn
    tokens, seconds, _ = simulate(policy, cost, accept, 3000, seed=1)
    assert tokens / seconds > 0.95 * best_rate(cost, accept)


def test_never_far_below_plain_even_from_the_start():
    tokens, seconds, lengths = simulate(CostPolicy(), lambda n: 1.0 + 0.8 * n, [0.05] * 7, 2000)
    assert tokens / seconds > 0.97
    assert lengths[-400:].count(0) > 390


def test_finds_a_drafter_that_starts_to_pay():
    policy = CostPolicy()

    def cost(n):
        return 1.0 if n == 0 else 1.3 + 0.1 * n

    simulate(policy, cost, [0.02] * 7, 1500)
    _, _, lengths = simulate(policy, cost, [0.95] * 7, 3000, seed=2)
    assert sum(n > 3 for n in lengths[-500:]) > 450


def test_a_machine_that_gets_slower_does_not_mislead():
    """All lengths take longer; only those that are run are seen to."""
    policy = CostPolicy()

    def cost(n):
        return 1.0 if n == 0 else 1.2 + 0.35 * n

    simulate(policy, cost, [0.8] * 7, 300)  # n = 2 .. 4 pay: 1.3 plain
    for slower, seed in ((1.6, 1), (0.7, 2)):

        def now(n, slower=slower):
            return slower * cost(n)

        tokens, seconds, _ = simulate(policy, now, [0.8] * 7, 400, seed=seed)
        assert tokens / seconds > 0.95 * best_rate(now, [0.8] * 7)
        assert policy.seconds(7)[0] == pytest.approx(slower, rel=0.1)


def test_plain_steps_are_timed_again_while_drafting():
    policy = CostPolicy()
    _, _, lengths = simulate(policy, lambda n: 1.0 + 0.05 * n, [0.9] * 7, 400)
    assert 8 <= lengths[100:].count(0) <= 12


def test_outliers_and_junk_times_are_ignored():
    policy = CostPolicy()
    simulate(policy, lambda n: 1.0 + 0.1 * n, [0.9] * 7, 100)
    before = policy.seconds(7)
    policy.observe(7, 3, 1000.0)
    for junk in (float("nan"), float("inf"), 0.0, -1.0):
        policy.observe(7, 3, junk)
    assert policy.seconds(7) == pytest.approx(before, rel=0.05)


def test_times_are_monotone_and_interpolated():
    policy = CostPolicy()
    for n, t in ((0, 1.0), (1, 0.5), (4, 2.0)):
        for _ in range(5):
            policy.observe(n, 0, t)
    assert policy.seconds(6) == pytest.approx([1.0, 1.0, 4 / 3, 5 / 3, 2.0, 7 / 3, 8 / 3])


POLICIES = [FixedPolicy, CostPolicy, ConfidencePolicy]


@pytest.mark.parametrize("kind", POLICIES)
def test_row_26_a_drafter_that_never_pays_is_reported_once(kind, caplog):
    policy = kind()
    with caplog.at_level(logging.WARNING, "torch_dflash"):
        for _ in range(9):
            policy.observe(7, 0, 1.0)
        assert not caplog.records  # 63 offered tokens are not enough for a verdict
        for _ in range(40):
            policy.observe(7, 0, 1.0)
            policy.observe(0, 0, 1.0)
    assert [r.message for r in caplog.records] == [
        "the target accepts 0.0 % of the last draft tokens (70 offered so far): this drafter does "
        "not pay here; check that it was trained for this target and this kind of text"
    ]


@pytest.mark.parametrize("kind", POLICIES)
def test_a_drafter_that_stops_paying_is_reported(kind, caplog):
    policy = kind()
    with caplog.at_level(logging.WARNING, "torch_dflash"):
        for _ in range(200):
            policy.observe(7, 5, 1.0)
        assert not caplog.records
        for _ in range(60):
            policy.observe(7, 0, 1.0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("junk", [0, -1, 2.5, "abc", True, float("nan")])
def test_row_26_junk_limits_are_errors(kind, junk):
    with pytest.raises(ValueError, match="draft_tokens must be an integer >= 1 or None"):
        kind(draft_tokens=junk)


@pytest.mark.parametrize("name", ["survival", "confidence"])
@pytest.mark.parametrize("junk", ["abc", float("nan"), float("inf"), -0.1, 1.1, True, None])
def test_row_26_junk_thresholds_are_errors(name, junk):
    with pytest.raises(ValueError, match=rf"{name} must be a number in \[0, 1\], got"):
        ConfidencePolicy(**{name: junk})


def test_limits():
    assert FixedPolicy(3).draft_tokens(7) == 3
    assert FixedPolicy(9).draft_tokens(7) == 7
    assert FixedPolicy().draft_tokens(7) == 7
    assert max(simulate(CostPolicy(3), lambda n: 1.0, [0.9] * 7, 100)[2]) == 3


def proposal(confidence):
    n = 7
    return Proposal(
        torch.zeros(1, n, dtype=torch.int64),
        torch.full((1,), n, dtype=torch.int32),
        confidence=None if confidence is None else torch.tensor([confidence]),
    )


def test_row_12_without_scores_nothing_is_cut():
    policy = CostPolicy()
    simulate(policy, lambda n: 1.0 + 0.2 * n, [0.9] * 7, 100)
    assert policy.select(proposal(None), 7) == 7


def test_confidence_cuts_where_it_falls():
    policy = CostPolicy()
    simulate(policy, lambda n: 1.0 + 0.3 * n, [0.9] * 7, 100)
    assert policy.select(proposal([0.99, 0.99, 0.01, 0.01, 0.01, 0.01, 0.01]), 7) == 2
    assert policy.select(proposal([0.01] * 7), 7) == 1
    assert policy.select(proposal([float("nan")] * 7), 7) == 1


def test_golden_g4_thresholds():
    scored = proposal([0.178726, 0.726115, 0.240489])
    keep = {
        (0.0, 0.2): 0,  # per position
        (0.0, 0.15): 3,
        (0.15, 0.0): 1,  # cumulative
        (0.12, 0.0): 2,
        (0.0, 0.0): 3,
    }
    for (survival, confidence), n in keep.items():
        assert ConfidencePolicy(survival, confidence).select(scored, 3) == n


def test_row_12_the_gate_needs_scores_for_the_whole_chain(caplog):
    policy = ConfidencePolicy(0.5)
    with caplog.at_level(logging.WARNING, "torch_dflash"):
        assert policy.select(proposal(None), 7) == 7
        assert policy.select(proposal([0.1] * 3), 7) == 7
    assert len(caplog.records) == 1
    assert policy.select(proposal([0.1] * 7), 7) == 0
    assert policy.select(proposal([float("nan")] * 7), 7) == 0


@pytest.mark.parametrize("kind", [CostPolicy, ConfidencePolicy])
def test_a_token_is_offered_by_the_scores_up_to_it_alone(kind):
    """Otherwise a token would be dropped because of its own value: sampled output biased."""
    policy = kind()
    simulate(policy, lambda n: 1.0 + 0.25 * n, [0.8] * 7, 200)
    rng = random.Random(3)
    lengths = set()
    for _ in range(300):
        scores = [rng.choice([0.2, 0.6, 0.8, 0.95, 0.99]) for _ in range(7)]
        n = policy.select(proposal(scores), 7)
        lengths.add(n)
        for i in range(n + 1):  # token i + 1 is offered iff i < n, whatever comes after its score
            other = scores[: i + 1] + [rng.random() for _ in range(6 - i)]
            assert (policy.select(proposal(other[:7]), 7) > i) == (i < n)
    assert len(lengths) > 3


def test_head_of_a_proposal():
    p = proposal([0.5] * 7).head(3)
    assert p.tokens.shape == (1, 3)
    assert p.offered.tolist() == [3]
    assert p.confidence.shape == (1, 3)
    with pytest.raises(ValueError, match=r"length must be 0\.\.3, got 4"):
        p.head(4)
