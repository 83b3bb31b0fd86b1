"""block_attention against float64, and what must not change a bit of it."""

import hashlib

import pytest
import torch

from torch_dflash import ops
from torch_dflash.reference import attention as reference
from torch_dflash.testing.child import output_under
from torch_dflash.testing.samples.attention import paged, place

CPU = torch.device("cpu")
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025]


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def check(args, *rest, **more):
    """Against float64.

    Scores: about 10 roundings of sums that stay below sqrt(256) = 16 for normal q and k, so p is
    off by 10 * 16 * 2^-24 = 1e-5 at the very most; o: 256 + merges roundings of a mean of |v| < 5,
    whose errors do not line up: sqrt(256) * 2^-24 * 5 = 5e-6. A wrong key, window or sink moves
    1e-3 and more.
    """
    actual = ops.block_attention(*args, *rest, **more)
    expected = reference.block_attention(*args, *rest, **more)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1.5e-5)
    return actual


class TestValues:
    @pytest.mark.parametrize("length", LENGTHS)
    def test_row_41_lengths_around_every_edge(self, length):
        rows = min(length, 3)
        for causal in (True, False):
            check(paged(CPU, [length], [rows]), 0.125, 0, causal)

    @pytest.mark.parametrize("window", [1, 8, 64, 300])
    @pytest.mark.parametrize("causal", [True, False])
    def test_windows(self, window, causal):
        # 12 rows: beyond window 8 a bidirectional block hides its own far rows too (FORMATS B1)
        check(paged(CPU, [12, 64, 65, 700], [12, 12, 1, 12]), 0.125, window, causal)

    @pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (4, 1), (6, 2), (6, 1), (5, 5)])
    @pytest.mark.parametrize("dim", [16, 64, 128, 256])
    def test_head_layouts(self, heads, kv_heads, dim):
        args = paged(CPU, [70, 300], [5, 3], heads=heads, kv_heads=kv_heads, dim=dim)
        check(args, dim**-0.5, 0, True)

    @pytest.mark.parametrize("dim", [1, 8, 17, 40, 80, 96, 129, 192, 200, 512, 1024])
    def test_odd_head_dims(self, dim):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            args = paged(CPU, [37], [3], heads=4, kv_heads=2, dim=dim, dtype=dtype)
            check(args, dim**-0.5, 0, True)

    @pytest.mark.parametrize("page_size", [1, 16, 300, 1024])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_pages_and_cache_types(self, page_size, dtype):
        args = paged(CPU, [1, 299, 301, 640], [1, 4, 2, 8], page_size=page_size, dtype=dtype)
        check(args, 0.125, 0, True)
        check(args, 0.125, 8, False)

    @pytest.mark.parametrize("causal", [True, False])
    def test_sinks_gate_and_value_scale(self, causal):
        args = paged(CPU, [3, 257, 1100], [3, 2, 1], heads=4, kv_heads=2)
        sinks = torch.tensor([-3.0, 0.0, 2.0, float("-inf")])
        gate = torch.randn(6, 4, 2 * 64, generator=torch.Generator().manual_seed(3))[..., 64:]
        check(args, 0.125, 0, causal, sinks, gate, 0.707)
        check(args, 0.125, 8, causal, sinks, None, -2.0)

    def test_packed_output_is_the_quantized_float_output(self):
        for heads, dim in [(2, 256), (3, 40)]:
            args = paged(CPU, [3, 257], [3, 2], heads=heads, dim=dim)
            floats = ops.block_attention(*args, 0.125, 0, True)
            for act_mode in (1, 2):
                packed = ops.block_attention(*args, 0.125, 0, True, act_mode=act_mode)
                assert torch.equal(packed, ops.quant_act(floats, act_mode))

    def test_large_scores_do_not_overflow(self):
        args = paged(CPU, [300], [2])
        check((args[0] * 0 + 1, *args[1:]), 30.0, 0, True)  # scores of some hundreds

    def test_no_visible_key_is_zero(self):
        q, k, v, table, lengths, starts = paged(CPU, [20, 20], [2, 2])
        out = ops.block_attention(q, k, v, table, i32(0, 20), starts, 0.1, 0, True, torch.zeros(2))
        assert out[:2].eq(0).all()
        assert out[2:].ne(0).all()
        assert lengths.tolist() == [20, 20]


