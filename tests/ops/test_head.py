"""head_topk against a stable sort."""

import hashlib

import pytest
import torch

from torch_dflash import ops
from torch_dflash.testing.child import output_under
from torch_dflash.testing.samples.head import by_value_then_id

INF = float("inf")


def check(logits, k):
    """Without multiplier and soft cap the values are the logits themselves: exact."""
    values, ids = ops.head_topk(logits, k, 1.0, 0.0)
    want_values, want_ids = by_value_then_id(logits, k)
    assert torch.equal(ids, want_ids)
    assert torch.equal(values, want_values)


class TestOrder:
    @pytest.mark.parametrize("vocabulary", [1, 5, 16, 255, 256, 257, 4096, 16384, 16385, 50000])
    def test_any_k(self, vocabulary):
        g = torch.Generator().manual_seed(vocabulary)
        logits = torch.randn(3, vocabulary, generator=g)
        for k in {1, 2, 8, 16, 17, 256, 257, 1000, vocabulary}:
            if k <= vocabulary:
                check(logits, k)

    def test_row_18_k_16_17_and_vocabulary(self):
        logits = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1))
        for k in (16, 17, 4096):
            check(logits, k)

    @pytest.mark.parametrize("levels", [1, 2, 7])
    def test_ties_go_to_the_lower_id(self, levels):
        g = torch.Generator().manual_seed(levels)
        logits = torch.randint(0, levels, (4, 40000), generator=g).float()
        for k in (1, 3, 16, 255, 300, 40000):
            check(logits, k)

    def test_signed_zeros_tie(self):
        logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0]])
        _, ids = ops.head_topk(logits, 4, 1.0, 0.0)
        assert ids.tolist() == [[0, 1, 3, 2]]
        assert ops.head_topk(-logits, 1, 1.0, 0.0)[1].tolist() == [[2]]

    def test_infinities_are_legal(self):
        logits = torch.full((2, 20000), -INF)
        logits[0, 17000] = INF
        logits[0, 3] = INF
        for k in (1, 2, 5, 20000):
            check(logits, k)
        values, ids = ops.head_topk(logits, 1, 0.5, 30.0)
        assert values.tolist() == [[30.0], [-30.0]]
        assert ids.tolist() == [[3], [0]]

    @pytest.mark.parametrize("multiplier, softcap", [(0.196, 20.0), (1.0, 5.0), (3.0, 0.0)])
    def test_transform_comes_first(self, multiplier, softcap):
        """Order and ties are those of the transformed values; tanh is right to 1e-6 of the cap
        (2 ulp, the division and the product)."""
        logits = torch.randn(3, 20000, generator=torch.Generator().manual_seed(2)) * 20
        values, ids = ops.head_topk(logits, 20000, multiplier, softcap)
        z = logits.double() * multiplier
        want = softcap * torch.tanh(z / softcap) if softcap else z
        torch.testing.assert_close(
            values.double(), want.gather(1, ids), rtol=1e-6, atol=1e-6 * (softcap or 1)
        )
        everything = torch.empty_like(values).scatter_(1, ids, values)
        assert torch.equal(ids, by_value_then_id(everything, 20000)[1])
        for k in (1, 16, 300):
            best, best_ids = ops.head_topk(logits, k, multiplier, softcap)
            assert torch.equal(best_ids, ids[:, :k])
            assert torch.equal(best, values[:, :k])

    def test_saturated_cap_ties(self):
        logits = torch.tensor([[1.0, 500.0, 900.0, 400.0]])
        assert ops.head_topk(logits, 3, 1.0, 1.0)[1].tolist() == [[1, 2, 3]]


class TestNaN:
    @pytest.mark.parametrize("column", [0, 7, 300, 16384, 19999])
    @pytest.mark.parametrize("k", [1, 16, 500])
    def test_the_row_is_named(self, column, k):
        logits = torch.randn(5, 20000, generator=torch.Generator().manual_seed(3))
        logits[4, column] = logits[2, column] = float("nan")
        message = f"dflash::head_topk: logits must not hold NaN, got one in row 2, column {column}"
        for multiplier, softcap in ((1.0, 0.0), (0.5, 30.0)):
            with pytest.raises(RuntimeError, match=message):
                ops.head_topk(logits, k, multiplier, softcap)

    def test_even_among_infinities(self):
        logits = torch.full((1, 64), INF)
        logits[0, 63] = float("nan")
        with pytest.raises(RuntimeError, match="row 0, column 63"):
            ops.head_topk(logits, 1, 1.0, 0.0)


def run_all(rows):
    logits = torch.randn(6, 50000, generator=torch.Generator().manual_seed(4)) * 8
    return [
        t
        for k in (1, 16, 300)
        for multiplier, softcap in ((1.0, 0.0), (0.196, 20.0))
        for t in ops.head_topk(logits[:rows].contiguous(), k, multiplier, softcap)
    ]


def digest():
    """Hash of every output, on this process's instruction set."""
    contents = b"".join(t.numpy().tobytes() for t in run_all(6))
    return hashlib.sha256(contents).hexdigest()


class TestRowIndependence:
    def test_rows_and_threads(self):
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            whole = run_all(6)
            torch.set_num_threads(1)
            for rows in (1, 3, 6):
                for part, full in zip(run_all(rows), whole, strict=True):
                    assert torch.equal(part, full[:rows])
        finally:
            torch.set_num_threads(threads)

    def test_both_instruction_sets_give_the_same_bits(self):
        assert output_under("avx2", __file__).strip() == digest()


@pytest.mark.parametrize(
    "args, message",
    [
        ((torch.zeros(4), 1, 1.0, 0.0), r"logits must be \[rows, vocabulary\], got shape \[4\]"),
        ((torch.zeros(2, 4).half(), 1, 1.0, 0.0), "logits must have dtype Float, got Half"),
        ((torch.zeros(4, 2).mT, 1, 1.0, 0.0), "logits must be contiguous"),
        ((torch.zeros(2, 4), 0, 1.0, 0.0), "k must be 1 .. 4 .*, got 0"),
        ((torch.zeros(2, 4), 5, 1.0, 0.0), "k must be 1 .. 4 .*, got 5"),
        ((torch.zeros(2, 4), 1, 0.0, 0.0), "multiplier must be finite and > 0 .*, got 0"),
        ((torch.zeros(2, 4), 1, float("nan"), 0.0), "multiplier must be finite"),
        ((torch.zeros(2, 4), 1, 1.0, -1.0), "softcap must be finite and >= 0 .*, got -1"),
        ((torch.zeros(2, 4), 1, 1.0, INF), "softcap must be finite"),
    ],
)
def test_errors_say_what_is_wrong(args, message):
    with pytest.raises(RuntimeError, match="dflash::head_topk: " + message):
        ops.head_topk(*args)


if __name__ == "__main__":
    print(digest())
