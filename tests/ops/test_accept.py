"""accept and accept_greedy: z-lab's numbers, exact marginals, statistics, edges, refusals."""

import math
from fractions import Fraction

import pytest
import torch

from torch_dflash import ops
from torch_dflash.reference import sampling as reference

LARGEST_UNIFORM = 1 - 2**-24


def full(sequences, tokens):
    return torch.full((sequences,), tokens, dtype=torch.int32)


def grid(n):
    return (torch.arange(n) + 0.5) / n


@pytest.mark.parametrize("name", ["rejection_dense", "rejection_sparse"])
def test_z_lab(name, fixtures):
    from safetensors.torch import load_file

    case = load_file(fixtures / f"accept/{name}.safetensors")
    draft, p, q, u, ids = case["drafts"], case["p"], case["q"], case["u"], case.get("cand")
    n, tokens = draft.shape
    length, _ = ops.accept(draft, full(n, tokens), p, ids, q, u, torch.zeros(n, tokens + 1))
    assert length.tolist() == case["accepted"].tolist()

    steps = 64
    draws = grid(steps)
    bonus = draws[:, None].expand(steps, tokens + 1).contiguous()
    for s in range(n):
        args = (draft[s], tokens, p[s], None if ids is None else ids[s], q[s])
        want = reference.next_distribution(*args, int(length[s]))
        torch.testing.assert_close(want.float(), case["next_dist"][s], rtol=0, atol=1e-6)
        args = draft, p, ids, q, u
        d, pp, ii, qq, uu = (
            None if a is None else a[s : s + 1].expand(steps, *a.shape[1:]).contiguous()
            for a in args
        )
        got_length, got = ops.accept(d, full(steps, tokens), pp, ii, qq, uu, bonus)
        assert (got_length == length[s]).all()
        upper = want.cumsum(0)[got]
        # float32 p - q against float64: 1e-6 of a probability
        assert (draws < upper + 1e-6).all()
        assert (draws > upper - want[got] - 1e-6).all()


def marginal(p, q, mode, steps):
    """Exact distribution of the first emitted token, as fractions over a grid of uniforms."""
    vocab = len(p)
    candidates = [v for v in reversed(range(vocab)) if q[v] > 0]
    uniforms = grid(steps)
    rows = steps * steps
    probs = torch.tensor([[float(v) for v in p], [1.0] + [0.0] * (vocab - 1)])
    probs = probs.expand(rows, 2, vocab).contiguous()
    u = uniforms.repeat_interleave(steps)[:, None].contiguous()
    bonus = uniforms.repeat(steps)[:, None].expand(rows, 2).contiguous()
    result = [Fraction(0)] * vocab
    for d in candidates:
        weight = q[d]
        q_ids = q_values = None
        if mode == "dense":
            q_values = torch.tensor([float(v) for v in q]).expand(rows, 1, vocab).contiguous()
        elif mode == "sparse":
            q_ids = torch.tensor(candidates).expand(rows, 1, -1).contiguous()
            q_values = torch.tensor([float(q[c]) for c in candidates])
            q_values = q_values.expand(rows, 1, -1).contiguous()
        draft = torch.full((rows, 1), d)
        length, nxt = ops.accept(draft, full(rows, 1), probs, q_ids, q_values, u, bonus)
        first = torch.where(length == 1, draft[:, 0], nxt)
        for v, count in enumerate(torch.bincount(first, minlength=vocab).tolist()):
            result[v] += weight * Fraction(count, rows)
    return result


def tenths(*values):
    return [Fraction(v, 10) for v in values]


def eighths(*values):
    return [Fraction(v, 8) for v in values]


@pytest.mark.parametrize(
    "p, q, mode, steps",
    [
        # G5: thresholds 5/7 and 1/3, residual halves: exact on 84 steps
        (tenths(5, 2, 2, 1), tenths(7, 0, 0, 3), "sparse", 84),
        (tenths(5, 2, 2, 1), tenths(7, 0, 0, 3), "dense", 84),
        # thresholds 1/4 and 1, residual thirds
        (eighths(4, 2, 1, 1), eighths(2, 2, 4, 0), "dense", 48),
        (eighths(4, 2, 1, 1), eighths(2, 2, 4, 0), "sparse", 48),
        # a certain drafter: accepted with p(d), else p without d (sevenths)
        (eighths(4, 2, 1, 1), eighths(0, 0, 8, 0), "one-hot", 56),
        # the draft is the target: always accepted
        (eighths(4, 2, 1, 1), eighths(4, 2, 1, 1), "dense", 16),
        # disjoint supports: never accepted
        (eighths(4, 4, 0, 0), eighths(0, 0, 4, 4), "sparse", 16),
    ],
)
def test_the_first_token_has_exactly_the_target_distribution(p, q, mode, steps):
    assert marginal(p, q, mode, steps) == p


