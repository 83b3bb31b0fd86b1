"""grouped_conv and selector_walk: golden values, z-lab's numbers, boundaries and refusals."""

import math

import pytest
import torch

from torch_dflash import ops
from torch_dflash.reference import draft as reference
from torch_dflash.testing.samples.draft import BF16, F32, float_codebook

CASES = ["d2_full", "d2_taps3", "d2_taps1_groupH", "d2_group1", "d2_swa_noncausal",
         "d2_mixed_legacy", "d2_scaled", "d2_yarn", "d2_k1"]  # fmt: skip


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


class TestGroupedConv:
    # G2 of the design's golden values
    x = torch.tensor([[r + 1 + 0.1 * c for c in range(4)] for r in range(6)])
    base = torch.tensor([[1.0, 1, 1, 1], [0.5, 0.25, -0.5, 2]])
    coef = torch.tensor([[[0.1 * (r + 1), -0.1 * (r + 1)], [0.01 * r, 0.02 * r]] for r in range(6)])
    want = torch.tensor(
        [
            [1.1, 1.21, 1.08, 1.17],
            [2.91, 2.806, 1.184, 4.466],
            [4.94, 4.597, 1.228, 7.002],
            [5.6, 5.74, 2.52, 2.58],
            [9.66, 8.839, 0.836, 11.594],
            [12.35, 11.29, 0.4, 13.65],
        ]
    )

    def arguments(self, side):
        """The golden case on one side; NaN on the other, which must not be read."""
        base = torch.full((2, 2, 4), math.nan)
        base[side] = self.base
        coef = torch.full((6, 2, 2, 2), math.nan)
        coef[:, side] = self.coef
        return self.x, coef.view(6, 8), base, side

    @pytest.mark.parametrize("side", [0, 1])
    def test_golden_g2_and_the_boundary_between_requests(self, side):
        # FORMATS 6, row 59: 2 requests, n_q = 3, T = 2; row 3 sees no row 2
        got = ops.grouped_conv(*self.arguments(side), offsets(3, 3), 0)
        # printed to 6 decimals; float32 of values up to 14
        torch.testing.assert_close(got, self.want, rtol=1e-6, atol=1e-6)

    def test_other_requests_do_not_leak(self):
        x, coef, base, side = self.arguments(0)
        x = x.clone()
        x[:3] = math.nan
        got = ops.grouped_conv(x, coef, base, side, offsets(3, 3), 0)
        torch.testing.assert_close(got[3:], self.want[3:], rtol=1e-6, atol=1e-6)
        assert got[:3].isnan().all()

    def test_row_independence(self):
        g = torch.Generator().manual_seed(0)
        lengths, columns, taps, groups = (4, 1, 7), 2880, 3, 180
        x = torch.randn(12, columns, generator=g)
        coef = torch.randn(12, 2 * taps * groups, generator=g)
        base = torch.randn(2, taps, columns, generator=g)
        for mode in (0, 1):
            together = ops.grouped_conv(x, coef, base, 1, offsets(*lengths), mode)
            first = 0
            for n in lengths:
                rows = slice(first, first + n)
                alone = ops.grouped_conv(x[rows], coef[rows], base, 1, offsets(n), mode)
                assert torch.equal(alone, together[rows])
                first += n

    def test_packed_output_is_quant_act_of_the_float_output(self):
        g = torch.Generator().manual_seed(1)
        x, coef = torch.randn(3, 600, generator=g), torch.randn(3, 2 * 2 * 30, generator=g)
        base = torch.randn(2, 2, 600, generator=g)
        floats = ops.grouped_conv(x, coef, base, 0, offsets(3), 0)
        for act_mode in (1, 2):
            packed = ops.grouped_conv(x, coef, base, 0, offsets(3), act_mode)
            assert torch.equal(packed, ops.quant_act(floats, act_mode))

    def test_more_taps_than_rows(self):
        x, base = torch.ones(1, 2), torch.ones(2, 5, 2)
        got = ops.grouped_conv(x, torch.zeros(1, 2 * 5), base, 0, offsets(1), 0)
        assert got.tolist() == [[1, 1]]

    @pytest.mark.parametrize(
        "index, value, message",
        [
            (0, torch.zeros(6, 4).double(), "x must have dtype Float"),
            (0, torch.zeros(6), r"x must be \[rows, columns\]"),
            (0, torch.zeros(4, 6).T, "x must be contiguous"),
            (0, torch.zeros(6, 3), "base must have 3 columns, as x has"),
            (0, torch.zeros(5, 4), "coef must have 5 rows, as x has"),
            (1, torch.zeros(6, 8).half(), "coef must have dtype Float"),
            (1, torch.zeros(6, 9), r"coef must have a positive multiple of 2 \* 2 columns"),
            (1, torch.zeros(6, 12), "4 columns of x must divide into the 3 groups of coef"),
            (1, torch.zeros(6, 0), "coef must have a positive multiple"),
            (2, torch.zeros(2, 2, 4).double(), "base must have dtype Float"),
            (2, torch.zeros(2, 4), r"base must be \[2, taps, columns\]"),
            (2, torch.zeros(3, 2, 4), "base must have 2 sides"),
            (2, torch.zeros(2, 0, 4), "base must have at least one tap"),
            (3, 2, r"side must be 0 \(prepare\) or 1 \(finish\), got 2"),
            (4, torch.zeros(3), "cu_seqlens must have dtype Int"),
            (4, torch.zeros(0, dtype=torch.int32), "cu_seqlens must have at least one entry"),
            (4, offsets(3, 2), "cu_seqlens must rise from 0 to the 6 rows of x, got 0 .. 5"),
            (4, offsets(8, -2), "cu_seqlens must rise"),
            (4, offsets(3, 3) + 1, "cu_seqlens must rise"),
            (5, 7, "act_mode must be 0"),
        ],
    )
    def test_refuses(self, index, value, message):
        args = [self.x, torch.zeros(6, 8), torch.zeros(2, 2, 4), 0, offsets(3, 3), 0]
        args[index] = value
        with pytest.raises(RuntimeError, match=message):
            ops.grouped_conv(*args)


