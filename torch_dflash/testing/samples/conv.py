"""Samples of ssm_conv_step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...reference.conv import causal_conv
from .. import operator


def _ssm_conv_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    slots: Tensor,
    num_accepted: Tensor | None,
    cu_seqlens: Tensor,
) -> Tensor:
    taps = weight.shape[1]
    out = torch.zeros(x.shape, device=x.device)
    for s, slot in enumerate(slots.tolist()):
        begin, end = int(cu_seqlens[s]), int(cu_seqlens[s + 1])
        if slot <= 0 or begin == end:
            continue
        first = 0 if num_accepted is None else max(int(num_accepted[s]), 1) - 1
        history = state[slot, first : first + taps - 1].clone()
        rows = x[begin:end].to(state.dtype)
        for i in range(begin, end):  # the row itself is exact, what it looks back on is rounded
            before = torch.cat([history, rows[: i - begin]])[-(taps - 1) :]
            out[i] = causal_conv(x[i : i + 1], before, weight, bias, silu).float()[0]
        window = torch.cat([history[1:], rows])
        state[slot, : window.shape[0]] = window
    return out


def ints(values: list[Any], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@operator("ssm_conv_step", oracle=_ssm_conv_step)
def ssm_conv_step(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device)

    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for taps, channels, lengths, dtype, state_dtype, accepted in [
        (4, 40, [1], f32, f32, None),
        (4, 32, [3, 0, 1, 5], f32, f32, [1, 4, 2, 0]),
        (3, 17, [2, 7], f16, f16, [3, 1]),
        (2, 5, [4, 1], bf16, bf16, [2, 5]),
        (4, 24, [2, 2], f32, bf16, [1, 2]),
        (7, 16, [1, 9], bf16, f32, [3, 2]),
        (4, 16, [0, 0], f32, f32, None),
    ]:
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        rows = starts[-1] + 2  # two rows of padding
        width = taps - 2 + max(*lengths, 5)
        slots = [3, 1, -1, 2, 4][: len(lengths)]
        yield (
            randn(rows, channels + 8).to(dtype)[:, 4 : 4 + channels],
            randn(5, width, channels).to(state_dtype),
            randn(channels, taps),
            randn(channels) if taps != 4 else None,
            taps != 3,
            ints(slots, device),
            None if accepted is None else ints(accepted, device),
            ints(starts, device),
        )