def test_golden_g5():
    p = torch.tensor([0.5, 0.2, 0.2, 0.1])
    probs = torch.stack([p, p]).expand(84, 2, 4).contiguous()
    ids = torch.tensor([0, 3]).expand(84, 1, 2).contiguous()
    q = torch.tensor([0.7, 0.3]).expand(84, 1, 2).contiguous()
    for token, chance in ((0, 5 / 7), (3, 1 / 3)):
        draft = torch.full((84, 1), token)
        length, _ = ops.accept(
            draft, full(84, 1), probs, ids, q, grid(84)[:, None].contiguous(), torch.zeros(84, 2)
        )
        assert length.sum().item() / 84 == pytest.approx(chance, abs=1e-12)
    one = (draft[0], 1, probs[0], ids[0], q[0], 0)
    torch.testing.assert_close(
        reference.next_distribution(*one).float(), torch.tensor([0, 0.5, 0.5, 0])
    )


# P(chi2_k > k + 2 sqrt(k x) + 2 x) <= exp(-x) (Laurent and Massart 2000, lemma 1); x = 14 makes
# a false alarm of one test less likely than 1e-6. The seed is fixed.
def chi_square_limit(k, x=14.0):
    return k + 2 * math.sqrt(k * x) + 2 * x


@pytest.mark.parametrize("mode", ["dense", "sparse", "one-hot"])
def test_sampled_acceptance_has_the_target_distribution(mode):
    vocab, tokens, count = 8, 3, 200_000
    g = torch.Generator().manual_seed(11)
    # The target of row i depends on the token before it, as a real one does.
    logits = torch.randn(tokens + 1, vocab, vocab, generator=g)
    target = torch.softmax(logits, -1)
    drafter = logits[:-1] + 0.5 * torch.randn(tokens, vocab, vocab, generator=g)
    drafter = torch.softmax(drafter, -1)
    seeds = torch.arange(count)
    position = torch.zeros(count, dtype=torch.int64)
    prev = torch.zeros(count, dtype=torch.int64)
    draft, p_rows, q_rows, id_rows, u_rows = [], [target[0][prev]], [], [], []
    for i in range(tokens):
        q = drafter[i][prev]
        if mode == "sparse":
            ids = q.topk(3).indices
            q = q.gather(1, ids)
            q = q / q.sum(-1, keepdim=True)
            id_rows.append(ids)
        elif mode == "one-hot":
            q = torch.nn.functional.one_hot(q.argmax(-1), vocab).float()
        q_rows.append(q)
        drawn = ops.categorical(q.contiguous(), ops.uniform(seeds, position + i, 1))
        prev = drawn if mode != "sparse" else ids.gather(1, drawn[:, None])[:, 0]
        draft.append(prev)
        p_rows.append(target[i + 1][prev])
        u_rows.append(ops.uniform(seeds, position + i, 2))
    draft = torch.stack(draft, 1)
    length, nxt = ops.accept(
        draft,
        full(count, tokens),
        torch.stack(p_rows, 1).contiguous(),
        torch.stack(id_rows, 1).contiguous() if mode == "sparse" else None,
        None if mode == "one-hot" else torch.stack(q_rows, 1).contiguous(),
        torch.stack(u_rows, 1).contiguous(),
        torch.stack([ops.uniform(seeds, position + i, 0) for i in range(tokens + 1)], 1),
    )
    assert len(set(length.tolist())) == tokens + 1  # every outcome occurs
    for i in range(tokens + 1):
        alive = length >= i
        token = torch.where(length > i, draft[:, min(i, tokens - 1)], nxt)[alive]
        before = draft[alive, i - 1] if i else position[alive]
        seen = torch.zeros(vocab, vocab, dtype=torch.float64)
        seen.index_put_((before, token), torch.ones(1, dtype=torch.float64), accumulate=True)
        want = seen.sum(1, keepdim=True) * target[i].double()
        # Pearson's statistic needs about five expected in a cell
        groups = want.min(1).values >= 5
        assert want[groups].sum() > 0.9 * want.sum()
        statistic = ((seen - want) ** 2 / want)[groups].sum().item()
        assert statistic < chi_square_limit(int(groups.sum()) * (vocab - 1))