def greedy(ids, scores, hidden, anchor, a, b, ggml_type=F32):
    """A greedy walk of one sequence; NaN uniforms, which must not be read."""
    tokens, q = ops.selector_walk(
        ids[None],
        scores[None],
        hidden[None],
        torch.tensor([anchor]),
        float_codebook(a, ggml_type),
        ggml_type,
        float_codebook(b, ggml_type),
        ggml_type,
        torch.zeros(1),
        torch.full((1, len(ids)), math.nan),
    )
    return tokens[0].tolist(), q[0]


class TestSelectorWalk:
    # G3 of the design's golden values
    logits = torch.tensor(
        [[3, 1, 2, 0, -1, 0.5], [0, 2, 2.2, 1, 1.9, -3], [1, 1.1, 1.2, 1.3, 0, 2]]
    )
    a = torch.tensor([[1, 0], [0, 1], [1, 1], [-1, 0], [0, -1], [0.5, -0.5]])
    b = torch.tensor([[0.2, 0.1], [-0.3, 0.4], [0.5, -0.2], [0, 0.3], [0.1, 0.1], [-0.4, -0.6]])
    hidden = torch.tensor([[1, 2], [-1, 1], [0.5, 1.5]])

    @pytest.mark.parametrize(
        "multiplier, softcap, path",
        [(1.0, 0.0, [0, 1, 3]), (0.196, 20.0, [2, 1, 3]), (1.0, 1.0, [2, 1, 3])],
    )
    def test_golden_g3_multiplier_and_cap_change_the_walk(self, multiplier, softcap, path):
        # FORMATS 6, row 31; scores are what head_topk gives: after multiplier, then cap
        z = self.logits * multiplier
        z = softcap * torch.tanh(z / softcap) if softcap else z
        order = torch.sort(z, descending=True, stable=True)
        scores, ids = order.values[:, :3].contiguous(), order.indices[:, :3].contiguous()
        assert greedy(ids, scores, self.hidden, 4, self.a, self.b)[0] == path

    @pytest.mark.parametrize("name", CASES)
    def test_z_lab(self, name, fixtures):
        from safetensors import safe_open

        folder = fixtures / "dflash" / name
        with safe_open(folder / "model.safetensors", "pt") as f:
            a, b, projection = (
                f.get_tensor(f"candidate_selector.{key}")
                for key in (
                    "predecessor_codebook",
                    "successor_codebook",
                    "hidden_projection.weight",
                )
            )
        with safe_open(folder / "io.safetensors", "pt") as f:
            temperature = float(f.metadata()["temperature"])
            for step in range(int(f.metadata()["steps"])):
                case = {
                    key.removeprefix(f"step{step}."): f.get_tensor(key)
                    for key in f.keys()  # noqa: SIM118
                    if key.startswith(f"step{step}.")
                }
                self.compare(case, a, b, projection, temperature)

    def compare(self, case, a, b, projection, temperature):
        ids, anchor = case["candidates"], int(case["anchor"])
        scores = case["logits"].gather(1, ids)
        hidden = (case["hidden"][1:].double() @ projection.double().T).float()
        tokens, _ = greedy(ids, scores, hidden, anchor, a, b, BF16)
        assert tokens == case["draft_ids"].tolist()
        # one uniform in the middle of each token's share of q follows the sampled path
        path, q = case["sampled_path"], case["sampled_q"]
        at = (ids == path[:, None]).int().argmax(1)
        upper = q.double().cumsum(1).gather(1, at[:, None])[:, 0]
        u = (upper - q.double().gather(1, at[:, None])[:, 0] / 2).float()
        table = float_codebook(a, BF16), BF16, float_codebook(b, BF16), BF16
        tokens, got = ops.selector_walk(
            ids[None],
            scores[None],
            hidden[None],
            torch.tensor([anchor]),
            *table,
            torch.tensor([temperature]),
            u[None],
        )
        assert torch.equal(tokens[0], path)
        torch.testing.assert_close(got[0], q, rtol=0, atol=2e-5)  # the fixtures' tolerance for q

    def test_temperature_zero_gives_one_hot_and_the_first_of_equals(self):
        ids = torch.tensor([[2, 0, 1]])
        tokens, q = greedy(ids, torch.zeros(1, 3), torch.zeros(1, 2), 0, self.a, self.b)
        assert tokens == [2]
        assert q.tolist() == [[1, 0, 0]]

    @pytest.mark.parametrize("k", [1, 16, 17, 500])  # FORMATS 6, row 18: K = 16, 17, V
    def test_any_number_of_candidates(self, k):
        g = torch.Generator().manual_seed(k)
        ids = torch.rand(3, 500, generator=g).argsort(1)[:, :k].contiguous()
        scores, hidden = torch.randn(3, k, generator=g), torch.randn(3, 8, generator=g)
        a, b = torch.randn(500, 8, generator=g), torch.randn(500, 8, generator=g)
        u = torch.rand(1, 3, generator=g)
        temperature = torch.tensor([0.7])
        tables = float_codebook(a, F32), F32, float_codebook(b, F32), F32
        args = ids[None], scores[None], hidden[None], torch.tensor([499])
        tokens, q = ops.selector_walk(*args, *tables, temperature, u)
        want_tokens, want_q = reference.selector_walk(*args, a, b, temperature, u)
        assert torch.equal(tokens, want_tokens)
        torch.testing.assert_close(q.double(), want_q, rtol=1e-5, atol=1e-7)

    def batch(self):
        g = torch.Generator().manual_seed(9)
        a, b = torch.randn(50, 6, generator=g), torch.randn(50, 6, generator=g)
        return [
            torch.randint(0, 50, (4, 3, 5), generator=g),
            torch.randn(4, 3, 5, generator=g),
            torch.randn(4, 3, 6, generator=g),
            torch.randint(0, 50, (4,), generator=g),
            float_codebook(a, F32),
            F32,
            float_codebook(b, F32),
            F32,
            torch.tensor([0.0, 1.0, 0.0, 0.5]),
            torch.rand(4, 3, generator=g),
        ]

    def test_row_independence_in_a_mixed_batch(self):
        args = self.batch()
        tokens, q = ops.selector_walk(*args)
        for s in range(4):
            one = [a[s : s + 1] if n in (0, 1, 2, 3, 8, 9) else a for n, a in enumerate(args)]
            alone = ops.selector_walk(*one)
            assert torch.equal(alone[0], tokens[s : s + 1])
            assert torch.equal(alone[1], q[s : s + 1])

    def test_the_last_row_of_the_codebooks_is_an_id(self):  # FORMATS 6, row 6
        args = self.batch()
        args[0], args[3] = torch.full((4, 3, 5), 49), torch.full((4,), 49)
        assert (ops.selector_walk(*args)[0] == 49).all()

    @pytest.mark.parametrize(
        "index, change, message",
        [
            (0, lambda t: t.int(), "ids must have dtype Long"),
            (0, lambda t: t[0], r"ids must be \[sequences, slots, candidates\]"),
            (0, lambda t: t[..., :0].contiguous(), "at least one candidate"),
            (0, lambda t: t * 0 + 50, r"ids must be rows of the codebooks, \[0, 50\), got 50"),
            (0, lambda t: t * 0 - 1, "got -1 in sequence 0"),
            (1, lambda t: t.double(), "scores must have dtype Float"),
            (1, lambda t: t[..., 1:].contiguous(), "scores must have 5 entries there"),
            (1, lambda t: t * math.nan, r"scores must be finite or -inf, got NaN or \+inf in seq"),
            (1, lambda t: t * 0 - math.inf, "-inf everywhere in sequence 0, slot 0"),
            (2, lambda t: t.double(), "hidden must have dtype Float"),
            (2, lambda t: t[..., 1:].contiguous(), "hidden must have 6 columns, the rank"),
            (2, lambda t: t[:, 1:].contiguous(), "hidden must have 3 slots"),
            (3, lambda t: t * 0 + 50, r"anchor must be rows of the codebooks, \[0, 50\)"),
            (3, lambda t: t[1:], "anchor must have 4 entries"),
            (3, lambda t: t.int(), "anchor must have dtype Long"),
            (4, lambda t: t.float(), "predecessor must have dtype Byte"),
            (4, lambda t: t[:, 1:].contiguous(), "predecessor must have rows of a multiple of 4"),
            (4, lambda t: t[:, 4:].contiguous(), "successor must have rows of 5 values"),
            (5, lambda t: 999, "predecessor_type must be one of"),
            # FORMATS 6, row 7: compared with the other codebook, not with itself
            (6, lambda t: t[1:], "successor must have 50 rows, as predecessor has, got 49"),
            (6, lambda t: t[0], r"successor must be \[rows, bytes\]"),
            (7, lambda t: 999, "successor_type must be one of"),
            (8, lambda t: t[1:], "temperature must have 4 entries"),
            (8, lambda t: t - 1, "temperature must be finite and >= 0"),
            (8, lambda t: t * math.nan, "temperature must be finite and >= 0"),
            (9, lambda t: t[:, 1:].contiguous(), "uniform must have 3 columns"),
            (9, lambda t: t + 1, r"uniform must be in \[0, 1\)"),
            (9, lambda t: t.double(), "uniform must have dtype Float"),
        ],
    )
    def test_refuses(self, index, change, message):
        args = self.batch()
        args[index] = change(args[index])
        with pytest.raises(RuntimeError, match=message):
            ops.selector_walk(*args)


