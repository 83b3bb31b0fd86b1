"""ssm_conv_step: fixtures, rollback without copies, bits, and what must be refused."""

import pytest
import torch
from safetensors.torch import load_file

from torch_dflash import ops
from torch_dflash.testing.child import run_and_written

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def ints(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths, device="cpu"):
    return ints(0, *torch.tensor(lengths).cumsum(0).tolist(), device=device)


class Conv:
    """One convolution and the state of a few slots; slot 0 is NaN, nobody may read it."""

    def __init__(self, channels, taps, dtype, device, width=20, slots=6, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(channels, taps, generator=g).to(device)
        self.bias = torch.randn(channels, generator=g).to(device)
        self.state = torch.randn(slots, width, channels, generator=g).to(dtype).to(device)
        self.state[0] = torch.nan
        self.device = device

    def __call__(self, x, slots, lengths, accepted=None, silu=True):
        accepted = None if accepted is None else ints(*accepted, device=self.device)
        return ops.ssm_conv_step(
            x,
            self.state,
            self.weight,
            self.bias,
            silu,
            ints(*slots, device=self.device),
            accepted,
            starts(lengths, self.device),
        )


def inputs(rows, channels, device, seed=1):
    return torch.randn(rows, channels, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("at_once", [False, True])
def test_transformers(fixtures, device, case, at_once):
    f = {k: v.to(device) for k, v in load_file(fixtures / f"gdn/conv_{case}.safetensors").items()}
    x, weight = f["x"], f["weight"]
    rows, taps = len(x), weight.shape[1]
    state = torch.full((2, taps - 2 + rows, x.shape[1]), torch.nan, device=device)
    state[1, : taps - 1] = f["state_in"].t()

    def step(first, last, accepted):
        return ops.ssm_conv_step(
            x[first:last],
            state,
            weight,
            None,
            True,
            ints(1, device=device),
            ints(accepted, device=device),
            ints(0, last - first, device=device),
        )

    if at_once:
        out = step(0, rows, 1)
        for t in range(rows):  # the window that starts at t is the state after row t
            assert torch.equal(state[1, t : t + taps - 1], f["states"][t].t())
    else:
        out = torch.empty_like(x)
        for t in range(rows):
            out[t : t + 1] = step(t, t + 1, 1)
            assert torch.equal(state[1, : taps - 1], f["states"][t].t())
    torch.testing.assert_close(out, f["out"], rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("taps", [2, 3, 4, 6])
@pytest.mark.parametrize("channels", [5, 48])
def test_a_block_gives_the_bits_of_its_rows(device, dtype, taps, channels):
    x = inputs(9, channels, device)
    block, single = (Conv(channels, taps, dtype, device) for _ in range(2))
    out = block(x, [2], [9])
    for t in range(9):
        assert torch.equal(single(x[t : t + 1], [2], [1])[0], out[t])
    assert torch.equal(block.state[2, 8 : 8 + taps - 1], single.state[2, : taps - 1])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("taps", [2, 4])
def test_rollback_never_reads_rejected_rows(device, dtype, taps):
    g = torch.Generator().manual_seed(3)
    spec, plain = (Conv(24, taps, dtype, device) for _ in range(2))
    accepted = 1
    for step in range(40):
        n = int(torch.randint(1, 9, (), generator=g))
        keep = int(torch.randint(1, n + 1, (), generator=g))
        x = inputs(n, 24, device, seed=step)
        history = slice(accepted - 1, accepted + taps - 2)
        poisoned = torch.full_like(spec.state[3], torch.nan)
        poisoned[history] = spec.state[3, history]
        spec.state[3] = poisoned
        out = spec(x, [3], [n], [accepted])
        for t in range(keep):
            assert torch.equal(plain(x[t : t + 1], [3], [1])[0], out[t])
        accepted = keep


def test_only_the_columns_of_the_block_are_written(device):
    conv = Conv(16, 4, F32, device)
    before = conv.state.clone()
    conv(inputs(5, 16, device), [2, 4], [2, 3], [4, 2])
    for slot, n, history in [(2, 2, 3), (4, 3, 1)]:
        assert torch.equal(conv.state[slot, :2], before[slot, history + 1 : history + 3])
        assert torch.equal(conv.state[slot, 2 + n :], before[slot, 2 + n :])
    for slot in (1, 3, 5):
        assert torch.equal(conv.state[slot], before[slot])


def test_history_is_rounded_to_the_state_but_the_row_itself_is_not(device):
    x = torch.tensor([[1 + 2**-12], [0.0]], device=device)  # bfloat16 keeps 1
    state = torch.zeros(2, 4, 1, dtype=BF16, device=device)
    weight = torch.tensor([[0.0, 1.0, 1.0]], device=device)
    one, rows = ints(1, device=device), ints(0, 2, device=device)
    out = ops.ssm_conv_step(x, state, weight, None, False, one, None, rows)
    assert out.flatten().tolist() == [1 + 2**-12, 1.0]


def test_the_sum_starts_from_the_bias(device):
    conv = Conv(20, 4, F32, device)
    conv.weight.zero_()
    assert torch.equal(conv(inputs(2, 20, device), [1], [2], silu=False)[1], conv.bias)


@pytest.mark.parametrize("accepted", [None, [1], [0], [-3]])
def test_num_accepted_counts_from_one(device, accepted):
    x = inputs(2, 16, device)
    conv, other = Conv(16, 4, F32, device), Conv(16, 4, F32, device)
    assert torch.equal(conv(x, [1], [2], accepted), other(x, [1], [2], [1]))
    assert torch.equal(conv.state[1], other.state[1])


def test_skipped_empty_and_padded(device):
    conv = Conv(20, 4, F32, device)
    before = conv.state.clone()
    x = inputs(8, 20, device)
    x[:3] = torch.nan  # the skipped sequences
    x[6:] = torch.nan  # the padding
    out = conv(x, [0, -1, 5, 2], [2, 1, 0, 3])
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert torch.equal(out[6:], torch.zeros_like(out[6:]))
    assert torch.equal(out[3:6], Conv(20, 4, F32, device)(x[3:6], [2], [3]))
    assert torch.equal(conv.state[5], before[5])
    assert conv.state[0].isnan().all()


def test_row_59_a_sequence_never_reads_its_neighbour(device):
    lengths = list(range(1, 18))
    x = inputs(sum(lengths), 16, device)
    slots = [17 - s for s in range(17)]
    together = Conv(16, 4, F32, device, slots=18)
    out = together(x, slots, lengths)
    offsets = starts(lengths).tolist()
    for s, n in enumerate(lengths):
        poisoned = torch.full_like(x, torch.nan)
        poisoned[offsets[s] : offsets[s] + n] = x[offsets[s] : offsets[s] + n]
        alone = Conv(16, 4, F32, device, slots=18)
        rows = alone(poisoned, slots, lengths)[offsets[s] : offsets[s] + n]
        assert torch.equal(rows, out[offsets[s] : offsets[s] + n])
        assert torch.equal(alone.state[slots[s]], together.state[slots[s]])


def test_a_slot_may_be_part_of_a_larger_page(device):
    conv, other = Conv(16, 4, BF16, device), Conv(16, 4, BF16, device)
    page = torch.full((6, 20 * 16 + 40), torch.nan, dtype=BF16, device=device)
    page[:, : 20 * 16] = conv.state.flatten(1)
    conv.state = page[:, : 20 * 16].unflatten(1, (20, 16))
    x = inputs(4, 16, device)
    assert torch.equal(conv(x, [3, 1], [1, 3]), other(x, [3, 1], [1, 3]))
    assert torch.equal(conv.state[1:], other.state[1:])
    assert page[:, 20 * 16 :].isnan().all()


def test_threads_and_instruction_sets_give_the_same_bits():
    for dtype in (F32, F16, BF16):
        x = inputs(40, 1000, "cpu").to(dtype)
        conv = Conv(1000, 4, dtype, "cpu", width=40)
        before = conv.state.clone()
        out = conv(x, [1, 3], [33, 7], [2, 5])
        after = conv.state
        threads = torch.get_num_threads()
        for other in (1, 2, 3):
            torch.set_num_threads(other)
            conv.state = before.clone()
            assert torch.equal(conv(x, [1, 3], [33, 7], [2, 5]), out)
            assert torch.equal(conv.state[1:], after[1:])
        torch.set_num_threads(threads)
        args = (ints(1, 3), ints(2, 5), starts([33, 7]))
        result, left = run_and_written(
            "avx2", "ssm_conv_step", x, before, conv.weight, conv.bias, True, *args
        )
        assert torch.equal(result, out)
        assert torch.equal(left[1][1:], after[1:])


def arguments():
    return {
        "x": torch.zeros(3, 8),
        "state": torch.zeros(4, 5, 8),
        "weight": torch.zeros(8, 4),
        "bias": torch.zeros(8),
        "silu": True,
        "slots": ints(1, 2),
        "num_accepted": ints(1, 1),
        "cu_seqlens": ints(0, 1, 3),
    }


def test_row_37_wrong_ranks_and_orders_raise():
    for change in (
        {"x": torch.zeros(1, 3, 8)},
        {"x": torch.zeros(8)},
        {"x": torch.zeros(8, 3)},
        {"weight": torch.zeros(8, 1, 4)},
        {"weight": torch.zeros(4, 8)},
        {"state": torch.zeros(4, 40)},
        {"state": torch.zeros(4, 8, 5)},
    ):
        with pytest.raises(RuntimeError, match=r"dflash::ssm_conv_step: \w+ must be \["):
            ops.ssm_conv_step(**{**arguments(), **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(3, 8, dtype=torch.int32)}, r"x must have dtype"),
        ({"x": torch.zeros(8, 3).t()}, r"x must be contiguous in its last dimensions"),
        ({"state": torch.zeros(4, 5, 8, dtype=torch.float64)}, r"state must have dtype"),
        ({"state": torch.zeros(4, 8, 5).mT}, r"state must be contiguous in its last"),
        ({"state": torch.zeros(4, 2, 8)}, r"state must be at least 3 columns wide, taps - 1"),
        ({"state": torch.zeros(4, 3, 8)}, r"at least 4 columns wide for sequence 1 of 2 rows"),
        ({"weight": torch.zeros(8, 4).half()}, r"weight must have dtype Float, got Half"),
        ({"weight": torch.zeros(8, 1)}, r"weight must have 2 to 16 taps"),
        ({"weight": torch.zeros(8, 17)}, r"weight must have 2 to 16 taps"),
        ({"weight": torch.zeros(4, 8).t()}, r"weight must be contiguous"),
        ({"bias": torch.zeros(7)}, r"bias must be \[channels\] = \[8\], got shape \[7\]"),
        ({"slots": ints(1)}, r"slots must be \[sequences\] = \[2\], got shape \[1\]"),
        ({"slots": torch.tensor([1, 2])}, r"slots must have dtype Int, got Long"),
        ({"slots": ints(1, 4)}, r"slots must be below state's slots, 4, got 4 at 1"),
        ({"num_accepted": ints(1)}, r"num_accepted must be \[sequences\] = \[2\]"),
        ({"num_accepted": ints(1, 4)}, r"num_accepted must be at most 3"),
        ({"num_accepted": ints(1, 2**31 - 1)}, r"num_accepted must be at most 3 .* got 2147483647"),
        ({"cu_seqlens": ints()}, r"cu_seqlens must be \[sequences \+ 1\], got shape \[0\]"),
        ({"cu_seqlens": torch.zeros(1, 3).int()}, r"cu_seqlens must be \[sequences \+ 1\]"),
        ({"cu_seqlens": ints(1, 1, 3)}, r"cu_seqlens must start at 0, got 1"),
        ({"cu_seqlens": ints(0, 2, 1)}, r"cu_seqlens must ascend to at most 3 rows, got 1 after 2"),
        ({"cu_seqlens": ints(0, 1, 4)}, r"cu_seqlens must ascend to at most 3 rows, got 4 after 1"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(RuntimeError, match=rf"dflash::ssm_conv_step: .*{message}"):
        ops.ssm_conv_step(**{**arguments(), **change})