class TestEdges:
    p = torch.tensor([[[0.0, 1.0, 0.0], [0.25, 0.25, 0.5]]])

    def one(self, draft, u, bonus, q_ids=None, q=None, offered=1, p=None):
        length, nxt = ops.accept(
            torch.tensor([[draft]]),
            full(1, offered),
            self.p if p is None else p,
            q_ids,
            q,
            torch.tensor([[u]]),
            torch.full((1, 2), bonus),
        )
        return length.item(), nxt.item()

    def test_uniform_zero_never_accepts_an_impossible_token(self):
        assert self.one(0, 0.0, 0.0) == (0, 1)
        assert self.one(2, 0.0, LARGEST_UNIFORM) == (0, 1)

    def test_largest_uniform_accepts_a_certain_token(self):
        assert self.one(1, LARGEST_UNIFORM, 0.0) == (1, 0)
        assert self.one(1, LARGEST_UNIFORM, LARGEST_UNIFORM) == (1, 2)

    def test_empty_residual_draws_from_p(self):
        # q >= p everywhere, so a rejection leaves nothing: p itself
        q = torch.tensor([[[0.25, 0.25, 0.75]]])
        p = torch.tensor([[[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]])
        got = [self.one(2, 0.9, u, None, q, 1, p) for u in (0.1, 0.3, 0.8)]
        assert got == [(0, 0), (0, 1), (0, 2)]

    def test_repeated_candidates_add_up(self):
        ids, q = torch.tensor([[[2, 2, 0]]]), torch.tensor([[[0.25, 0.25, 0.5]]])
        p = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])
        assert self.one(2, 0.49, 0.0, ids, q, 1, p)[0] == 1  # u * (1/4 + 1/4) < 1/4
        assert self.one(2, 0.51, 0.0, ids, q, 1, p) == (0, 1)

    def test_nothing_offered_is_a_plain_draw(self):
        p = torch.tensor([[[0.25, 0.25, 0.5], [math.nan] * 3]])
        assert self.one(7, math.nan, 0.3, offered=0, p=p) == (0, 1)

    def test_minus_one_ends_the_chain(self):
        p = torch.tensor([[[0.25, 0.25, 0.5], [math.nan] * 3]])
        assert self.one(-1, 0.0, 0.3, p=p) == (0, 1)

    def test_temperature_zero_rows_are_greedy(self):
        # mixed batch: sequence 0 greedy, sequence 1 sampled
        logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]]).repeat(2, 1)
        t = torch.tensor([0.0, 0.0, 1.0, 1.0])
        off = torch.zeros(4, dtype=torch.int64), torch.ones(4)
        p = ops.sampling_probs(logits, t, *off).view(2, 2, 3)
        q = torch.tensor([[[0.2, 0.5, 0.3]]]).repeat(2, 1, 1)
        for d in range(3):
            draft = torch.full((2, 1), d)
            length, nxt = ops.accept(
                draft, full(2, 1), p, None, q, torch.full((2, 1), 0.99), torch.full((2, 2), 0.4)
            )
            want = ops.accept_greedy(draft[:1], full(1, 1), torch.tensor([[1, 0]]))
            assert (length[0], nxt[0]) == (want[0][0], want[1][0])
            alone = ops.accept(
                draft[1:], full(1, 1), p[1:], None, q[1:], torch.tensor([[0.99]]),
                torch.full((1, 2), 0.4),
            )  # fmt: skip
            assert (length[1], nxt[1]) == (alone[0][0], alone[1][0])


def random_batch(sequences=6, tokens=4, vocab=1500, candidates=3):
    g = torch.Generator().manual_seed(21)
    ids = torch.rand(sequences, tokens, vocab, generator=g).argsort(-1)[..., :candidates]
    args = [
        ids[..., 1].contiguous(),
        torch.randint(0, tokens + 1, (sequences,), generator=g, dtype=torch.int32),
        torch.softmax(torch.randn(sequences, tokens + 1, vocab, generator=g), -1),
        ids.contiguous(),
        torch.softmax(torch.randn(sequences, tokens, candidates, generator=g), -1) / 700,
        torch.rand(sequences, tokens, generator=g),
        torch.rand(sequences, tokens + 1, generator=g),
    ]
    return args


def test_row_independence():
    args = random_batch()
    length, nxt = ops.accept(*args)
    assert len(set(length.tolist())) > 1
    for s in range(len(length)):
        one = ops.accept(*(a[s : s + 1] for a in args))
        assert (one[0].item(), one[1].item()) == (length[s].item(), nxt[s].item())


def test_what_was_not_offered_is_not_read():  # FORMATS 6, row 17: the actual chain length
    draft, offered, probs, ids, q, u, bonus = random_batch()
    want = ops.accept(draft, offered, probs, ids, q, u, bonus)
    for s, n in enumerate(offered.tolist()):
        draft[s, n:] = 10**9
        ids[s, n:] = -7
        q[s, n:] = math.nan
        u[s, n:] = math.nan
        bonus[s, n + 1 :] = math.nan
        probs[s, n + 1 :] = math.nan
    got = ops.accept(draft, offered, probs, ids, q, u, bonus)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_accepted_never_exceeds_offered():  # FORMATS 6, row 14: the offered denominator
    draft = torch.tensor([[5, 6, 9, 1, 1, 1, 1]])  # the third would match, but is not offered
    target = torch.tensor([[5, 6, 9, 1, 1, 1, 1, 1]])
    length, nxt = ops.accept_greedy(draft, full(1, 2), target)
    assert (length.item(), nxt.item()) == (2, 9)
    assert length.item() / 2 == 1  # 100 % of what was offered


