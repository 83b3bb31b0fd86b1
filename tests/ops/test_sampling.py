"""uniform, sampling_probs, categorical: published values, edges and what must be refused."""

import json
import math
from pathlib import Path

import pytest
import torch

from torch_dflash import ops
from torch_dflash.reference import sampling as reference
from torch_dflash.testing.child import output_under

LARGEST_UNIFORM = 1 - 2**-24


def off(rows):
    return torch.zeros(rows, dtype=torch.int64), torch.ones(rows)


def probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    logits = logits[None] if logits.dim() == 1 else logits
    rows = len(logits)
    return ops.sampling_probs(
        logits,
        torch.full((rows,), float(temperature)),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), float(top_p)),
    )


# Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
PHILOX = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


class TestUniform:
    @pytest.mark.parametrize("counter, key, words", PHILOX)
    def test_the_oracle_is_philox(self, counter, key, words):
        assert reference.philox4x32_10(counter, key) == words

    def test_published_value(self):
        zero = torch.zeros(1, dtype=torch.int64)
        assert ops.uniform(zero, zero, 0).item() == (0x6627E8D5 >> 8) / 2**24

    def test_range_and_resolution(self):
        n = 1 << 16
        u = ops.uniform(torch.full((n,), -5), torch.arange(n), 1)
        assert u.min() >= 0
        assert u.max() <= LARGEST_UNIFORM
        assert torch.equal(u * 2**24, (u * 2**24).round())
        # The mean of n uniforms has standard deviation 1 / sqrt(12 n) = 1.1e-3; five of them.
        assert abs(u.mean().item() - 0.5) < 5 / math.sqrt(12 * n)

    def test_streams_seeds_and_positions_differ(self):
        seeds, positions = torch.tensor([1, 1, 2]), torch.tensor([7, 8, 7])
        values = torch.cat([ops.uniform(seeds, positions, s) for s in range(3)])
        assert len(set(values.tolist())) == 9

    def test_high_halves_count(self):
        seeds = torch.tensor([1, 1 + 2**32, 1, 1 - 2**63])
        positions = torch.tensor([1, 1, 1 + 2**32, 1])
        assert len(set(ops.uniform(seeds, positions, 0).tolist())) == 4

    def test_refuses(self):
        n = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=r"uniform: stream must be 0 .*, got 3"):
            ops.uniform(n, n, 3)
        with pytest.raises(RuntimeError, match=r"positions must have the shape of seeds \[2\]"):
            ops.uniform(n, n[:1], 0)
        with pytest.raises(RuntimeError, match="seeds must have dtype Long, got Int"):
            ops.uniform(n.int(), n, 0)
        with pytest.raises(RuntimeError, match="positions must have dtype Long, got Float"):
            ops.uniform(n, n.float(), 0)


