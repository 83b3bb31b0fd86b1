"""gdn_step: fixtures, one row or many, and every way in which rows could disturb each other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torch_dflash import ops
from torch_dflash.testing.child import run_and_written
from torch_dflash.testing.delta import DeltaLayer, ints, starts

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("case", range(5))
def test_transformers(fixtures, device, case):
    f = {k: v.to(device) for k, v in load_file(fixtures / f"gdn/step_{case}.safetensors").items()}
    rows, nk, dk = f["k"].shape
    nv, dv = f["v"].shape[1:]
    state = torch.full((rows + 2, nv, dv, dk), torch.nan, device=device)
    state[1] = f["state_in"].mT
    out = ops.gdn_step(
        torch.cat([f[n].flatten(1) for n in "qkv"], 1),
        f["a"],
        f["b"],
        -f["A_log"].exp(),
        f["dt_bias"],
        None,
        None,
        1e-6,
        False,
        nk,
        dk,
        False,  # Hugging Face order
        state,
        # one accepted row before: it starts from column 0, which row 0 then writes
        ints([1, *range(2, rows + 1)], device=device),
        None,
        ints(0, rows, device=device),
        0,
    )
    torch.testing.assert_close(out, f["out"].flatten(1), rtol=0, atol=5e-6)
    torch.testing.assert_close(state[1 : rows + 1], f["states"].mT, rtol=0, atol=5e-6)


def test_transformers_gated_norm(fixtures, device):
    f = {k: v.to(device) for k, v in load_file(fixtures / "gdn/gated_norm.safetensors").items()}
    rows, dv = f["x"].shape
    # zero state, k^ = q^ = 1, strength 1: the head's output is v
    key = torch.full((rows, 1), 1000.0, device=device)
    full = torch.full((rows, 1), 100.0, device=device)
    one = torch.ones(1, device=device)
    out = ops.gdn_step(
        torch.cat([key, key, f["x"]], 1),
        full,
        full,
        -one,
        one,
        f["gate"],
        f["weight"],
        1e-6,
        False,
        1,
        1,
        True,
        torch.zeros(2, 1, dv, 1, device=device),
        ints(*[[1]] * rows, device=device),
        None,
        ints(*range(rows + 1), device=device),
        0,
    )
    torch.testing.assert_close(out, f["out"], rtol=0, atol=5e-6)


SHAPES = [
    {"dk": 128},
    {"dk": 8, "dv": 8, "nk": 3, "nv": 3},
    {"dk": 100, "dv": 5, "norm": False},
    {"dk": 256, "dv": 7, "nk": 1, "nv": 3, "tiled": False, "sigmoid_gate": True},
    {"dv": 128, "nk": 1, "nv": 3},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_a_block_gives_the_bits_of_its_rows(device, shape, dtype, rows):
    layer = DeltaLayer(rows, device, **shape)
    state = layer.state(rows + 2, dtype)
    plain = state.clone()
    slots = list(range(1, rows + 1))
    out = layer.step(state, [[*slots[1:], slots[0]] if rows > 1 else [1]], [rows], [rows])
    expected, states = layer.one_by_one(plain, 1, range(rows))
    assert torch.equal(out, expected)
    assert torch.equal(torch.cat([state[2 : rows + 1], state[1:2]]), states)
    assert torch.equal(state[rows + 1], plain[rows + 1])


def test_a_bfloat16_state_is_rounded_after_every_row(device):
    layer = DeltaLayer(6, device, norm=False)
    state = layer.state(8, BF16)
    wide = state.float()
    layer.step(state, [[1, 2, 3, 4, 5, 6]], [6])
    for t in range(6):  # a float32 row, rounded by hand
        layer.step(wide, [[1]], [1], rows=slice(t, t + 1))
        wide[1] = wide[1].to(BF16).float()
        assert torch.equal(state[t + 1].float(), wide[1])


@pytest.mark.parametrize("sigmoid_gate", [False, True])
@pytest.mark.parametrize("dv", [24, 128])
def test_the_fused_norm_equals_the_separate_one(device, sigmoid_gate, dv):
    plain = DeltaLayer(9, device, dv=dv, norm=False)
    fused = DeltaLayer(9, device, dv=dv, sigmoid_gate=sigmoid_gate)
    o = plain.step(plain.state(12), [list(range(1, 10))], [9])
    y = fused.step(fused.state(12), [list(range(1, 10))], [9])
    z, weight = fused.inputs["z"], fused.inputs["norm_weight"]
    normed = ops.add_rms_norm(None, o.reshape(-1, dv), weight, 1e-6, False, 0).view_as(o)
    # a convolution whose only tap is the row itself is silu(z)
    only = torch.tensor([[0.0, 1.0]], device=device).expand(z.shape[1], 2).contiguous()
    window = torch.zeros(2, 9, z.shape[1], device=device)
    one = ints(1, device=device)
    silu = ops.ssm_conv_step(z, window, only, None, True, one, None, starts([9], device))
    if sigmoid_gate:  # sigmoid has no operator of its own: 1 / (1 + e) to 2 ulp
        torch.testing.assert_close(y, normed * z.double().sigmoid().float(), rtol=3e-7, atol=0)
    else:
        assert torch.equal(y, normed * silu)


@pytest.mark.parametrize("act_mode", [0, 1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_does_not_see_the_others(device, act_mode, dtype):
    lengths = list(range(1, 18))
    rows = sum(lengths)
    layer = DeltaLayer(rows, device)
    slots = [[1 + s * 17 + t for t in range(17)] for s in range(17)]
    before = layer.state(1 + 17 * 17, dtype)
    state = before.clone()
    accepted = [1 + (5 * s) % 17 for s in range(17)]
    out = layer.step(state, slots, lengths, accepted, act_mode=act_mode)
    for s, n in enumerate(lengths):
        first = sum(lengths[:s])
        alone = before.clone()
        args = slice(first, first + n)
        y = layer.step(alone, [slots[s]], [n], [accepted[s]], args, act_mode)
        assert torch.equal(y, out[args])
        assert torch.equal(alone[slots[s]], state[slots[s]])
    # NaN everywhere else, the sequences in another order and in other slots
    s, n = 6, lengths[6]
    first = sum(lengths[:s])
    layer.inputs["mixed"][:first] = torch.nan
    layer.inputs["mixed"][first + n :] = torch.nan
    poisoned = torch.full_like(before, torch.nan)
    start = slots[s][accepted[s] - 1]
    poisoned[start] = before[start]
    assert torch.equal(
        layer.step(poisoned, slots, lengths, accepted, act_mode=act_mode)[first : first + n],
        out[first : first + n],
    )


def test_the_order_of_sequences_and_slots_is_free(device):
    layer = DeltaLayer(9, device)
    state = layer.state(12)
    other = state.flip(0).clone()
    out = layer.step(state, [[1, 2, 3, 4], [5, 6, 7, 8]], [4, 4], [2, 4])
    rows = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3], device=device)
    flipped = [[11 - s for s in (5, 6, 7, 8)], [11 - s for s in (1, 2, 3, 4)]]
    again = layer.step(other, flipped, [4, 4], [4, 2], rows=rows)
    assert torch.equal(again, out[rows])
    assert torch.equal(other.flip(0)[1:9], state[1:9])


def test_tiled_and_grouped_heads_are_a_permutation(device):
    tiled = DeltaLayer(3, device, nk=2, nv=6, dv=8)
    order = [rho * 2 + kappa for kappa in range(2) for rho in range(3)]  # grouped from tiled
    grouped = DeltaLayer(3, device, nk=2, nv=6, dv=8, tiled=False)
    state = tiled.state(5)
    for name in ("a", "b"):
        grouped.inputs[name] = tiled.inputs[name][:, order].contiguous()
    for name in ("A", "dt_bias"):
        grouped.inputs[name] = tiled.inputs[name][order].contiguous()
    keys = 2 * 2 * 128
    values = tiled.inputs["mixed"][:, keys:].unflatten(1, (6, 8))[:, order].flatten(1)
    grouped.inputs["mixed"] = torch.cat([tiled.inputs["mixed"][:, :keys], values], 1)
    grouped.inputs["z"] = tiled.inputs["z"].unflatten(1, (6, 8))[:, order].flatten(1)
    mine = state[:, order].contiguous()
    y = grouped.step(mine, [[1, 2, 3]], [3])
    expected = tiled.step(state, [[1, 2, 3]], [3])
    assert torch.equal(y, expected.unflatten(1, (6, 8))[:, order].flatten(1))
    assert torch.equal(mine[1:4], state[1:4][:, order])


def test_a_null_slot_is_neither_read_nor_written(device):
    layer = DeltaLayer(6, device)
    state = layer.state(6)
    before = state.clone()
    # row 1 of the first sequence has no slot; the second one has nowhere to start from
    out = layer.step(state, [[1, 0, 2], [-1, 3, 4]], [3, 2], [1, 1])
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))  # its rows, and one of padding
    assert torch.equal(state[3:], before[3:])
    assert state[0].isnan().all()
    expected, states = layer.one_by_one(before.clone(), 1, range(3))
    assert torch.equal(out[:3], expected)
    assert torch.equal(state[1:3], states[[0, 2]])


def test_a_start_without_a_slot_skips_the_block_only_there(device):
    layer = DeltaLayer(2, device)
    state = layer.state(4)
    before = state.clone()
    out = layer.step(state, [[1, 0]], [2], [2])
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(state[1:], before[1:])


def test_padding_rows_are_zero_and_empty_sequences_untouched(device):
    layer = DeltaLayer(5, device)
    layer.inputs["mixed"][3:] = torch.nan
    state = layer.state(6)
    before = state.clone()
    out = layer.step(state, [[1, 2], [3, 4], [5, 5]], [1, 0, 2])
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))
    assert torch.equal(state[3:5], before[3:5])
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("accepted", [None, [1], [0], [-7]])
def test_num_accepted_counts_from_one(device, accepted):
    layer = DeltaLayer(2, device)
    state = layer.state(4)
    other = state.clone()
    assert torch.equal(
        layer.step(state, [[1, 2]], [2], accepted), layer.step(other, [[1, 2]], [2], [1])
    )
    assert torch.equal(state[1:], other[1:])


def test_row_35_the_start_may_be_among_the_slots_written(device):
    layer = DeltaLayer(4, device, dv=9)
    state = layer.state(12)
    apart = state.clone()
    apart[9] = apart[3]
    expected = layer.step(apart, [[5, 6, 7, 8, 9]], [4], [5])
    for start in range(4):  # each row in turn overwrites the state the block started from
        slots = [5, 6, 7, 8]
        slots[start] = 3
        mine = state.clone()
        out = layer.step(mine, [slots], [4], [start + 1])
        assert torch.equal(out, expected)
        for t in range(4):
            assert torch.equal(mine[slots[t]], apart[5 + t])
        again = state.clone()
        assert torch.equal(layer.step(again, [slots], [4], [start + 1]), out)
        assert torch.equal(again[1:], mine[1:])


def test_row_32_every_rejection_point_continues_like_plain_decoding(device):
    rows = 7
    layer = DeltaLayer(2 * rows, device)
    state = layer.state(20)
    for kept in range(1, rows + 1):
        spec = state.clone()
        layer.step(spec, [list(range(1, rows + 1))], [rows])
        spec[list(range(kept + 1, rows + 1))] = torch.nan  # the rejected states
        out = layer.step(spec, [list(range(1, rows + 1))], [rows], [kept], slice(rows, 2 * rows))
        plain = state.clone()
        layer.one_by_one(plain, 1, range(kept))
        expected, states = layer.one_by_one(plain, 1, range(rows, 2 * rows))
        assert torch.equal(out, expected)
        assert torch.equal(spec[1 : rows + 1], states)


def test_row_33_plain_steps_between_speculative_ones(device):
    layer = DeltaLayer(16, device)
    state = layer.state(8)
    plain = state.clone()
    slots = [[1, 2, 3, 4, 5]]
    out = [
        layer.step(state, slots, [5], [1], slice(0, 5)),
        layer.step(state, slots, [1], [3], slice(5, 6)),  # 3 rows of the first were accepted
        layer.step(state, slots, [1], [1], slice(6, 7)),
        layer.step(state, slots, [4], [1], slice(7, 11)),
        layer.step(state, slots, [1], [4], slice(11, 12)),
    ]
    expected, states = layer.one_by_one(plain, 1, [0, 1, 2, *range(5, 12)])
    out[0] = out[0][:3]
    assert torch.equal(torch.cat(out), expected)
    assert torch.equal(state[1], states[-1])


@pytest.mark.parametrize("form", ["step", "journal", "prefill"])
def test_row_22_softplus_threshold(device, form):
    # state 1, strength 0: the new state is the decay itself
    a = torch.tensor([[19.9, 20.1, 25.0, 90.0, 1e4, -30.0]], device=device)
    rows, nv = 1, 6
    layer = DeltaLayer(rows, device, nk=1, nv=nv, dk=4, dv=3, norm=False)
    layer.inputs.update(
        a=a,
        b=torch.full_like(a, -200.0),
        A=torch.full((nv,), -0.03125, device=device),
        dt_bias=torch.zeros(nv, device=device),
    )
    state = torch.ones(2, nv, 3, 4, device=device)
    if form == "step":
        layer.step(state, [[1]], [1])
    elif form == "prefill":
        layer.prefill(state, [1], [1], [1])
    else:
        journal = layer.journal(2, 1)
        layer.journal_step(state, journal, [1], [1], [0], [0])
        layer.commit(state, journal, [1], [1], [1])
    softplus = torch.where(a > 20, a.double(), torch.log1p(a.double().exp()))
    expected = (-0.03125 * softplus).exp().float()[0][:, None, None].expand(nv, 3, 4)
    torch.testing.assert_close(state[1], expected, rtol=3e-7, atol=0)
    assert state[1, 2, 0, 0] == torch.tensor(-25 / 32).double().exp().float()


def test_extreme_gates_keys_and_queries(device):
    layer = DeltaLayer(8, device, nk=1, nv=1, dk=64, dv=8, norm=False)
    mixed, a, b = (layer.inputs[n] for n in ("mixed", "a", "b"))
    layer.inputs["A"].fill_(-1.0)
    layer.inputs["dt_bias"].zero_()
    a[0], b[0] = 200.0, 200.0  # forget everything, write everything
    a[1], b[1] = -200.0, -200.0  # keep everything, write nothing
    mixed[2, 64:128] = 0.0  # k = 0 writes nothing
    mixed[3, :64] = 0.0  # q = 0 reads nothing
    mixed[4, :64] *= 1e15
    mixed[5, 64:128] *= 1e-15
    mixed[6, :128] = torch.finfo(F32).max  # the sum of squares overflows: length 0, as in float32
    b[7] = 0.0
    state = layer.state(10)
    out = layer.step(state, [list(range(1, 9))], [8])
    assert torch.isfinite(out).all()
    k = mixed[0, 64:128] / (mixed[0, 64:128].pow(2).sum() + 1e-6).sqrt()
    torch.testing.assert_close(state[1, 0], torch.outer(mixed[0, 128:], k), rtol=1e-5, atol=1e-6)
    assert torch.equal(state[2], state[1])
    decay = torch.sigmoid(-a[2, 0].double()).float()  # exp(-softplus(a))
    torch.testing.assert_close(state[3], state[2] * decay, rtol=3e-7, atol=0)
    assert torch.equal(out[3], torch.zeros_like(out[3]))
    assert torch.equal(out[6], torch.zeros_like(out[6]))
    torch.testing.assert_close(
        out[4] * 8, state[5, 0] @ (mixed[4, :64] / mixed[4, :64].norm()), rtol=1e-5, atol=1e-5
    )


def test_a_slot_may_be_part_of_a_larger_page(device):
    layer = DeltaLayer(3, device)
    state = layer.state(5)
    page = torch.full((5, state[0].numel() + 24), torch.nan, device=device)
    view = page[:, :-24].unflatten(1, state.shape[1:])
    view.copy_(state)
    out = layer.step(view, [[1, 2, 3]], [3], [2])
    assert torch.equal(out, layer.step(state, [[1, 2, 3]], [3], [2]))
    assert torch.equal(view[1:], state[1:])
    assert page[:, -24:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_inputs_of_sixteen_bits_and_strides_are_widened_exactly(device, dtype):
    layer = DeltaLayer(5, device, dv=10)
    names = ("mixed", "a", "b", "z")
    for name in names:
        layer.inputs[name] = layer.inputs[name].to(dtype)
    state = layer.state(7)
    other = state.clone()
    out = layer.step(state, [list(range(1, 6))], [5])
    for name in names:
        columns = layer.inputs[name].shape[1]
        stacked = torch.full((5, columns + 7), torch.nan, device=device)
        stacked[:, 3 : 3 + columns] = layer.inputs[name].float()
        layer.inputs[name] = stacked[:, 3 : 3 + columns]
    assert torch.equal(layer.step(other, [list(range(1, 6))], [5]), out)
    assert torch.equal(other[1:], state[1:])


@pytest.mark.parametrize("dv", [16, 130])
@pytest.mark.parametrize("nv", [1, 4])
def test_threads_and_instruction_sets_give_the_same_bits(nv, dv):
    layer = DeltaLayer(18, nk=1, nv=nv, dv=dv)
    for dtype in (F32, BF16):
        before = layer.state(40, dtype)
        indices = [[1 + 17 * s + t for t in range(17)] for s in range(2)]
        state = before.clone()
        out = layer.step(state, indices, [17, 1], [3, 2])
        threads = torch.get_num_threads()
        for other in (1, 2, 5):  # 5 threads: the rows of a head are cut
            torch.set_num_threads(other)
            again = before.clone()
            assert torch.equal(layer.step(again, indices, [17, 1], [3, 2]), out)
            assert torch.equal(again[1:], state[1:])
        torch.set_num_threads(threads)
        for isa in ("avx2", "avx512"):
            if isa == "avx512" and "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
                continue
            args = (before, ints(*indices), ints(3, 2), starts([17, 1]), 0)
            result, left = run_and_written(isa, "gdn_step", *layer.arguments(), *args)
            assert torch.equal(result, out)
            assert torch.equal(left[12][1:], state[1:])


def arguments():
    layer = DeltaLayer(3, nk=2, nv=4, dk=8, dv=4)
    names = [*layer.inputs, *layer.heads, "tiled"]
    rest = {
        "state": layer.state(6),
        "state_indices": ints([1, 2], [3, 4]),
        "num_accepted": ints(1, 2),
        "cu_seqlens": ints(0, 1, 3),
        "act_mode": 0,
    }
    return {**dict(zip(names, layer.arguments(), strict=True)), **rest}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mixed": torch.zeros(3, 47)}, r"mixed must be \[rows, 2 \* k_heads .* = \[3, 48\], got"),
        ({"mixed": torch.zeros(48)}, r"mixed must be \[rows, q \| k \| v\], got shape \[48\]"),
        ({"mixed": torch.zeros(3, 48).double()}, r"mixed must have dtype"),
        ({"mixed": torch.zeros(48, 3).t()}, r"mixed must be contiguous in its last dimensions"),
        ({"a": torch.zeros(3, 2)}, r"a must be \[rows, v_heads\] = \[3, 4\], got shape \[3, 2\]"),
        ({"b": torch.zeros(2, 4)}, r"b must be \[rows, v_heads\] = \[3, 4\], got shape \[2, 4\]"),
        ({"b": torch.zeros(3, 4).long()}, r"b must have dtype"),
        ({"A": torch.zeros(4, 1)}, r"A must be \[v_heads\], got shape \[4, 1\]"),
        ({"A": torch.zeros(4).half()}, r"A must have dtype Float, got Half"),
        ({"A": torch.zeros(8)[::2]}, r"A must be contiguous"),
        ({"A": torch.zeros(3)}, r"v heads must be a multiple of 2 k heads, got 3"),
        ({"dt_bias": torch.zeros(2)}, r"dt_bias must be \[v_heads\] = \[4\], got shape \[2\]"),
        ({"z": None}, r"z and norm_weight must come together, got only norm_weight"),
        ({"norm_weight": None}, r"z and norm_weight must come together, got only z"),
        ({"z": torch.zeros(3, 4)}, r"z must be \[rows, v_heads \* v_dim\] = \[3, 16\], got"),
        ({"norm_weight": torch.zeros(8)}, r"norm_weight must be \[v_dim\] = \[4\], got shape"),
        ({"k_heads": 0}, r"k_heads must be positive, got 0"),
        ({"k_heads": 3}, r"v heads must be a multiple of 3 k heads, got 4"),
        ({"k_dim": 192}, r"k_dim must be 1 to 128 or 256, got 192"),
        ({"k_dim": 16}, r"state must be \[slots, v_heads, v_dim, k_dim\] = \[6, 4, 4, 16\], got"),
        ({"state": torch.zeros(6, 4, 32)}, r"state must be \[slots, v_heads, v_dim, k_dim\], got"),
        ({"state": torch.zeros(6, 4, 4, 8).half()}, r"state must have dtype Float or BFloat16"),
        ({"state": torch.zeros(6, 4, 8, 4).mT}, r"state must be contiguous in its last dimens"),
        ({"state_indices": ints(1, 2)}, r"state_indices must be \[sequences, columns\], got"),
        ({"state_indices": ints([1, 2])}, r"state_indices must be .* = \[2, 2\], got shape"),
        ({"state_indices": torch.tensor([[1, 2], [3, 4]])}, r"state_indices must have dtype Int"),
        ({"state_indices": ints([1, 2], [3, 6])}, r"state_indices must be below .* 6, got 6 at 3"),
        ({"state_indices": ints([1], [3])}, r"state_indices must have a column for each of the 2"),
        ({"num_accepted": ints(1)}, r"num_accepted must be \[sequences\] = \[2\], got shape"),
        ({"num_accepted": ints(1, 3)}, r"num_accepted must be at most 2, the columns"),
        ({"cu_seqlens": ints(0, 1)}, r"state_indices must be .* = \[1, 2\], got shape \[2, 2\]"),
        ({"cu_seqlens": ints(0, 2, 1)}, r"cu_seqlens must ascend to at most 3 rows"),
        ({"cu_seqlens": ints(0, 1, 4)}, r"cu_seqlens must ascend to at most 3 rows"),
        ({"act_mode": 3}, r"act_mode must be 0 \(float32\), 1"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.gdn_step(**{**arguments(), **change})