def dot_of_ones(x):
    """The sum of `x` [..., dim <= 1024] in the order docs/contracts.md prescribes, in float32."""
    acc = torch.zeros(*x.shape[:-1], 128)
    for e in range(x.shape[-1]):
        acc[..., e % 128] += x[..., e]
    quads = acc.view(*x.shape[:-1], 32, 4)
    lanes = (quads[..., 0] + quads[..., 1]) + (quads[..., 2] + quads[..., 3])
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


class TestOrder:
    """The order of the sums, seen where another order would give another result."""

    @pytest.mark.parametrize("dim", [40, 64, 128, 192, 256, 300, 1024])
    @pytest.mark.parametrize("heads", [1, 2, 4])
    def test_scores(self, dim, heads):
        """Keys of huge terms that cancel: which of the small terms survive depends on the order."""
        g = torch.Generator().manual_seed(dim)
        k = torch.randint(-3, 4, (40, 1, dim), generator=g).float()
        for row in k[:, 0]:
            a, b = torch.randperm(dim, generator=g)[:16].view(2, 8)
            row[a], row[b] = 2.0**25, -(2.0**25)
        v = torch.randn(40, 1, dim, generator=g)
        scores = dot_of_ones(k[:, 0])
        exact = k[:, 0].double().sum(-1)
        assert (scores - exact).abs().max() > 1  # the order matters here
        caches = place([k], [v], 16)
        out = ops.block_attention(
            torch.ones(1, heads, dim), *caches, i32(40), i32(0, 1), 0.125, 0, True
        )
        want = torch.softmax(0.125 * scores.double(), 0) @ v[:, 0].double()
        torch.testing.assert_close(
            out.view(heads, dim).double(), want.expand(heads, dim), rtol=0, atol=1.5e-5
        )

    @pytest.mark.parametrize("rows", [1, 5])
    @pytest.mark.parametrize("dim", [64, 24])
    def test_chunks_and_spans_bit_for_bit(self, rows, dim):
        """Equal scores: p = 1, so that o is a plain sum of values, which torch repeats exactly."""
        length, begin = 2900, 2900 - 2500
        v = torch.randn(length, 1, dim, generator=torch.Generator().manual_seed(0))
        caches = place([torch.zeros(length, 1, dim)], [v], 300)
        out = ops.block_attention(
            torch.ones(rows, 1, dim), *caches, i32(length), i32(0, rows), 1.0, 2500, True
        )
        total = None
        for span in range(0, length, 1024):
            in_span = None
            for chunk in range(span, min(span + 1024, length), 256):
                seen = v[max(chunk, begin) : chunk + 256, 0]
                if len(seen):
                    o = torch.zeros(dim)
                    for value in seen:
                        o = o + value
                    in_span = o if in_span is None else in_span + o
            if in_span is not None:
                total = in_span if total is None else total + in_span
        assert torch.equal(out[-1], total / 2500)


