"""Random sessions and random operator calls: what no list of cases thought of.

Seeds are fixed, so that a failure comes back; each is in the name of its test.
"""

import random
from dataclasses import replace

import pytest
import torch

from torch_dflash import ops
from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.sampling import SamplingParams
from torch_dflash.decoding.stop import StopChecker
from torch_dflash.gguf import GGUFFile
from torch_dflash.gguf.tokenizer import tokenizer_from_gguf
from torch_dflash.load import load_drafter, load_target
from torch_dflash.policies import ConfidencePolicy, CostPolicy, FixedPolicy
from torch_dflash.switch import reference_of
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

KINDS = ("dflash", "dflash2", "dspark", "gated", "rnn")
VOCAB = 512


class Prompter:
    """A drafter whose drafts begin with a random number of right tokens.

    A random drafter is never right. This one runs a real drafter, whose state must stay in step,
    and puts the beginning of the known text in front of what it drafts.
    """

    def __init__(self, drafter, rng):
        self._drafter, self._rng, self.text = drafter, rng, []

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def propose(self, anchor, draft_tokens, sampling):
        proposal = self._drafter.propose(anchor, draft_tokens, sampling)
        at = self._drafter.length + 1
        right = self.text[at : at + self._rng.randint(0, draft_tokens)]
        tokens = proposal.tokens.clone()
        tokens[0, : len(right)] = torch.tensor(right, dtype=tokens.dtype)
        return replace(proposal, tokens=tokens)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    path = tiny_hybrid(folder / "target.gguf", seed=3, layers=3)
    shape = {"num_target_layers": 3, "target_layer_ids": (0, 1)}
    for kind in KINDS:
        head = {"markov_head": kind} if kind in ("gated", "rnn") else {}
        tiny_drafter(folder / kind, "dspark" if head else kind, seed=5, **shape, **head)
    targets = {
        (state, activations): load_target(path, state=state, activations=activations)
        for state in ("journal", "snapshots")
        for activations in ("planes", "q8_1")
    }
    drafters = {
        (key, kind): load_drafter(folder / kind, target)
        for key, target in targets.items()
        for kind in KINDS
    }
    with GGUFFile.open(path) as file:
        tokenizer = tokenizer_from_gguf(file)
    return targets, drafters, tokenizer


def policy(rng, most):
    limit = rng.choice([None, rng.randint(1, most)])
    return rng.choice(
        [
            lambda: FixedPolicy(limit),
            lambda: CostPolicy(limit),
            lambda: ConfidencePolicy(rng.random(), rng.random(), limit),
        ]
    )()


def stops(rng, tokenizer, plain):
    """A stop that the text meets somewhere, and often one that it does not."""
    text = tokenizer.stream()
    ids, strings = [], []
    if rng.random() < 0.3:
        ids.append(rng.choice(plain) if rng.random() < 0.5 else rng.randrange(VOCAB))
    if rng.random() < 0.5:
        at = rng.randrange(len(plain))
        found = tokenizer.decode(plain[at : at + rng.randint(1, 3)])
        strings = [found] if found else []
    return StopChecker(ids, strings, text.push, text.finish)


def seen(session, prompt, count, sampling, stop):
    out = session.generate(prompt, count, sampling, stop)
    return out.tokens, out.text, out.finish_reason


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_session(models, threads, seed):
    """Plain and speculative alike, to the stop; then an extension; sampled text comes again."""
    targets, drafters, tokenizer = models
    rng = random.Random(seed)
    key = rng.choice([*targets])
    target = targets[key]
    drafter = drafters[key, rng.choice(KINDS)]
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 31, 32, 33, 70, 260]))]
    count = rng.randint(1, 50)
    plain = Session(target).generate(prompt, count + 20).tokens
    fast = Prompter(drafter, rng)
    fast.text = prompt + plain
    threads(rng.randint(1, 3))
    chosen, sampling = policy(rng, drafter.config.max_draft_tokens), SamplingParams()
    state = rng.getstate()
    want = seen(Session(target), prompt, count, sampling, stops(rng, tokenizer, plain))
    rng.setstate(state)
    session = Session(target, fast, chosen)
    got = seen(session, prompt, count, sampling, stops(rng, tokenizer, plain))
    assert got == want
    more = prompt + got[0]
    assert session.generate(more, 10).tokens == Session(target).generate(more, 10).tokens

    warm = SamplingParams(rng.uniform(0.2, 2), rng.choice([0, 7]), rng.choice([1.0, 0.8]), seed)
    limit = FixedPolicy(rng.randint(1, drafter.config.max_draft_tokens))
    first = Session(target, drafter, limit).generate(prompt, count, warm).tokens
    assert Session(target, drafter, limit).generate(prompt, count, warm).tokens == first


