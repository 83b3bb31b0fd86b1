"""Speculative decoding changes nothing: tokens, logits, K and V bytes, conv windows, GDN states."""

import hashlib
import random

import pytest
import torch

from torch_dflash import ops
from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.proposal import Proposal
from torch_dflash.load import load_drafter, load_target
from torch_dflash.policies import CostPolicy, FixedPolicy
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

TEXT, WIDEST = 96, 12  # tokens of the text, draft tokens of the widest verification


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "target.gguf", seed=1)


def bits(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def state_bits(target):
    """What the next step may read, and nothing else, as digests."""
    state, length = target.state, target.length
    out = [bits(c[0, :length]) for caches in (state.kv.k, state.kv.v) for c in caches]
    r = state.recurrent
    first = int(r.conv_accepted) - 1
    out += [bits(w[1, first : first + 3]) for w in r.conv]  # taps - 1 columns
    for i, states in enumerate(r.state):
        if r.kind == "snapshots":
            out.append(bits(states[int(r.indices[0, int(r.accepted) - 1])]))
            continue
        base = states.clone()
        ops.gdn_commit(
            base, r.slots, r.accepted, r.parity,
            r.journal_k[i], r.journal_u[i], r.journal_decay[i], True,
        )  # fmt: skip
        out.append(bits(base[1]))
    return out


def poison_rejected(target, rows):
    """What a rejected draft leaves behind must never be read: make it NaN."""
    state, length = target.state, target.length
    for caches in (state.kv.k, state.kv.v):
        for cache in caches:
            cache[0, length:] = torch.nan
    r = state.recurrent
    for window in r.conv:
        window[1, int(r.conv_accepted) + 2 :] = torch.nan
    if r.kind == "journal":
        for journal in (r.journal_k, r.journal_u, r.journal_decay):
            for j in journal:
                j[int(r.parity), 1, rows:] = torch.nan
                j[1 - int(r.parity), 1] = torch.nan


@pytest.mark.parametrize(
    "kind, dtype, activations, rounds",
    [
        ("journal", torch.float32, "planes", 500),
        ("snapshots", torch.float32, "planes", 500),
        ("journal", torch.bfloat16, "planes", 300),
        ("snapshots", torch.bfloat16, "planes", 300),
        ("journal", torch.float32, "q8_1", 300),
    ],
)
def test_every_verification_equals_plain_steps(hybrid, kind, dtype, activations, rounds):
    """A text is run one row at a time; then in blocks whose first n draft tokens are right, every n
    equally often, all right and all wrong included."""
    target = load_target(hybrid, state=kind, state_dtype=dtype, activations=activations)
    target.capture([0, 2, 4])
    rng = random.Random(7)
    text = [rng.randrange(target.vocab_size) for _ in range(TEXT)]
    plain = []  # position -> (logits, target_hidden, state after it)
    for token in text:
        seen = target.verify(torch.tensor([token]))
        target.commit(1)
        plain.append((seen.logits[0], seen.target_hidden[0], state_bits(target)))
    counts = {}
    done = 0
    while done < rounds:
        target.reset()
        start = rng.randrange(1, 40)
        target.prefill(torch.tensor(text[:start]))
        assert state_bits(target) == plain[start - 1][2]
        while done < rounds and target.length + WIDEST + 2 < TEXT:
            width = rng.randrange(0, WIDEST + 1)
            right = done % (width + 1)  # every n in 0..width equally often
            at = target.length
            rows = text[at : at + 1 + width]
            for i in range(1 + right, len(rows)):
                rows[i] = (rows[i] + rng.randrange(1, target.vocab_size)) % target.vocab_size
            seen = target.verify(torch.tensor(rows))
            for i in range(right + 1):
                assert torch.equal(seen.logits[i], plain[at + i][0])
                assert torch.equal(seen.target_hidden[i], plain[at + i][1])
            target.commit(right + 1)
            assert state_bits(target) == plain[at + right][2]
            poison_rejected(target, right + 1)
            counts[right] = counts.get(right, 0) + 1
            done += 1
    assert sum(counts.values()) == rounds
    assert set(counts) == set(range(WIDEST + 1))


class Scripted(torch.nn.Module):
    """Proposes the known continuation, wrong from a random place on."""

    def __init__(self, config, text, vocab, rng):
        super().__init__()
        self.config, self.text, self.vocab, self.rng, self.length = config, text, vocab, rng, 0

    def reset(self):
        self.length = 0

    def commit(self, target_hidden):
        self.length += target_hidden.shape[0]

    def propose(self, anchor, draft_tokens, sampling):
        assert int(anchor) == self.text[self.length]
        tokens = (self.text[self.length + 1 :] + [0] * draft_tokens)[:draft_tokens]
        for i in range(self.rng.randrange(draft_tokens + 1), draft_tokens):
            tokens[i] = (tokens[i] + self.rng.randrange(1, self.vocab)) % self.vocab
        return Proposal(torch.tensor([tokens]), torch.tensor([draft_tokens], dtype=torch.int32))


@pytest.fixture(scope="module", params=["journal", "snapshots"])
def target(request, hybrid):
    return load_target(hybrid, state=request.param)


PROMPT = [5, 17, 300, 2, 44, 9, 81]


@pytest.fixture(scope="module")
def drafters(hybrid, target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    return {
        kind: load_drafter(tiny_drafter(folder / kind, kind, seed=3), target)
        for kind in ("dflash", "dflash2", "dspark")
    }


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("policy", [FixedPolicy, CostPolicy])
def test_greedy_tokens_equal_plain(target, drafters, kind, policy):
    plain = Session(target).generate(PROMPT, 60)
    for most in (1, 3, 7):
        out = Session(target, drafters[kind], policy(most)).generate(PROMPT, 60)
        assert out.tokens == plain.tokens
        assert out.stats.offered >= out.stats.accepted


def test_scripted_drafts_of_every_quality(target, drafters):
    plain = Session(target).generate(PROMPT, 80).tokens
    rng = random.Random(11)
    accepted = 0
    for _ in range(10):
        scripted = Scripted(drafters["dflash"].config, PROMPT + plain, target.vocab_size, rng)
        out = Session(target, scripted).generate(PROMPT, 80)
        assert out.tokens == plain
        accepted += out.stats.accepted
    assert accepted > 100


def test_a_session_extends_without_running_the_prompt_again(target, drafters):
    session = Session(target, drafters["dflash2"])
    first = session.generate(PROMPT, 20)
    longer = PROMPT + first.tokens + [3, 1, 4]
    again = session.generate(longer, 20)
    assert again.tokens == Session(target, drafters["dflash2"]).generate(longer, 20).tokens
    # row 44: a prompt that diverges inside the prefix starts over
    other = [*longer[:10], (longer[10] + 1) % target.vocab_size, *longer[11:]]
    assert session.generate(other, 20).tokens == Session(target).generate(other, 20).tokens
