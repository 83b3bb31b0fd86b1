"""qk_norm_rope_store against float64, the reference cases, and the cache it writes."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from torch_dflash import ops
from torch_dflash.reference import rope as reference
from torch_dflash.testing.child import output_under

FIXTURES = Path(os.environ.get("DFLASH_FIXTURES", Path(__file__).parents[3] / "shared/fixtures"))


def caches(rows=64, kv_heads=1, dim=256, dtype=torch.float32):
    return [torch.full((rows // 4, 4, kv_heads, dim), -7.0, dtype=dtype) for _ in range(2)]


def call(q, k, v, k_cache, v_cache, *, positions, inv_freq, slots=None, **more):
    slots = torch.arange(len(k)) if slots is None else slots
    options = {
        "q_weight": None,
        "k_weight": None,
        "eps": 1e-6,
        "plus_one": False,
        "attention_scaling": 1.0,
        "sections": [],
    } | more
    return ops.qk_norm_rope_store(
        q,
        k,
        v,
        positions=positions,
        inv_freq=inv_freq,
        slots=slots,
        k_cache=k_cache,
        v_cache=v_cache,
        **options,
    )


def turned(positions, inv_freq, scaling=1.0):
    """cos and sin as the operator sees them: a head that holds (1, 0) in every pair."""
    rows, half = len(positions), len(inv_freq)
    q = torch.cat([torch.ones(rows, 1, half), torch.zeros(rows, 1, half)], -1)
    k_cache, v_cache = caches(4 * rows, 1, 2 * half)
    out = call(
        q,
        q,
        q,
        k_cache,
        v_cache,
        positions=positions,
        inv_freq=inv_freq,
        attention_scaling=scaling,
    )
    assert torch.equal(k_cache.flatten(0, 1)[:rows], out)  # q and k turn alike
    assert torch.equal(v_cache.flatten(0, 1)[:rows], q)
    return out[:, 0].split(half, dim=-1)


class TestAngles:
    def test_reference_cases(self):
        if not (FIXTURES / "rope").is_dir():
            pytest.skip(f"no reference cases in {FIXTURES}; set DFLASH_FIXTURES")
        load_file = pytest.importorskip("safetensors.torch").load_file
        data = load_file(FIXTURES / "rope/rope.safetensors")
        cases = json.loads((FIXTURES / "rope/rope.json").read_text())
        assert len(cases) == 10
        for case in cases:
            inv_freq, scaling = data[case["key"] + ".inv_freq"], case["attention_scaling"]
            got = turned(data["positions"], inv_freq, scaling)
            angle = data["positions"][:, None].double() * inv_freq.double()
            tolerance = scaling * (2e-6 + 2.4e-7 * angle)  # of the fixtures' README
            for mine, name in zip(got, ("cos", "sin"), strict=True):
                error = (mine.double() - data[f"{case['key']}.{name}"].double()).abs()
                assert (error <= tolerance).all()

    def test_row_3_far_positions(self):
        """Up to 2^21 - 1 the sine of the float32 angle is right to 2 ulp of 1 (numeric.h: about 1,
        and one more for the product with attention_scaling)."""
        g = torch.Generator().manual_seed(0)
        positions = torch.cat(
            [
                torch.tensor([0, 1, 20000, 65535, 65536, 262143, 2**20, 2**21 - 1]),
                torch.randint(0, 2**21, (400,), generator=g),
            ]
        )
        inv_freq = (1e7 ** (-torch.arange(32) / 32)).float()
        for scaling in (1.0, 1.3465735902799727):
            cos, sin = turned(positions, inv_freq, scaling)
            angle = reference.angles(positions, inv_freq, [])
            for mine, f in ((cos, torch.cos), (sin, torch.sin)):
                error = (mine.double() - scaling * f(angle)).abs()
                assert error.max() <= 2 * 2**-23 * scaling

    def test_row_52_every_row_turns_by_its_own_position(self):
        """Rows p .. p+n-1 of a block stand at p .. p+n-1, not one earlier."""
        inv_freq = torch.tensor([1.0])
        cos, _ = turned(torch.arange(40, 48), inv_freq)
        assert (
            cos[:, 0].double() - torch.cos(torch.arange(40.0, 48.0).double())
        ).abs().max() < 3e-7
        assert (cos[:, 0].double() - torch.cos(torch.arange(39.0, 47.0).double())).abs().min() > 0.1


class TestSections:
    INV_FREQ = (1e7 ** (-torch.arange(32) / 32)).float()

    @pytest.mark.parametrize("sections", [[11, 11, 10], [11, 11, 10, 0], [20, 6, 6], [32, 0, 0]])
    def test_three_axes_against_float64(self, sections):
        g = torch.Generator().manual_seed(1)
        positions = torch.randint(0, 5000, (3, 6), generator=g)
        q = torch.randn(6, 2, 80, generator=g)
        k_cache, v_cache = caches(8, 2, 80)
        got = call(
            q,
            q,
            q,
            k_cache,
            v_cache,
            positions=positions,
            inv_freq=self.INV_FREQ,
            sections=sections,
        )
        want = reference.rotate(q, reference.angles(positions, self.INV_FREQ, sections), 1.0)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)  # |q| < 5, 2 ulp of 1

    def test_each_frequency_follows_its_axis(self):
        """The published rule, spelled out: t h w t h w .. while the sections last, then t."""
        q = torch.cat([torch.ones(1, 1, 32), torch.zeros(1, 1, 32)], -1)
        for axis, positions in enumerate(torch.eye(3, dtype=torch.int64).view(3, 3, 1)):
            k_cache, v_cache = caches(4, 1, 64)
            out = call(
                q,
                q,
                q,
                k_cache,
                v_cache,
                positions=positions,
                inv_freq=torch.ones(32),
                sections=[11, 11, 10],
            )
            moved = (out[0, 0, 32:] != 0).nonzero().flatten().tolist()
            assert (
                moved == [list(range(0, 32, 3)), list(range(1, 32, 3)), list(range(2, 30, 3))][axis]
            )

    def test_text_equals_one_axis_bit_for_bit(self):
        positions = torch.tensor([0, 5, 300000])
        q = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(2))
        outs = []
        for sections, p in [
            ([], positions),
            ([11, 11, 10], positions),
            ([11, 11, 10, 0], positions.expand(3, -1).contiguous()),
        ]:
            k_cache, v_cache = caches(4, 1, 64)
            outs.append(
                call(
                    q,
                    q,
                    q,
                    k_cache,
                    v_cache,
                    positions=p,
                    inv_freq=self.INV_FREQ,
                    sections=sections,
                )
            )
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


class TestNormAndStore:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("plus_one", [True, False])
    @pytest.mark.parametrize("dim, half", [(256, 32), (128, 64), (24, 5), (16, 0)])
    def test_against_float64(self, dtype, plus_one, dim, half):
        g = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(5, h, dim, generator=g) for h in (4, 2, 2))
        q_weight, k_weight = torch.randn(2, dim, generator=g)
        inv_freq = (1e4 ** (-torch.arange(half) / max(half, 1))).float()
        positions = torch.tensor([0, 3, 7, 1000, 20000])
        slots = torch.tensor([3, 0, -1, 11, 6])
        k_cache, v_cache = caches(12, 2, dim, dtype)
        got = call(
            q,
            k,
            v,
            k_cache,
            v_cache,
            positions=positions,
            inv_freq=inv_freq,
            slots=slots,
            q_weight=q_weight,
            k_weight=k_weight,
            plus_one=plus_one,
            eps=1e-2,
            attention_scaling=1.2,
        )
        angle = reference.angles(positions, inv_freq, [])
        want_q, want_k = (
            reference.rotate(reference.head_norm(x, w, 1e-2, plus_one), angle, 1.2)
            for x, w in ((q, q_weight), (k, k_weight))
        )
        # norm: 5 roundings, rotation: 3 ulp of a value below about 20
        torch.testing.assert_close(got.double(), want_q, rtol=1e-6, atol=4e-6)
        stored = slots >= 0
        step = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
        for cache, want in ((k_cache, want_k), (v_cache, v.double())):
            flat = cache.flatten(0, 1)
            torch.testing.assert_close(
                flat[slots[stored]].double(), want[stored], rtol=1e-6 + step, atol=4e-6
            )
            untouched = [n for n in range(12) if n not in slots]
            assert (flat[untouched] == -7).all()
        assert torch.equal(v_cache.flatten(0, 1)[slots[stored]], v[stored].to(dtype))

    def test_rounds_to_nearest_even(self):
        v = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 1e-8, 1 + 2**-8]).view(
            1, 1, 6
        )
        for dtype in (torch.float16, torch.bfloat16):
            k_cache, v_cache = caches(4, 1, 6, dtype)
            call(v, v, v, k_cache, v_cache, positions=torch.tensor([0]), inv_freq=torch.ones(0))
            assert torch.equal(v_cache[0, 0], v[0].to(dtype))
            assert torch.equal(k_cache[0, 0], v[0].to(dtype))

    def test_keys_without_queries(self):
        g = torch.Generator().manual_seed(4)
        k = torch.randn(3, 1, 64, generator=g)
        options = {
            "positions": torch.arange(3),
            "inv_freq": torch.ones(4),
            "k_weight": torch.ones(64),
        }
        one, two = caches(4, 1, 64), caches(4, 1, 64)
        assert call(None, k, k, *one, **options).shape == (0,)
        call(torch.randn(3, 2, 64), k, k, *two, **options)
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])

    def test_views_of_a_fused_projection(self):
        """q with its gate interleaved, k and v, all views of one stacked output."""
        g = torch.Generator().manual_seed(5)
        fused = torch.randn(3, 2 * 2 * 64 + 2 * 64, generator=g)
        q = fused[:, :256].view(3, 2, 128)[..., :64]
        k, v = fused[:, 256:320].view(3, 1, 64), fused[:, 320:].view(3, 1, 64)
        options = {
            "positions": torch.arange(3),
            "inv_freq": torch.ones(8),
            "q_weight": torch.ones(64),
            "k_weight": torch.ones(64),
        }
        one, two = caches(4, 1, 64), caches(4, 1, 64)
        views = call(q, k, v, *one, **options)
        dense = call(q.contiguous(), k.contiguous(), v.contiguous(), *two, **options)
        assert torch.equal(views, dense)
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])


def run_all(rows):
    """Every output of a fixed input, its first `rows` rows."""
    g = torch.Generator().manual_seed(6)
    outs = []
    for dim, half, dtype in [
        (256, 32, torch.float16),
        (128, 64, torch.bfloat16),
        (40, 9, torch.float32),
    ]:
        q, k, v = (torch.randn(40, h, dim, generator=g) for h in (6, 2, 2))
        weight = torch.randn(dim, generator=g)
        k_cache, v_cache = caches(40, 2, dim, dtype)
        inv_freq = (1e6 ** (-torch.arange(half) / half)).float()
        out = call(
            q[:rows],
            k[:rows],
            v[:rows],
            k_cache,
            v_cache,
            positions=torch.arange(40)[:rows] * 5003,
            inv_freq=inv_freq,
            q_weight=weight,
            k_weight=weight,
            attention_scaling=1.3,
        )
        outs += [out, k_cache.flatten(0, 1)[:rows], v_cache.flatten(0, 1)[:rows]]
    return outs


def digest():
    """Hash of every output, on this process's instruction set."""
    contents = b"".join(o.contiguous().view(torch.uint8).numpy().tobytes() for o in run_all(40))
    return hashlib.sha256(contents).hexdigest()