class TestSamplingProbs:
    def test_z_lab(self, fixtures):
        from safetensors import safe_open

        with safe_open(fixtures / "accept/sampling_probs.safetensors", "pt") as f:
            logits = f.get_tensor("logits")
            for i, (temperature, top_p, top_k) in enumerate(json.loads(f.metadata()["cases"])):
                want = f.get_tensor(f"probs.{i}")
                got = probs(logits, temperature, top_k, top_p)
                torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
                assert torch.equal(got == 0, want == 0)

    def test_rows_of_one_batch_have_their_own_settings(self):
        logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
        together = ops.sampling_probs(
            logits,
            torch.tensor([0.0, 1.0, 0.5]),
            torch.tensor([0, 3, 0]),
            torch.tensor([1.0, 1.0, 0.5]),
        )
        alone = [probs(logits[0], 0), probs(logits[1], 1, 3), probs(logits[2], 0.5, 0, 0.5)]
        assert torch.equal(together, torch.cat(alone))
        assert together[0].sum() == 1
        assert together[0, logits[0].argmax()] == 1
        assert (together[1] > 0).sum() == 3

    def test_ties_go_to_the_lowest_ids(self):
        flat = torch.zeros(2000)
        flat[1500] = 1
        assert probs(flat, 1, 4)[0].nonzero().flatten().tolist() == [0, 1, 2, 1500]
        assert probs(torch.zeros(2000), 0)[0].argmax() == 0
        # each of 8 equal ids has 1/8; 3/8 is reached after exactly three
        kept = probs(torch.zeros(8), 1, 0, 0.375)[0]
        assert torch.equal(kept, torch.tensor([1.0] * 3 + [0.0] * 5) / 3)
        assert probs([0.0, -0.0, 0.0], 1, 2)[0].tolist() == [0.5, 0.5, 0]

    @pytest.mark.parametrize("top_p", [1e-45, 1e-30, 1e-6])
    def test_a_tiny_top_p_keeps_one(self, top_p):
        assert probs([1.0, 3.0, 3.0, 2.0], 1, 0, top_p)[0].tolist() == [0, 1, 0, 0]

    def test_top_p_just_below_one(self):
        p = probs(torch.zeros(4), 1, 0, 1 - 2**-24)[0]
        assert p.tolist() == [0.25] * 4

    @pytest.mark.parametrize("top_k", [16, 17, 3000, 5000])  # FORMATS 6, row 18: any k
    def test_any_top_k(self, top_k):
        logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(1))
        p = probs(logits[0], 1, top_k)[0]
        kept = set(logits[0].topk(min(top_k, 3000)).indices.tolist())
        assert set(p.nonzero().flatten().tolist()) == kept

    def test_forbidden_ids_stay_forbidden(self):
        p = probs([0.0, -math.inf, 1.0], 1)[0]
        assert p[1] == 0
        assert p[2] > p[0] > 0

    def test_extreme_temperatures(self):
        assert probs([1.0, 2.0, 3.0], 1e-38)[0].tolist() == [0, 0, 1]
        assert torch.allclose(probs([1.0, 2.0, 3.0], 1e30)[0], torch.full((3,), 1 / 3))
        assert probs([-3e38, 3e38], 1)[0].tolist() == [0, 1]

    @pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (50, 1.0), (0, 0.9), (300, 0.8)])
    def test_large_vocabulary(self, top_k, top_p):
        # float32 exp and sums of 248320 terms in a 32-lane tree: relative error about 1e-6
        logits = torch.randn(2, 248320, generator=torch.Generator().manual_seed(2)) * 3
        args = torch.ones(2), torch.full((2,), top_k), torch.full((2,), top_p)
        want = reference.sampling_probs(logits, *args)
        got = ops.sampling_probs(logits, *args)
        assert torch.equal(got == 0, want == 0)
        torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-12)

    def test_refuses_values(self):
        bad = torch.zeros(3, 4)
        bad[1, 2] = math.nan
        with pytest.raises(RuntimeError, match=r"logits must be finite .* NaN or \+inf in row 1"):
            probs(bad)
        bad[1, 2] = math.inf
        with pytest.raises(RuntimeError, match="in row 1"):
            probs(bad, 0)
        with pytest.raises(RuntimeError, match="-inf everywhere in row 0"):
            probs([-math.inf] * 3)
        for t in (-1.0, math.nan, math.inf):
            with pytest.raises(RuntimeError, match="temperature must be finite and >= 0"):
                probs([0.0], t)
        with pytest.raises(RuntimeError, match="top_k must be >= 0"):
            probs([0.0], 1, -1)
        for p in (0.0, -0.5, 1.5, math.nan):
            with pytest.raises(RuntimeError, match=r"top_p must be in \(0, 1\]"):
                probs([0.0], 1, 0, p)

    @pytest.mark.parametrize(
        "index, value, message",
        [
            (0, torch.zeros(2, 3).double(), "logits must have dtype Float"),
            (0, torch.zeros(6), r"logits must be \[rows, vocab\]"),
            (0, torch.zeros(2, 0), "at least one column"),
            (0, torch.zeros(3, 2).T, "logits must be contiguous"),
            (1, torch.ones(3), "temperature must have 2 entries"),
            (1, torch.ones(2).double(), "temperature must have dtype Float"),
            (2, torch.zeros(2), "top_k must have dtype Long"),
            (2, torch.zeros(1, dtype=torch.int64), "top_k must have 2 entries"),
            (3, torch.ones(2, 1), r"top_p must be \[rows\]"),
            (3, torch.ones(3), "top_p must have 2 entries"),
        ],
    )
    def test_refuses_arguments(self, index, value, message):
        args = [torch.zeros(2, 3), torch.ones(2), *off(2)]
        args[index] = value
        with pytest.raises(RuntimeError, match=message):
            ops.sampling_probs(*args)