@pytest.mark.parametrize("seed", range(12))
def test_random_rows_as_q8_1(seed):
    """Against the float64 oracle of the same rounding: codes are exact, sums are float32."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    columns = 256 * rng.randint(1, 9)
    rows, outputs = rng.randint(1, 32), rng.choice([1, 5, 64, 130])
    x = torch.randn(rows, columns, generator=g) * 10 ** rng.uniform(-3, 3)
    x[torch.rand(rows, columns, generator=g) < 0.1] = 0.0
    if rng.random() < 0.5:
        x[:, : 32 * rng.randint(1, 4)] *= 1e-4  # groups of other sizes
    kinds = {2: 32, 8: 32, 12: 256, 13: 256, 14: 256, 23: 256}
    kind = rng.choice([k for k, quant in kinds.items() if columns % quant == 0])
    packed = ops.quantize(torch.randn(outputs, columns, generator=g), kind)
    act = ops.quant_act(x, 2)
    assert torch.equal(act, reference_of("quant_act")(x, 2))
    weight = ops.repack(packed, kind, columns)
    got = ops.qmm(act, weight, [kind], [outputs], columns)
    want = reference_of("qmm")(act, weight, [kind], [outputs], columns)
    # floats per superblock of 256: a few roundings each, of sums that may cancel
    size = want.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    assert ((got - want).abs() <= 1e-5 * size).all()
    for row in range(rows):  # a row alone has the same bits
        alone = ops.qmm(act[row : row + 1], weight, [kind], [outputs], columns)
        assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("seed", range(24))
def test_random_markov_chains(seed):
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    s, n, h = rng.randint(1, 5), rng.randint(1, 8), 32 * rng.randint(1, 4)
    rank, vocab = 32 * rng.randint(1, 4), rng.randint(40, 700)
    reduced = rng.random() < 0.4
    draft = rng.randint(20, vocab) if reduced else vocab
    head = rng.randrange(3)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    d2t = torch.randperm(vocab, generator=g)[:draft].sort().values if reduced else None
    w1, w2 = ops.quantize(randn(vocab, rank), 8), ops.quantize(randn(draft, rank), 8)
    shape = {0: None, 1: (rank, h + rank), 2: (3 * rank, 2 * rank + h)}[head]
    gate = {}
    if shape is not None:
        matrix = randn(*shape).div(8).view(torch.uint8)
        gate = {"head_type": head, "joint": ops.repack(matrix, 0, shape[1]), "joint_type": 0,
                "joint_bias": rng.choice([None, randn(shape[0])])}  # fmt: skip
    confident = rng.random() < 0.7
    wide = rng.choice([h, h + rank])
    args = (
        randn(s, n, draft), randn(s, n, h), torch.randint(0, vocab, (s,), generator=g), w1, 8,
        ops.repack(w2, 8, rank), 8, randn(wide) / 8 if confident else None,
        randn(1) if confident else None, rng.choice([1.0, 0.3, 2.0]), d2t,
    )  # fmt: skip
    if rng.random() < 0.5:
        warm = torch.rand(s, generator=g).add(0.5) * (torch.rand(s, generator=g) < 0.7)
        args += warm, torch.rand(s, n, generator=g)
    else:
        args += None, None
    more = {"mask_id": rng.choice([-1, rng.randrange(vocab)]),
            "draft_topk": rng.choice([0, rng.randint(1, draft)])} | gate  # fmt: skip
    tokens, q, confidence = ops.markov_chain(*args, **more)
    want = reference_of("markov_chain")(*args, **more)
    assert torch.equal(tokens, want[0])
    # Planes round what w2 multiplies to 1/32385 of its largest value, about 3: its sums of 128 err
    # by sqrt(128) * 3 / 32385 / sqrt(12) = 3e-4, times a scale of 2, over a temperature of 0.5, by
    # a slope of 1/4 of the softmax; the largest of some thousand is three times as far off.
    torch.testing.assert_close(q, want[1], rtol=0, atol=1e-3)
    torch.testing.assert_close(confidence, want[2], rtol=0, atol=2e-5)
    assert not (tokens == more["mask_id"]).any()
    for i in range(s):
        one = [a[i : i + 1] if k in (0, 1, 2, 11, 12) and a is not None else a
               for k, a in enumerate(args)]  # fmt: skip
        assert torch.equal(ops.markov_chain(*one, **more)[0][0], tokens[i])