class TestRowIndependence:
    def test_rows_and_threads(self):
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            whole = run_all(40)
            torch.set_num_threads(1)
            for rows in (1, 2, 7, 40):
                for part, full in zip(run_all(rows), whole, strict=True):
                    assert torch.equal(part, full[:rows])
        finally:
            torch.set_num_threads(threads)

    def test_nan_in_other_rows(self):
        q = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(7))
        options = {
            "positions": torch.arange(3),
            "inv_freq": torch.ones(8),
            "q_weight": torch.ones(64),
        }
        clean = call(q, q, q, *caches(4, 2, 64), **options)
        q[1] = float("nan")
        dirty = call(q, q, q, *caches(4, 2, 64), **options)
        assert torch.equal(dirty[[0, 2]], clean[[0, 2]])

    def test_both_instruction_sets_give_the_same_bits(self):
        assert output_under("avx2", __file__).strip() == digest()


class TestErrors:
    @pytest.mark.parametrize(
        "changes, message",
        [
            (
                {"q": torch.zeros(3, 64)},
                r"q must be \[rows, heads, head_dim\], got shape \[3, 64\]",
            ),
            ({"q": torch.zeros(2, 2, 64)}, "q must be .*, got shape .2, 2, 64"),
            ({"q": torch.zeros(3, 2, 64).half()}, "q must have dtype Float, got Half"),
            ({"q": torch.zeros(3, 64, 2).mT}, "q must be dense in its last dimension"),
            ({"q": None}, "q_weight must be absent without q"),
            ({"k": torch.zeros(3, 64)}, r"k must be \[rows, kv_heads, head_dim\]"),
            ({"k": torch.zeros(3, 1, 64).double()}, "k must have dtype Float, got Double"),
            ({"v": torch.zeros(3, 2, 64)}, "v must be .*, got shape .3, 2, 64"),
            ({"q_weight": torch.zeros(32)}, r"q_weight must be \[head_dim\] = \[64\]"),
            ({"k_weight": torch.zeros(64).half()}, "k_weight must have dtype Float"),
            ({"eps": -1.0}, "eps must be finite and >= 0, got -1"),
            ({"positions": torch.zeros(3)}, "positions must have dtype Long, got Float"),
            ({"positions": torch.zeros(2, 3).long()}, r"positions must be \[3, rows\]"),
            (
                {"positions": torch.zeros(3, 3).long()},
                "positions must be .rows. when sections is emp",
            ),
            (
                {"positions": torch.tensor([0, -1, 0])},
                "positions must be 0 .. .*, got -1 for row 1",
            ),
            (
                {"positions": torch.tensor([0, 0, 2**21])},
                "positions must be .*, got 2097152 for row 2",
            ),
            ({"inv_freq": torch.zeros(33)}, "inv_freq must have at most 32 frequencies .*, got 33"),
            ({"inv_freq": torch.zeros(4).double()}, "inv_freq must have dtype Float"),
            ({"attention_scaling": 0.0}, "attention_scaling must be finite and > 0, got 0"),
            ({"sections": [1, 1]}, "sections must be .temporal, height, width., got 2"),
            ({"sections": [1, 1, 1, 1]}, "sections must be .*a fourth must be 0"),
            ({"sections": [4, -1, 0]}, "sections must not be negative, got -1"),
            (
                {"sections": [0, 4, 4]},
                "sections must interleave within 8 frequencies, got height 4",
            ),
            ({"slots": torch.zeros(2).long()}, r"slots must be \[rows\] = \[3\]"),
            ({"slots": torch.zeros(3).int()}, "slots must have dtype Long, got Int"),
            (
                {"slots": torch.tensor([0, 8, 1])},
                "slots must be below the 8 rows .*, got 8 for row 1",
            ),
            ({"k_cache": torch.zeros(8, 1, 64)}, r"k_cache must be \[pages, page_size"),
            ({"k_cache": torch.zeros(2, 4, 1, 32)}, "k_cache must be .*, got shape .2, 4, 1, 32"),
            ({"v_cache": torch.zeros(2, 4, 1, 64).half()}, "v_cache must have dtype Float"),
            ({"v_cache": torch.zeros(2, 3, 1, 64)}, "v_cache must be .* like k_cache"),
        ],
    )
    def test_says_what_is_wrong(self, changes, message):
        args = {
            "q": torch.zeros(3, 2, 64),
            "k": torch.zeros(3, 1, 64),
            "v": torch.zeros(3, 1, 64),
            "q_weight": torch.ones(64),
            "k_weight": torch.ones(64),
            "eps": 1e-6,
            "plus_one": False,
            "positions": torch.arange(3),
            "inv_freq": torch.ones(8),
            "attention_scaling": 1.0,
            "sections": [],
            "slots": torch.arange(3),
            "k_cache": torch.zeros(2, 4, 1, 64),
            "v_cache": torch.zeros(2, 4, 1, 64),
        }
        with pytest.raises(RuntimeError, match="dflash::qk_norm_rope_store: " + message):
            ops.qk_norm_rope_store(**(args | changes))


if __name__ == "__main__":
    print(digest())
