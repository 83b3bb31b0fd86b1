"""Samples of the drafters' own operators; the oracles are the float64 references."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops import quant_geometry
from ...reference import draft as reference
from .. import operator
from .act import _quant_act
from .quant import gguf_dequantize, random_packed

Args = tuple[Any, ...]
F32, F16, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 8, 12, 14, 30


def float_codebook(values: Tensor, ggml_type: int) -> Tensor:
    """GGUF bytes of a matrix in a float type."""
    dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[ggml_type]
    return values.to(dtype).contiguous().view(torch.uint8)


def _grouped_conv(*args: Any) -> Tensor:
    *arguments, act_mode = args
    return _quant_act(reference.grouped_conv(*arguments).float(), act_mode)


@operator("grouped_conv", oracle=_grouped_conv)
def grouped_conv(device: torch.device) -> Iterator[Args]:
    g = torch.Generator().manual_seed(5)
    for lengths, columns, taps, groups in [
        ((0,), 4, 2, 2),
        ((1,), 1, 1, 1),
        ((3, 0, 5), 48, 2, 3),
        ((8, 2), 40, 3, 40),
        ((2, 1), 300, 4, 1),
    ]:
        rows = sum(lengths)
        x = torch.randn(rows, columns, generator=g)
        coef = torch.randn(rows, 2 * taps * groups, generator=g)
        base = torch.randn(2, taps, columns, generator=g)
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        for side in (0, 1):
            yield x.to(device), coef.to(device), base.to(device), side, cu.to(device), 0


def _selector_walk(
    ids: Tensor,
    scores: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    predecessor_type: int,
    successor: Tensor,
    successor_type: int,
    temperature: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    a = gguf_dequantize(predecessor, predecessor_type)
    b = gguf_dequantize(successor, successor_type)
    tokens, q = reference.selector_walk(ids, scores, hidden, anchor, a, b, temperature, uniform)
    return tokens, q.float()


@operator("selector_walk", oracle=_selector_walk)
def selector_walk(device: torch.device) -> Iterator[Args]:
    g = torch.Generator().manual_seed(6)
    vocab = 40
    for sequences, slots, candidates, rank, types in [
        (0, 3, 2, 4, (F32, F32)),
        (1, 1, 1, 1, (F32, F16)),
        (3, 4, 5, 96, (Q8_0, BF16)),
        (2, 7, 17, 256, (Q8_0, Q8_0)),
    ]:
        tables = []
        for ggml_type in types:
            values, _ = quant_geometry(ggml_type)
            if values == 1:
                table = float_codebook(torch.randn(vocab, rank, generator=g) / 8, ggml_type)
            else:
                table = random_packed(ggml_type, vocab, rank // values, g)
                table.view(-1, 34)[:, 1] = 0x18  # halves of about 2^-9: codes become about 0.2
            tables += [table.to(device), ggml_type]
        ids = torch.rand(sequences, slots, vocab, generator=g).argsort(-1)[..., :candidates]
        scores = torch.randn(sequences, slots, candidates, generator=g)
        hidden = torch.randn(sequences, slots, rank, generator=g) / 4
        anchor = torch.randint(0, vocab, (sequences,), generator=g)
        temperature = torch.tensor([0.0, 0.8, 1.0])[:sequences]
        uniform = torch.rand(sequences, slots, generator=g)
        ids = ids.clone(memory_format=torch.contiguous_format)
        tensors = (ids, scores, hidden, anchor)
        yield (
            *(t.to(device) for t in tensors),
            *tables,
            temperature.to(device),
            uniform.to(device),
        )
