"""Sampled decoding: what is emitted has exactly the target's distribution, whoever drafts."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.sampling import SamplingParams
from torch_dflash.load import load_drafter, load_target
from torch_dflash.policies import ConfidencePolicy, FixedPolicy
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

VOCAB, LIKELY = 304, 4  # tokens; ids below LIKELY share all but 1e-6 of the probability
PROMPT = [7, 200, 31]
LENGTH, RUNS = 3, 300  # new tokens whose joint distribution is compared, seeds per case
DRAFTERS = ("dflash", "dflash2", "dspark")
SETTINGS = {
    "temperature": SamplingParams(3.0),
    "top-k and top-p": SamplingParams(4.0, top_k=3, top_p=0.9),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Thousands of tiny steps: handing out work would cost more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("sampled") / "target.gguf"
    target = load_target(tiny_hybrid(path, seed=5, layers=2, interval=2, vocab=VOCAB))
    # Random models agree on nothing: this bias makes target and drafter, which share the head,
    # choose among the same few tokens, so that acceptance, rejection and residual all happen.
    target.vocabulary.head.bias = torch.where(torch.arange(VOCAB) < LIKELY, 0.0, -60.0)
    return target


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    shape = {"vocab": VOCAB, "num_target_layers": 2, "target_layer_ids": (0,), "block_size": 4}
    return {
        kind: load_drafter(tiny_drafter(folder / kind, kind, seed=9, **shape), target)
        for kind in DRAFTERS
    }


def probabilities(logits, sampling):
    """Temperature, then top-k, then top-p, in float64 and by sorting."""
    p = torch.softmax(logits.double() / sampling.temperature, -1).tolist()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, kept, reached = sum(p[i] for i in order), [], 0.0
    for i in order:
        if reached < sampling.top_p:
            kept.append(i)
        reached += p[i] / total
    total = sum(p[i] for i in kept)
    return {i: p[i] / total for i in kept}


def exact(target, sampling):
    """Probability of every continuation of LENGTH tokens, by teacher forcing."""
    cells = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, p in cells.items():
            target.capture([])
            target.reset()
            logits = target.prefill(torch.tensor([*PROMPT, *text]))[0]
            for token, q in probabilities(logits, sampling).items():
                if q > 1e-6:
                    longer[(*text, token)] = p * q
        cells = longer
    return cells


@pytest.fixture(scope="module")
def expected(target):
    return {name: exact(target, sampling) for name, sampling in SETTINGS.items()}


def draw(session, sampling, runs=RUNS):
    """Continuations of many seeds, and (offered, accepted)."""
    seen, offered, accepted = Counter(), 0, 0
    for seed in range(runs):
        out = session.generate(PROMPT, LENGTH, replace(sampling, seed=seed))
        seen[tuple(out.tokens)] += 1
        offered, accepted = offered + out.stats.offered, accepted + out.stats.accepted
    return seen, offered, accepted


def chi_square(seen, cells):
    """Statistic and bound. Cells that expect less than 5 are one cell, as the approximation needs.

    The bound is exceeded by a right sampler with a probability of 1e-4 (Wilson and Hilferty's
    quantile, z = 3.72); the seeds are fixed, so it is exceeded always or never.
    """
    runs = sum(seen.values())
    large = [c for c, p in cells.items() if p * runs >= 5]
    pairs = [(seen[c], cells[c] * runs) for c in large]
    rest = 1 - sum(cells[c] for c in large)
    pairs.append((runs - sum(n for n, _ in pairs), max(rest * runs, 1e-9)))
    df = len(pairs) - 1
    bound = df * (1 - 2 / (9 * df) + 3.72 * math.sqrt(2 / (9 * df))) ** 3
    return sum((n - e) ** 2 / e for n, e in pairs), bound


CASES = [
    ("none", None),
    *((d, FixedPolicy) for d in DRAFTERS),
    ("dspark", lambda: ConfidencePolicy(0.2)),
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind, policy", CASES)
def test_the_distribution_is_the_targets(target, drafters, expected, kind, policy, setting):
    session = Session(target, drafters.get(kind), policy() if policy else None)
    seen, offered, accepted = draw(session, SETTINGS[setting])
    cells = expected[setting]
    assert sum(cells.values()) == pytest.approx(1, abs=1e-4)
    assert len(cells) > 16
    statistic, bound = chi_square(seen, cells)
    assert statistic < bound
    if kind != "none":  # both ways out of a step were taken often
        assert accepted > 30
        assert offered - accepted > 30


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_wrong_q_is_seen(target, drafters, expected, kind, monkeypatch):
    """The power of the test above: as if the draft had been drawn evenly."""
    drafter = drafters[kind]
    propose = drafter.propose

    def flat(*args):
        proposal = propose(*args)
        return replace(proposal, q=torch.full_like(proposal.q, 1 / LIKELY))

    monkeypatch.setattr(drafter, "propose", flat)
    seen, _, _ = draw(Session(target, drafter), SETTINGS["temperature"])
    statistic, bound = chi_square(seen, expected["temperature"])
    assert statistic > bound


@pytest.mark.parametrize("kind", ["none", *DRAFTERS])
def test_the_same_seed_gives_the_same_text(target, drafters, kind):
    def run(seed):
        sampling = SamplingParams(3.0, seed=seed)
        return Session(target, drafters.get(kind)).generate(PROMPT, 24, sampling).tokens

    first = [run(seed) for seed in range(4)]
    assert first == [run(seed) for seed in range(4)]
    assert all(a != b for a, b in itertools.combinations(first, 2))


@pytest.mark.parametrize("kind", ["none", *DRAFTERS])
@pytest.mark.parametrize("sampling", [SamplingParams(0.0, seed=3), SamplingParams(9.0, top_k=1)])
def test_one_choice_left_is_greedy(target, drafters, kind, sampling):
    plain = Session(target).generate(PROMPT, 24).tokens
    assert Session(target, drafters.get(kind)).generate(PROMPT, 24, sampling).tokens == plain
    assert len({*plain}) > 1


@pytest.mark.parametrize("changes", [{"output_multiplier": 0.5}, {"final_logit_softcapping": 4.0}])
def test_a_drafter_with_scaled_logits(target, expected, tmp_path, changes):
    """Its q belongs to the transformed logits, which it drew from."""
    shape = {"vocab": VOCAB, "num_target_layers": 2, "target_layer_ids": (0,), "block_size": 4}
    folder = tiny_drafter(tmp_path / "d", "dflash", seed=9, **shape, **changes)
    drafter = load_drafter(folder, target)
    c = drafter.config
    assert (c.output_multiplier, c.final_logit_softcapping) != (1, 0)
    # The soft cap would cut the bias of -60 to -4; the multiplier would halve it.
    seen, _, accepted = draw(Session(target, drafter), SETTINGS["top-k and top-p"])
    statistic, bound = chi_square(seen, expected["top-k and top-p"])
    assert statistic < bound
    assert accepted > 20