class TestCategorical:
    def test_is_the_inverse_distribution_function(self):
        p = torch.tensor([0.125, 0.0, 0.5, 0.25, 0.125])
        grid = (torch.arange(64) + 0.5) / 64
        drawn = ops.categorical(p.repeat(64, 1), grid)
        assert torch.bincount(drawn, minlength=5).tolist() == [8, 0, 32, 16, 8]
        assert torch.equal(drawn, drawn.sort().values)

    @pytest.mark.parametrize("u", [0.0, LARGEST_UNIFORM])
    @pytest.mark.parametrize("vocab", [3, 1024, 1025, 5000])
    def test_edges_never_give_an_impossible_id(self, u, vocab):
        g = torch.Generator().manual_seed(vocab)
        p = torch.rand(1, vocab, generator=g)
        p[0, : vocab // 3] = 0
        p[0, -(vocab // 3) :] = 0
        possible = p[0].nonzero().flatten()
        want = possible[0] if u == 0 else possible[-1]
        assert ops.categorical(p, torch.tensor([u])).item() == want

    def test_boundary_belongs_to_the_next(self):
        assert ops.categorical(torch.tensor([[0.5, 0.5]]), torch.tensor([0.5])).item() == 1

    def test_needs_no_normalisation(self):
        p = torch.rand(4, 2000, generator=torch.Generator().manual_seed(3))
        u = torch.tensor([0.1, 0.4, 0.6, 0.9])
        assert torch.equal(ops.categorical(p, u), ops.categorical(p * 2**20, u))

    def test_large_vocabulary_agrees_with_float64(self):
        g = torch.Generator().manual_seed(4)
        p = torch.softmax(torch.randn(64, 50000, generator=g) * 3, -1)
        u = torch.rand(64, generator=g)
        drawn = ops.categorical(p, u)
        cumulative = p.double().cumsum(-1) / p.double().sum(-1, keepdim=True)
        upper = cumulative.gather(1, drawn[:, None])[:, 0]
        lower = upper - p.double().gather(1, drawn[:, None])[:, 0]
        # chunk sums are float32 trees of 1024 terms: 10 roundings of 2^-24
        assert (upper > u - 10 * 2**-24).all()
        assert (lower < u + 10 * 2**-24).all()

    def test_row_independence(self):
        g = torch.Generator().manual_seed(5)
        p, u = torch.rand(7, 3000, generator=g), torch.rand(7, generator=g)
        alone = [ops.categorical(p[i : i + 1], u[i : i + 1]) for i in range(7)]
        assert torch.equal(ops.categorical(p, u), torch.cat(alone))

    def test_refuses(self):
        p, u = torch.ones(2, 3), torch.zeros(2)
        for bad in (-0.5, math.nan):
            q = p.clone()
            q[1, 0] = bad
            with pytest.raises(RuntimeError, match="a negative number or NaN in row 1"):
                ops.categorical(q, u)
        with pytest.raises(RuntimeError, match="probs must have a positive finite sum"):
            ops.categorical(p * 0, u)
        with pytest.raises(RuntimeError, match="got 0 or infinity in row 0"):
            ops.categorical(p * math.inf, u)
        for bad in (1.0, -1e-9, math.nan):
            with pytest.raises(RuntimeError, match=r"uniform must be in \[0, 1\)"):
                ops.categorical(p, torch.tensor([0.0, bad]))
        with pytest.raises(RuntimeError, match="uniform must have 2 entries"):
            ops.categorical(p, u[:1])
        with pytest.raises(RuntimeError, match="uniform must have dtype Float"):
            ops.categorical(p, u.double())
        with pytest.raises(RuntimeError, match="probs must have dtype Float"):
            ops.categorical(p.half(), u)
        with pytest.raises(RuntimeError, match=r"probs must be \[rows, vocab\]"):
            ops.categorical(p[0], u)


DIGEST = """
import torch, hashlib, torch_dflash.ops as ops
g = torch.Generator().manual_seed(0)
x = torch.randn(4, 5003, generator=g) * 5
u = torch.rand(4, generator=g)
top_k, top_p = torch.tensor([0, 40, 0, 0]), torch.tensor([1., 1., .9, 1.])
p = ops.sampling_probs(x, torch.tensor([1., .3, 2., 0.]), top_k, top_p)
print(hashlib.sha256(p.numpy().tobytes() + ops.categorical(p, u).numpy().tobytes()).hexdigest())
"""


def test_instruction_sets_give_the_same_bits():
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512 VNNI")
    digests = {output_under(isa, "-c", DIGEST) for isa in ("avx2", "avx512")}
    assert len(digests) == 1