def test_greedy_counts_row_zero():  # FORMATS 6, row 27
    draft, target = torch.arange(7)[None], torch.arange(8)[None]
    assert ops.accept_greedy(draft, full(1, 7), target)[0].item() == 7
    target[0, 0] = 3
    assert ops.accept_greedy(draft, full(1, 7), target)[0].item() == 0


class TestRefuses:
    @pytest.mark.parametrize(
        "index, change, message",
        [
            (0, lambda t: t.int(), "draft must have dtype Long"),
            (0, lambda t: t[0], r"draft must be \[sequences, tokens\]"),
            (0, lambda t: t.T.contiguous().T, "draft must be contiguous"),
            (0, lambda t: t + 1500, r"draft must hold ids in \[0, 1500\)"),
            (0, lambda t: t * 0 - 2, r"got -2 at sequence \d, token 0"),
            (1, lambda t: t.long(), "offered must have dtype Int"),
            (1, lambda t: t[1:], "offered must have 6 entries"),
            (1, lambda t: t * 0 + 5, r"offered must be in \[0, 4\], got 5 for sequence 0"),
            (1, lambda t: t * 0 - 1, r"got -1 for sequence 0"),
            (2, lambda t: t.double(), "probs must have dtype Float"),
            (2, lambda t: t[:, 1:].contiguous(), "probs must have 5 rows per sequence"),
            (2, lambda t: t[1:], "probs must have 6 sequences"),
            (2, lambda t: t[..., :0].contiguous(), "at least one column"),
            (2, lambda t: t * math.nan, "a negative number or NaN at sequence 0"),
            (2, lambda t: t * 0, "a row of sum 0 or infinity at sequence 0"),
            (3, lambda t: t.int(), "q_ids must have dtype Long"),
            (3, lambda t: t[..., 1:].contiguous(), "q_ids must have 3 entries"),
            (3, lambda t: None, r"q must have 1500 columns, as probs has \(or pass q_ids\)"),
            (3, lambda t: t * 0 + 1500, r"q_ids must be in \[0, 1500\), got 1500 at sequence"),
            (4, lambda t: None, "q must be given when q_ids is, got None"),
            (4, lambda t: t.double(), "q must have dtype Float"),
            (4, lambda t: t[:, 1:].contiguous(), "q must have 4 rows per sequence"),
            (4, lambda t: t * math.nan, "a negative number or NaN"),
            (5, lambda t: t[:, 1:].contiguous(), "uniform must have 4 columns"),
            (5, lambda t: t.double(), "uniform must have dtype Float"),
            (5, lambda t: t + 1, r"uniform must be in \[0, 1\)"),
            (6, lambda t: t[0], r"bonus_uniform must be \[sequences, tokens \+ 1\]"),
            (6, lambda t: t[1:], "bonus_uniform must have 6 sequences"),
            (6, lambda t: t[:, 1:].contiguous(), "bonus_uniform must have 5 columns"),
            (6, lambda t: t - 1, r"bonus_uniform must be in \[0, 1\)"),
        ],
    )
    def test_accept(self, index, change, message):
        args = random_batch()
        args[1] = full(6, 4)
        args[index] = change(args[index])
        with pytest.raises(RuntimeError, match=message):
            ops.accept(*args)

    def test_accept_greedy(self):
        draft, target = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="target_ids must have 4 columns"):
            ops.accept_greedy(draft, full(2, 3), target[:, 1:].contiguous())
        with pytest.raises(RuntimeError, match="target_ids must have dtype Long"):
            ops.accept_greedy(draft, full(2, 3), target.int())
        with pytest.raises(RuntimeError, match="target_ids must have 2 sequences"):
            ops.accept_greedy(draft, full(2, 3), target[:1])
        with pytest.raises(RuntimeError, match=r"offered must be in \[0, 3\], got 4"):
            ops.accept_greedy(draft, full(2, 4), target)
        with pytest.raises(RuntimeError, match="offered must have 2 entries"):
            ops.accept_greedy(draft, full(1, 3), target)
        with pytest.raises(RuntimeError, match="draft must have dtype Long"):
            ops.accept_greedy(draft.int(), full(2, 3), target)
        target[1] = -1
        with pytest.raises(RuntimeError, match="target_ids must be >= 0, got -1 at sequence 1"):
            ops.accept_greedy(draft, full(2, 3), target)
