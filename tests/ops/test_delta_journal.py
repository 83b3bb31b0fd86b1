"""gdn_journal_step, gdn_commit, gdn_prefill: the bits of plain decoding by other ways."""

import numpy
import pytest
import torch

from torch_dflash import ops
from torch_dflash.reference.delta import delta_rule, gates
from torch_dflash.testing.child import run_and_written
from torch_dflash.testing.delta import DeltaLayer, ints, starts

F32, BF16 = torch.float32, torch.bfloat16


def poison_stale(journal, slot, parity, accepted):
    """What a correct step never reads: rejected rows, and the journal it is about to write."""
    for j in journal:
        j[parity, slot, accepted:] = torch.nan
        j[1 - parity, slot] = torch.nan


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "shape",
    [{}, {"dk": 20, "dv": 6, "nk": 1, "nv": 3, "tiled": False}, {"dv": 128, "nk": 1, "nv": 3}],
)
def test_random_rounds_equal_snapshots_and_plain_decoding(device, dtype, shape):
    rows = 6
    layer = DeltaLayer(rows, device, **shape)
    g = torch.Generator().manual_seed(1)
    journal = layer.journal(3, rows)
    replayed = layer.state(3, dtype)
    snapshots = torch.cat([replayed[:1], replayed[2:].repeat(rows, 1, 1, 1)])
    plain = replayed.clone()
    slots = [list(range(1, rows + 1))]
    parity, accepted, last = 0, 0, 1
    for round_ in range(200):
        n = int(torch.randint(1, rows + 1, (), generator=g))
        kept = int(torch.randint(0, n + 1, (), generator=g))
        if round_ < 2 * rows:  # every pair (all right, all wrong) at least once
            n, kept = 1 + round_ % rows, (1 + round_ % rows) * (round_ // rows)
        mixed = layer.inputs["mixed"]
        mixed.copy_(torch.randn(mixed.shape, generator=g))
        poison_stale(journal, 2, parity, accepted)
        some = slice(0, n)
        out = layer.journal_step(replayed, journal, [2], [n], [accepted], [parity], some)
        parity, accepted = 1 - parity, kept
        expected = layer.step(snapshots, slots, [n], [last], some)
        if kept > 0:
            last = kept
            plain_out, states = layer.one_by_one(plain, 2, range(kept))
            assert torch.equal(out[:kept], plain_out)
            assert torch.equal(snapshots[last], states[-1])
        else:  # nothing of the block stays: go on from where it started
            snapshots[1] = plain[2]
            last = 1
        assert torch.equal(out, expected)
        committed = replayed.clone()
        layer.commit(committed, journal, [2], [accepted], [parity])
        assert torch.equal(committed[2], plain[2])
    assert torch.isfinite(plain[2]).all()


@pytest.mark.parametrize("accepted", range(8))
def test_replay_equals_the_snapshot(device, accepted):
    layer = DeltaLayer(7, device)
    state = layer.state(10)
    before = state.clone()
    journal = layer.journal(10, 7)
    layer.journal_step(state, journal, [9], [7], [0], [0])
    assert torch.equal(state[1:], before[1:])  # nothing to replay: the base state stays
    poison = [j[1, 9, accepted:].fill_(torch.nan) for j in journal]
    assert len(poison) == 3
    layer.commit(state, journal, [9], [accepted], [1])
    snapshots = before.clone()
    snapshots[1] = before[9]
    layer.step(snapshots, [list(range(1, 8))], [7])
    assert torch.equal(state[9], snapshots[accepted] if accepted else before[9])
    # and committing twice is the same as once, with nothing left to replay
    once = state.clone()
    layer.commit(state, journal, [9], [0], [1])
    assert torch.equal(state[1:], once[1:])


def test_a_step_after_a_commit_equals_a_step_that_replays(device):
    layer = DeltaLayer(10, device)
    state = layer.state(4)
    journal = layer.journal(4, 5)
    layer.journal_step(state, journal, [1], [5], [0], [0], slice(0, 5))
    committed, other = state.clone(), tuple(j.clone() for j in journal)
    out = layer.journal_step(state, journal, [1], [5], [3], [1], slice(5, 10))
    layer.commit(committed, other, [1], [3], [1])
    again = layer.journal_step(committed, other, [1], [5], [0], [1], slice(5, 10))
    assert torch.equal(again, out)
    assert torch.equal(committed[1], state[1])
    for mine, theirs in zip(journal, other, strict=True):
        assert torch.equal(mine[0, 1], theirs[0, 1])


@pytest.mark.parametrize("act_mode", [0, 1, 2])
@pytest.mark.parametrize("dv", [16, 128])
def test_sequences_do_not_see_each_other(device, act_mode, dv):
    lengths, accepted, parity = [1, 4, 0, 2, 3], [4, 0, 2, 1, 3], [0, 1, 0, 1, 1]
    slots = [3, 5, 1, -1, 2]
    layer = DeltaLayer(sum(lengths) + 2, device, nv=6, dv=dv)
    g = torch.Generator().manual_seed(5)
    journal = tuple(torch.rand(j.shape, generator=g).to(device) for j in layer.journal(6, 4))
    state = layer.state(6)
    before = (state.clone(), *(j.clone() for j in journal))
    out = layer.journal_step(state, journal, slots, lengths, accepted, parity, act_mode=act_mode)
    for s, n in enumerate(lengths):
        first = sum(lengths[:s])
        mine = before[0].clone()
        own = tuple(torch.full_like(j, torch.nan) for j in journal)
        if slots[s] > 0:
            for j, source in zip(own, before[1:], strict=True):
                at = (parity[s], slots[s], slice(0, accepted[s]))
                j[at] = source[at]
        args = ([slots[s]], [n], [accepted[s]], [parity[s]], slice(first, first + n))
        y = layer.journal_step(mine, own, *args, act_mode=act_mode)
        assert torch.equal(y, out[first : first + n])
        if slots[s] > 0:
            assert torch.equal(mine[slots[s]], state[slots[s]])
            for j, all_of_them in zip(own, journal, strict=True):
                at = (1 - parity[s], slots[s], slice(0, n))
                assert torch.equal(j[at], all_of_them[at])
    # the skipped one and the padding are zero rows; the empty one and free slots are untouched
    if act_mode == 0:
        assert torch.equal(out[5:7], torch.zeros_like(out[5:7]))
        assert torch.equal(out[10:], torch.zeros_like(out[10:]))
    for slot in (1, 4):
        assert torch.equal(state[slot], before[0][slot])
        for j, source in zip(journal, before[1:], strict=True):
            assert torch.equal(j[:, slot], source[:, slot])


@pytest.mark.parametrize("shape", [{"dv": 40}, {"dv": 128}, {"dv": 128, "nk": 1, "nv": 3}])
def test_a_journal_step_packs_like_quant_act(device, shape):
    layer = DeltaLayer(5, device, **shape)
    state, journal = layer.state(3), layer.journal(3, 5)
    args = ([1], [5], [0], [0])
    out = layer.journal_step(state.clone(), journal, *args)
    for act_mode in (1, 2):
        packed = layer.journal_step(state.clone(), journal, *args, act_mode=act_mode)
        assert torch.equal(packed, ops.quant_act(out, act_mode))


def fold(products):
    """The last dimension (up to 128) summed as core/reduce.h does it."""
    lanes = torch.zeros(*products.shape[:-1], 128, device=products.device)
    lanes[..., : products.shape[-1]] = products
    lanes = lanes.unflatten(-1, (32, 4))
    lanes = (lanes[..., 0] + lanes[..., 1]) + (lanes[..., 2] + lanes[..., 3])
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def rsqrt(x):  # numpy's square root is IEEE's; torch's is 1 ulp off now and then
    return torch.from_numpy(numpy.float32(1) / numpy.sqrt(x.cpu().numpy())).to(x.device)


@pytest.mark.parametrize("dk", [128, 100, 24])
def test_the_formula_bit_by_bit(device, dk):
    layer = DeltaLayer(1, device, nk=1, nv=3, dk=dk, dv=11, norm=False)
    layer.inputs["b"].zero_()  # strength 1/2, exactly
    state, journal = layer.state(2), layer.journal(2, 1)
    before = state[1].clone()
    out = layer.journal_step(state, journal, [1], [1], [0], [0])[0].view(3, 11)
    layer.commit(state, journal, [1], [1], [1])
    q, k, v = layer.inputs["mixed"][0].split([dk, dk, 33])
    q = q * rsqrt(fold(q * q)[None] + 1e-6) * rsqrt(torch.tensor([float(dk)], device=device))
    k = k * rsqrt(fold(k * k)[None] + 1e-6)
    g = journal[2][1, 1, 0]

    def fma(a, b, c):  # a float64 holds the product of two float32 exactly
        return (a.double() * b.double() + c.double()).float()

    u = fma(-g[:, None], fold(before * k), v.view(3, 11)) * 0.5
    after = fma(k, u[..., None], g[:, None, None] * before)
    assert torch.equal(journal[0][1, 1, 0, 0], k)
    assert torch.equal(journal[1][1, 1, 0], u)
    assert torch.equal(state[1], after)
    assert torch.equal(out, fold(after * q))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dv", [16, 128])
@pytest.mark.parametrize("lengths", [[1, 0, 15], [16, 17, 1], [40, 3, 33]])
def test_prefill_gives_the_bits_of_single_rows(device, dtype, dv, lengths):
    if device.type != "cpu":
        pytest.skip("a GPU prefill may take other sums")
    layer = DeltaLayer(sum(lengths) + 1, device, dv=dv)
    state = layer.state(5, dtype)
    state[2] = torch.nan  # the last sequence starts from zeros
    plain = state.clone()
    plain[2] = 0.0
    out = layer.prefill(state, [4, 1, 2], lengths, [1, 1, 0])
    for s, slot in enumerate([4, 1, 2]):
        first = sum(lengths[:s])
        rows = range(first, first + lengths[s])
        if len(rows):
            expected, _ = layer.one_by_one(plain, slot, rows)
            assert torch.equal(out[rows.start : rows.stop], expected)
        assert torch.equal(state[slot], plain[slot])
    assert torch.equal(out[-1], torch.zeros_like(out[-1]))
    assert torch.equal(state[3], plain[3])


def test_row_36_a_decode_step_goes_on_from_the_prefill(device):
    layer = DeltaLayer(40, device)
    state = layer.state(3)
    whole = state.clone()
    out = layer.prefill(whole, [1], [40], [0])
    parts = [
        layer.prefill(state, [1], [5], [0], slice(0, 5)),
        layer.prefill(state, [1], [34], [1], slice(5, 39)),
        layer.step(state, [[1]], [1], rows=slice(39, 40)),
    ]
    if device.type == "cpu":
        assert torch.equal(torch.cat(parts), out)
        assert torch.equal(state[1], whole[1])
    else:
        torch.testing.assert_close(torch.cat(parts), out, rtol=2e-5, atol=2e-5)


def test_prefill_stays_near_float64(device):
    rows = 600
    layer = DeltaLayer(rows, device, dv=12, norm=False)
    layer.inputs["A"] *= 0.05  # decays near 1: errors would pile up
    state = layer.state(2)
    start = state[1].clone()
    out = layer.prefill(state, [1], [rows], [1])
    mixed, a, b, A, dt_bias = (layer.inputs[n] for n in ("mixed", "a", "b", "A", "dt_bias"))
    q, k = (mixed[:, i * 256 : (i + 1) * 256].unflatten(1, (2, 128)) for i in (0, 1))
    expected, states = delta_rule(
        q, k, mixed[:, 512:].unflatten(1, (4, 12)), *gates(a, b, A, dt_bias), start, tiled=True
    )

    def nmse(x, y):
        return ((x.double() - y).pow(2).sum() / y.pow(2).sum()).item()

    assert nmse(state[1], states[-1]) <= 1e-9
    assert nmse(out, expected.flatten(1)) <= 1e-9


def test_a_skipped_prefill_touches_nothing(device):
    layer = DeltaLayer(3, device)
    state = layer.state(3)
    before = state.clone()
    out = layer.prefill(state, [0, 2], [2, 1], [1, 0])
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(state[1], before[1])
    assert not torch.equal(state[2], before[2])


def test_threads_and_instruction_sets_give_the_same_bits():
    layer = DeltaLayer(20, nk=1, nv=2, dv=30)
    for dtype in (F32, BF16):
        state, journal = layer.state(4, dtype), layer.journal(4, 9)
        layer.journal_step(state, journal, [1, 3], [9, 8], [0, 0], [0, 0], slice(0, 17))
        before = (state, *journal)
        args = ([1, 3], [9, 8], [7, 2], [1, 1], slice(3, 20))
        mine = tuple(t.clone() for t in before)
        out = layer.journal_step(mine[0], mine[1:], *args)
        threads = torch.get_num_threads()
        for other in (1, 2, 5):
            torch.set_num_threads(other)
            again = tuple(t.clone() for t in before)
            assert torch.equal(layer.journal_step(again[0], again[1:], *args), out)
            for x, y in zip(again, mine, strict=True):
                assert torch.equal(x[:, 1:].nan_to_num(7), y[:, 1:].nan_to_num(7))
        torch.set_num_threads(threads)
        numbers = (ints(1, 3), ints(7, 2), ints(1, 1))
        result, left = run_and_written(
            "avx2",
            "gdn_journal_step",
            *layer.arguments(slice(3, 20)),
            state,
            *numbers,
            *journal,
            starts([9, 8]),
            0,
        )
        assert torch.equal(result, out)
        for i, tensor in zip((12, 16, 17, 18), mine, strict=True):
            assert torch.equal(left[i].nan_to_num(7), tensor.nan_to_num(7))


def journal_arguments():
    layer = DeltaLayer(3, nk=2, nv=4, dk=8, dv=4)
    names = [*layer.inputs, *layer.heads, "tiled"]
    jk, ju, jdecay = layer.journal(6, 5)
    rest = {
        "state": layer.state(6),
        "slots": ints(1, 2),
        "num_accepted": ints(1, 0),
        "parity": ints(0, 1),
        "journal_k": jk,
        "journal_u": ju,
        "journal_decay": jdecay,
        "cu_seqlens": ints(0, 1, 3),
        "act_mode": 0,
    }
    return {**dict(zip(names, layer.arguments(), strict=True)), **rest}


SHARED_ERRORS = [
    ({"slots": ints(1)}, r"(slots|num_accepted) must be \[sequences\] = \[\d\], got shape"),
    ({"slots": torch.tensor([1, 2])}, r"slots must have dtype Int, got Long"),
    ({"slots": ints(1, 6)}, r"slots must be below state's slots, 6, got 6 at 1"),
    ({"num_accepted": ints(1)}, r"num_accepted must be \[sequences\] = \[2\]"),
    ({"num_accepted": ints(1, -1)}, r"num_accepted must be 0 to 5, the journal's rows, got -1"),
    ({"num_accepted": ints(6, 0)}, r"num_accepted must be 0 to 5, the journal's rows, got 6"),
    ({"parity": ints(0, 2)}, r"parity must be 0 or 1, got 2 at 1"),
    ({"parity": ints(0)}, r"parity must be \[sequences\] = \[2\]"),
    ({"journal_k": torch.zeros(2, 6, 5, 16)}, r"journal_k must be \[2, slots, journal rows, k_h"),
    ({"journal_k": torch.zeros(2, 6, 5, 2, 9)}, r"journal_k must be .* = \[2, 6, 5, 2, 8\], got"),
    ({"journal_u": torch.zeros(2, 6, 4, 4, 4)}, r"journal_u must be .* = \[2, 6, 5, 4, 4\], got"),
    ({"journal_u": torch.zeros(2, 6, 5, 4, 4).half()}, r"journal_u must have dtype Float"),
    ({"journal_decay": torch.zeros(2, 6, 5, 2)}, r"journal_decay must be .* = \[2, 6, 5, 4\]"),
    ({"journal_decay": torch.zeros(2, 6, 4, 5).mT}, r"journal_decay must be contiguous"),
    ({"state": torch.zeros(6, 4, 4, 8).half()}, r"state must have dtype Float or BFloat16"),
    ({"state": torch.zeros(4, 4, 8)}, r"state must be \[slots, v_heads, v_dim, k_dim\], got"),
]


@pytest.mark.parametrize(
    "change, message",
    [
        *SHARED_ERRORS,
        ({"cu_seqlens": ints(0, 3)}, r"slots must be \[sequences\] = \[1\], got shape \[2\]"),
        ({"cu_seqlens": ints(0, 1, 4)}, r"cu_seqlens must ascend to at most 3 rows"),
        (
            {
                "journal_k": torch.zeros(2, 6, 1, 2, 8),
                "journal_u": torch.zeros(2, 6, 1, 4, 4),
                "journal_decay": torch.zeros(2, 6, 1, 4),
            },
            r"the journal must hold the 2 rows of sequence 1, got 1 journal rows",
        ),
    ],
)
def test_wrong_arguments_of_a_journal_step_are_named(change, message):
    with pytest.raises(RuntimeError, match=f"dflash::gdn_journal_step: .*{message}"):
        ops.gdn_journal_step(**{**journal_arguments(), **change})


@pytest.mark.parametrize("change, message", SHARED_ERRORS)
def test_wrong_arguments_of_a_commit_are_named(change, message):
    args = {**journal_arguments(), **change}
    names = ("state", "slots", "num_accepted", "parity", "journal_k", "journal_u")
    with pytest.raises(RuntimeError, match=f"dflash::gdn_commit: .*({message}|must be a multiple)"):
        ops.gdn_commit(*(args[n] for n in names), args["journal_decay"], True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": ints(1)}, r"slots must be \[sequences\] = \[2\], got shape \[1\]"),
        ({"slots": ints(1, 6)}, r"slots must be below state's slots, 6, got 6 at 1"),
        ({"has_state": ints(1)}, r"has_state must be \[sequences\] = \[2\], got shape"),
        ({"has_state": torch.ones(2, dtype=torch.bool)}, r"has_state must have dtype Int, got Bo"),
        ({"cu_seqlens": ints(0, 2, 1)}, r"cu_seqlens must ascend to at most 3 rows"),
        ({"act_mode": 5}, r"act_mode must be 0 \(float32\), 1"),
    ],
)
def test_wrong_arguments_of_a_prefill_are_named(change, message):
    args = journal_arguments()
    for name in ("num_accepted", "parity", "journal_k", "journal_u", "journal_decay"):
        del args[name]
    args["has_state"] = ints(1, 0)
    with pytest.raises(RuntimeError, match=message):
        ops.gdn_prefill(**{**args, **change})