class TestNothingElseIsRead:
    def test_row_39_nan_padding(self):
        """`paged` leaves NaN wherever no sequence wrote, also in the rest of the last page."""
        for page_size in (16, 300):
            args = paged(CPU, [5, 250, 257], [3, 1, 2], page_size=page_size)
            assert torch.isnan(args[1]).any()
            assert torch.isnan(args[2]).any()
            check(args, 0.125, 0, False)

    def test_stale_rejected_rows(self):
        """Rows beyond `lengths` hold a rejected proposal: NaN there changes no bit."""
        q, k, v, table, _, starts = paged(CPU, [40], [2])
        clean = ops.block_attention(q, k, v, table, i32(30), starts, 0.125, 0, False)
        flat = table[0].long()[torch.arange(30, 40) // 16] * 16 + torch.arange(30, 40) % 16
        for cache in (k, v):
            cache.view(-1, 64)[flat] = float("nan")
        assert torch.equal(
            ops.block_attention(q, k, v, table, i32(30), starts, 0.125, 0, False), clean
        )

    @pytest.mark.parametrize("window, causal", [(0, True), (8, True), (8, False)])
    @pytest.mark.parametrize("heads", [1, 2, 4])
    def test_hidden_keys(self, window, causal, heads):
        """Each row's hidden keys turn NaN, those of its own block included."""
        args = paged(CPU, [290], [12], heads=heads, page_size=290)
        clean = ops.block_attention(*args, 0.125, window, causal)
        for i in range(12):
            q, k, v, table, lengths, starts = args
            k, v = k.clone(), v.clone()
            page = int(table[0, 0])
            hidden = [p for p in range(290) if not reference.visible(278 + i, p, window, causal)]
            k[page, hidden] = v[page, hidden] = float("nan")
            out = ops.block_attention(q, k, v, table, lengths, starts, 0.125, window, causal)
            assert torch.equal(out[i], clean[i])

    def test_pages_outside_the_window_may_be_gone(self):
        args = list(paged(CPU, [600], [2]))
        clean = ops.block_attention(*args, 0.125, 64, True)
        args[3] = args[3].clone()
        args[3][0, : (598 - 63) // 16] = -1
        assert torch.equal(ops.block_attention(*args, 0.125, 64, True), clean)


class TestRowIndependence:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("window", [0, 8, 300])
    @pytest.mark.parametrize("heads, kv_heads, dim", [(2, 1, 256), (6, 2, 40), (1, 1, 64)])
    def test_block_rows_equal_lone_rows(self, dtype, window, heads, kv_heads, dim):
        for length in (7, 256, 259, 1030):
            n = 7
            shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype}
            args = paged(CPU, [length], [n], **shape)
            sinks, gate = torch.randn(heads), torch.randn(n, heads, dim)
            block = ops.block_attention(*args, 0.1, window, True, sinks, gate)
            q, k, v, table = args[:4]
            for i in range(n):
                alone = ops.block_attention(
                    q[i : i + 1],
                    k,
                    v,
                    table,
                    i32(length - n + i + 1),
                    i32(0, 1),
                    0.1,
                    window,
                    True,
                    sinks,
                    gate[i : i + 1],
                )
                assert torch.equal(block[i], alone[0])

    @pytest.mark.parametrize("causal", [True, False])
    def test_other_sequences_pages_and_capacity_change_nothing(self, causal):
        g = torch.Generator().manual_seed(5)
        lengths, rows = [300, 1, 1029, 64, 9], [4, 1, 3, 8, 2]
        dense = [[torch.randn(n, 2, 64, generator=g) for n in lengths] for _ in range(2)]
        queries = [torch.randn(n, 4, 64, generator=g) for n in rows]

        def run(order, page_size, spare, seed):
            k, v, table = place(
                [dense[0][s] for s in order],
                [dense[1][s] for s in order],
                page_size,
                spare=spare,
                seed=seed,
            )
            out = ops.block_attention(
                torch.cat([queries[s] for s in order]),
                k,
                v,
                table,
                i32(*(lengths[s] for s in order)),
                torch.tensor([0, *(rows[s] for s in order)]).cumsum(0).int(),
                0.125,
                0,
                causal,
            )
            return dict(zip(order, out.split([rows[s] for s in order]), strict=True))

        together = run([0, 1, 2, 3, 4], 16, 0, 0)
        for order, page_size, spare, seed in [
            ([4, 2, 0, 3, 1], 1, 0, 1),
            ([3, 1], 300, 2, 2),
            *(([s], 7, 5, 3) for s in range(5)),
        ]:
            for s, out in run(order, page_size, spare, seed).items():
                assert torch.equal(out, together[s])

    def test_threads(self, restore_threads):
        # one row's chunks are shared out, a block's queries, both, and sequences
        for lengths, rows in [
            ([1500], [1]),
            ([100], [8]),
            ([300], [8]),
            ([1500, 3, 400], [3, 1, 5]),
        ]:
            args = paged(CPU, lengths, rows, heads=4, kv_heads=2)
            outs = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                outs.append(ops.block_attention(*args, 0.125, 0, True))
            assert torch.equal(outs[0], outs[1])
            assert torch.equal(outs[0], outs[2])

    def test_both_instruction_sets_give_the_same_bits(self):
        assert output_under("avx2", __file__).strip() == digest()


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def digest():
    """Hash of outputs of many shapes, on this process's instruction set."""
    outs = []
    for dim in (16, 40, 64, 128, 256):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            args = paged(CPU, [3, 260, 1100], [3, 2, 5], heads=6, kv_heads=2, dim=dim, dtype=dtype)
            outs.append(ops.block_attention(*args, 0.1, 0, True, torch.ones(6), args[0]))
            outs.append(ops.block_attention(*args, 0.1, 8, False))
    assert not any(torch.isnan(o).any() for o in outs)
    return hashlib.sha256(b"".join(o.numpy().tobytes() for o in outs)).hexdigest()


class TestErrors:
    def args(self, **changes):
        names = ["q", "k_cache", "v_cache", "page_table", "lengths", "cu_seqlens"]
        args = dict(zip(names, paged(CPU, [20, 20], [2, 2]), strict=True))
        return args | {"scale": 0.1, "window": 0, "causal": True} | changes

    @pytest.mark.parametrize(
        "changes, message",
        [
            (
                {"q": torch.zeros(4, 128)},
                r"q must be \[rows, heads, head_dim\], got shape \[4, 128",
            ),
            ({"q": torch.zeros(4, 2, 64).double()}, "q must have dtype Float, got Double"),
            ({"q": torch.zeros(4, 64, 2).mT}, "q must be contiguous"),
            ({"q": torch.zeros(4, 2, 32)}, "k_cache must be .*32.*, got shape"),
            ({"k_cache": torch.zeros(3, 16, 64)}, "k_cache must be .pages, page_size"),
            ({"k_cache": torch.zeros(5, 16, 3, 64)}, "v_cache must be .* like k_cache"),
            ({"k_cache": torch.zeros(5, 16, 1, 64).half()}, "v_cache must have dtype Half"),
            ({"v_cache": torch.zeros(5, 16, 1, 64).int()}, "v_cache must have dtype Float"),
            ({"page_table": torch.zeros(2, 2)}, "page_table must have dtype Int"),
            ({"page_table": i32(0, 0)}, r"page_table must be \[sequences, pages of one\]"),
            (
                {"page_table": i32(1, 9, 2, 3).view(2, 2)},
                r"page_table\[0, 1\] must be 0 .. 4, got 9",
            ),
            ({"lengths": i32(20)}, r"lengths must be \[sequences\] = \[2\], got shape \[1\]"),
            ({"lengths": i32(20, 33)}, r"lengths\[1\] must be 0 or 2 .* 32 .*, got 33"),
            ({"lengths": i32(1, 20)}, r"lengths\[0\] must be 0 or 2 .*, got 1"),
            ({"cu_seqlens": i32(0, 2)}, r"cu_seqlens must be \[sequences \+ 1\] = \[3\]"),
            ({"cu_seqlens": i32(0, 2, 3)}, "cu_seqlens must run from 0 to the 4 rows of q"),
            ({"cu_seqlens": i32(0, 5, 4)}, "cu_seqlens must not fall, got 5 then 4"),
            ({"scale": float("nan")}, "scale must be finite, got nan"),
            ({"window": -1}, r"window must be >= 0 \(0: none\), got -1"),
            ({"sinks": torch.zeros(3)}, r"sinks must be \[heads\] = \[2\], got shape \[3\]"),
            ({"gate": torch.zeros(4, 2, 32)}, "gate must be .* like q"),
            ({"gate": torch.zeros(4, 64, 2).mT}, "gate must be dense in its last dimension"),
            ({"gate": torch.zeros(4, 2, 64).half()}, "gate must have dtype Float, got Half"),
            ({"value_scale": float("inf")}, "value_scale must be finite, got inf"),
        ],
    )
    def test_says_what_is_wrong(self, changes, message):
        with pytest.raises(RuntimeError, match="dflash::block_attention: " + message):
            ops.block_attention(**self.args(**changes))

    def test_act_mode_is_checked(self):
        with pytest.raises(RuntimeError, match=r"act_mode must be 0 .float32., 1 .*, got 3"):
            ops.block_attention(**self.args(act_mode=3))

    def test_heads_must_divide(self):
        with pytest.raises(RuntimeError, match="multiple of the cache's 2 heads, got 3"):
            ops.block_attention(*paged(CPU, [4], [1], heads=3, kv_heads=2), 0.1, 0, True)


if __name__ == "__main__":
    print(digest())