def test_lattice_of_z_lab_is_the_score(fixtures):
    """Every edge of the lattice, as the first slot of its own walk."""
    from safetensors import safe_open

    folder = fixtures / "dflash/d2_full"
    with safe_open(folder / "model.safetensors", "pt") as f:
        prefix = "candidate_selector."
        a = f.get_tensor(prefix + "predecessor_codebook")
        b = f.get_tensor(prefix + "successor_codebook")
        projection = f.get_tensor(prefix + "hidden_projection.weight")
    with safe_open(folder / "io.safetensors", "pt") as f:
        ids, lattice = f.get_tensor("step1.candidates"), f.get_tensor("step1.lattice")
        scores = f.get_tensor("step1.logits").gather(1, ids)
        hidden = (f.get_tensor("step1.hidden")[1:].double() @ projection.double().T).float()
        anchor = f.get_tensor("step1.anchor")
    slots, k = ids.shape
    before = torch.cat([anchor.expand(1, k), ids[:-1]])  # [slots, predecessors]
    flat = slots * k

    def spread(t):
        return t[:, None].expand(slots, k, t.shape[-1]).reshape(flat, 1, -1).contiguous()

    _, q = ops.selector_walk(
        spread(ids),
        spread(scores),
        spread(hidden),
        before.reshape(flat).contiguous(),
        float_codebook(a, BF16),
        BF16,
        float_codebook(b, BF16),
        BF16,
        torch.ones(flat),
        torch.zeros(flat, 1),
    )
    want = torch.softmax(lattice.double(), -1).view(flat, 1, k)
    torch.testing.assert_close(q.double(), want, rtol=0, atol=2e-5)
