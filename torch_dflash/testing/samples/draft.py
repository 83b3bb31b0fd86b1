"""Samples of the drafters' own operators; the oracles are the float64 references."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops import quant_geometry, quantize, repack, unpack
from ...reference import draft as reference
from .. import operator
from .act import _quant_act
from .quant import gguf_dequantize, random_packed
from .sampling import on_cpu

Args = tuple[Any, ...]
F32, F16, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 8, 12, 14, 30


def float_codebook(values: Tensor, ggml_type: int) -> Tensor:
    """GGUF bytes of a matrix in a float type."""
    dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[ggml_type]
    return values.to(dtype).contiguous().view(torch.uint8)


@on_cpu
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
        ((3, 5), 512, 2, 32),
    ]:
        rows = sum(lengths)
        x = torch.randn(rows, columns, generator=g)
        coef = torch.randn(rows, 2 * taps * groups, generator=g)
        base = torch.randn(2, taps, columns, generator=g)
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        for side in (0, 1):
            yield x.to(device), coef.to(device), base.to(device), side, cu.to(device), 0


@on_cpu
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
        (3, 7, 16, 256, (Q8_0, Q8_0)),
        (1, 2, 3, 544, (F32, Q8_0)),
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


def _markov_chain(*args: Any) -> Any:
    base, w1, w1_type, w2, w2_type = (args[i] for i in (0, 3, 4, 5, 6))
    values, nbytes = quant_geometry(w1_type)
    # on its own device, whose layout it has
    rank = w1.shape[1] // nbytes * values
    args = (*args[:5], unpack(w2, w2_type, base.shape[2], rank), *args[6:])
    if len(args) > 15 and args[15]:
        head, joint, joint_type = args[15:18]
        inputs = args[1].shape[2] + (rank if head == 1 else 2 * rank)
        rows = unpack(joint, joint_type, rank if head == 1 else 3 * rank, inputs)
        args = (*args[:16], rows, *args[17:])
    return _markov_chain_of_rows(*args)


@on_cpu
def _markov_chain_of_rows(
    base: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w1_type: int,
    w2: Tensor,
    w2_type: int,
    confidence_weight: Tensor | None,
    confidence_bias: Tensor | None,
    logit_scale: float,
    d2t: Tensor | None,
    temperature: Tensor | None,
    uniform: Tensor | None,
    mask_id: int = -1,
    draft_topk: int = 0,
    head_type: int = 0,
    joint: Tensor | None = None,
    joint_type: int = 0,
    joint_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    table = gguf_dequantize(w1, w1_type)
    head = gguf_dequantize(w2, w2_type)
    tokens, q, confidence = reference.markov_chain(
        base,
        hidden,
        anchor,
        table,
        head,
        confidence_weight,
        confidence_bias,
        logit_scale,
        d2t,
        temperature,
        uniform,
        mask_id,
        draft_topk,
        head_type,
        None if joint is None else gguf_dequantize(joint, joint_type),
        joint_bias,
    )
    none = torch.empty(0)
    return (
        tokens,
        none if temperature is None else q.float(),
        none if confidence_weight is None else confidence.float(),
    )


@operator("markov_chain", oracle=_markov_chain)
def markov_chain(device: torch.device) -> Iterator[Args]:
    g = torch.Generator().manual_seed(7)
    for sequences, slots, rank, types, sampled, reduced, inputs, head, options in [
        (0, 3, 8, (F32, F32), True, False, None, 0, ()),
        (1, 1, 1, (F16, F32), False, False, "both", 0, ()),
        (3, 4, 10, (BF16, BF16), True, True, "both", 0, (7,)),
        (2, 5, 64, (Q8_0, Q8_0), False, False, "hidden", 0, (3, 6)),
        (2, 7, 256, (Q8_0, Q4_K), True, True, None, 0, (-1, 9)),
        (3, 4, 10, (BF16, F32), True, True, "both", 1, (7, 0)),
        (0, 2, 8, (F32, F32), False, False, None, 2, (-1, 0)),
        (2, 7, 12, (F32, F16), False, False, "both", 2, (-1, 0)),
        (2, 6, 32, (Q8_0, F32), True, False, None, 1, (-1, 5)),
        (3, 6, 32, (F32, Q8_0), True, True, "both", 2, (-1, 0)),
        (2, 3, 8, (F32, F32), False, False, "both", 0, (4, 0)),
    ]:
        vocab = 9000 if rank == 8 and slots == 3 and sequences else 50
        hidden_size = 32 if head else 24
        draft_vocab = 33 if reduced else vocab
        packed = []
        for ggml_type, rows in zip(types, (vocab, draft_vocab), strict=True):
            values, nbytes = quant_geometry(ggml_type)
            if values == 1:
                table = float_codebook(torch.randn(rows, rank, generator=g) / 3, ggml_type)
            else:
                table = random_packed(ggml_type, rows, rank // values, g)
                # Small scales, 2^-9 and 2^-12: the planes of w1's row are good to 2^-16 of its
                # largest value, and the oracle does not pack.
                halves = table.view(-1, nbytes)
                halves[:, 1] = 0x0C if head == 2 else 0x18  # a tanh is larger than a row of w1
                if ggml_type == Q4_K:
                    halves[:, 1] = halves[:, 3] = 0x0C
            packed.append(table)
        w2 = repack(packed[1].to(device), types[1], rank)
        weight = bias = d2t = temperature = uniform = None
        if inputs:
            width = hidden_size + (rank if inputs == "both" else 0)
            weight, bias = torch.randn(width, generator=g) / 4, torch.randn(1, generator=g)
        if reduced:
            d2t = torch.randperm(vocab, generator=g)[:draft_vocab].sort().values
        if sampled:
            temperature = torch.tensor([0.0, 0.7, 1.0])[-sequences:][:sequences]
            uniform = torch.rand(sequences, slots, generator=g)
        tensors = (
            torch.randn(sequences, slots, draft_vocab, generator=g),
            torch.randn(sequences, slots, hidden_size, generator=g),
            torch.randint(0, vocab, (sequences,), generator=g),
            packed[0],
        )
        heads: Args = ()
        if head:
            shape = (rank, hidden_size + rank) if head == 1 else (3 * rank, 2 * rank + hidden_size)
            kind = Q8_0 if rank == 32 else F32  # small, as above
            plain = torch.randn(shape, generator=g) / (1024 if kind == Q8_0 else 4)
            joint = plain.view(torch.uint8) if kind == F32 else quantize(plain, Q8_0)
            packed_joint = repack(joint.to(device), kind, shape[1])
            heads = (head, packed_joint, kind, torch.randn(shape[0], generator=g))
        optional = (weight, bias, 0.7, d2t, temperature, uniform, *options, *heads)
        yield (
            *(t.to(device) for t in tensors),
            types[0],
            w2,
            types[1],
            *(t.to(device) if isinstance(t, Tensor) else t for t in optional),
        )
