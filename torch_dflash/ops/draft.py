"""The drafters' own operators."""

import torch
from torch import Tensor

from .act import new_activations

__all__ = ["grouped_conv", "markov_chain", "selector_walk"]


def grouped_conv(
    x: Tensor, coef: Tensor, base: Tensor, side: int, cu_seqlens: Tensor, act_mode: int
) -> Tensor:
    r"""Causal convolution along the rows of a block, with a kernel per row and group of channels.

    .. math:: y_{ic} = \sum_{t=0}^{T-1} (b_{tc} + k_{it,\,c / (H / G)})\, x_{i-t,c}

    Taps that would reach in front of the row's own block do not exist; where a block begins is
    said by ``cu_seqlens`` of this call, never by the length the drafter was trained with.

    Args:
        x: ``[rows, columns]`` float32, the rows of all blocks one after the other.
        coef: dynamic part of the kernels ``[rows, 2 * taps * groups]`` float32 (side slowest, group
            fastest); ``columns`` is a multiple of ``groups``.
        base: static part ``[2, taps, columns]`` float32.
        side: 0 for the input of a sublayer, 1 for its output.
        cu_seqlens: ``[sequences + 1]`` int32, first row of every block, and the end.
        act_mode: 0 = float32 output, 1 or 2 = packed as :func:`quant_act` does.

    Returns:
        float32 ``[rows, columns]``, or packed as by :func:`quant_act`.

    Raises:
        RuntimeError: a shape, dtype, layout or mode above does not hold; on CPU also offsets that
            do not rise from 0 to ``rows``.

    Source: z-lab's DFlash2. Formula: ``csrc/core/draft.h``. Backends: CPU, CUDA.
    Not differentiable.

    >>> x, base = torch.ones(4, 1), torch.tensor([[[1.0], [0.5]], [[0.0], [0.0]]])
    >>> cu = torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> grouped_conv(x, torch.zeros(4, 4), base, 0, cu, 0).flatten()
    tensor([1.0000, 1.5000, 1.5000, 1.0000])
    """
    return torch.ops.dflash.grouped_conv.default(x, coef, base, side, cu_seqlens, act_mode)


@torch.library.register_fake("dflash::grouped_conv")
def _(
    x: Tensor, coef: Tensor, base: Tensor, side: int, cu_seqlens: Tensor, act_mode: int
) -> Tensor:
    return new_activations(x, x.shape[0], x.shape[1], act_mode)


def selector_walk(
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
    r"""Walk through the candidates of every slot, each choice conditioning the next.

    .. math:: S_j(c) = u_j(c) + \sum_r A_{\text{pred},r}\, g_{jr}\, B_{c,r}

    where pred is the anchor at slot 0 and then the token chosen before. Temperature 0 takes the
    largest score (the first in the list among equals); otherwise a candidate is drawn from
    :math:`\operatorname{softmax}(S_j / t)`.

    Args:
        ids: candidates ``[sequences, slots, candidates]`` int64, rows of the codebooks.
        scores: their logits, same shape, float32, after multiplier and soft cap.
        hidden: the block's projected hidden rows ``[sequences, slots, rank]`` float32.
        anchor: ``[sequences]`` int64, a row of the codebooks.
        predecessor: codebook A, GGUF bytes ``[vocab, bytes]`` uint8 of ``rank`` values a row.
        predecessor_type: its ggml type id.
        successor: codebook B, as many rows and values.
        successor_type: its ggml type id.
        temperature: ``[sequences]`` float32, >= 0.
        uniform: ``[sequences, slots]`` float32 in [0, 1); not read at temperature 0.

    Returns:
        ``(tokens, q)``: int64 ``[sequences, slots]``, and the distribution over ``ids`` that each
        was drawn from, float32 ``[sequences, slots, candidates]`` (one-hot at temperature 0).

    Raises:
        RuntimeError: a shape, dtype or layout above does not hold; on CPU also an id outside the
            codebooks or a score that is NaN or infinite, named with its place. On a GPU such a
            sequence has the token -1 from there on.

    Source: z-lab's DFlash2. Formula: ``csrc/core/draft.h``. Backends: CPU, CUDA.
    Not differentiable.

    >>> table = torch.eye(2).view(torch.uint8)  # F32 codebooks of rank 2
    >>> ids, scores = torch.tensor([[[0, 1], [0, 1]]]), torch.zeros(1, 2, 2)
    >>> hidden, anchor = torch.ones(1, 2, 2), torch.tensor([1])
    >>> selector_walk(
    ...     ids, scores, hidden, anchor, table, 0, table, 0, torch.zeros(1), torch.zeros(1, 2)
    ... )[0]
    tensor([[1, 1]])
    """
    return torch.ops.dflash.selector_walk.default(
        ids,
        scores,
        hidden,
        anchor,
        predecessor,
        predecessor_type,
        successor,
        successor_type,
        temperature,
        uniform,
    )


@torch.library.register_fake("dflash::selector_walk")
def _(
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
    return ids.new_empty(ids.shape[:2]), torch.empty_like(scores)


def markov_chain(
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
    r"""Choose the tokens of a block one after the other, each conditioning the next.

    .. math::
        z_i = s\,(\text{base}_i + W_2\, r_i), \quad e_i = W_1[\text{prev}_i], \quad
        \text{conf}_i = \sigma(w_c \cdot [h_i; e_i] + b)

    with :math:`r_i = e_i` in the vanilla head,
    :math:`r_i = \sigma(J [h_i; e_i] + b_J) \odot e_i` in the gated one, and in the recurrent one

    .. math::
        (g, c, o) = J [m_i; e_i; h_i] + b_J, \quad
        m_{i+1} = \sigma(g) \odot m_i + (1 - \sigma(g)) \odot \tanh c, \quad
        r_i = \tanh o, \quad m_0 = 0

    where prev is the anchor at slot 0 and then the token chosen before. Temperature 0 takes the
    arg max, the lowest id among equals; otherwise a token is drawn from
    :math:`\operatorname{softmax}(z_i / t)`. The confidence is that the chosen token is accepted if
    all before it were.

    Args:
        base: the head's logits ``[sequences, slots, draft vocab]`` float32, not yet scaled.
        hidden: the block's rows ``[sequences, slots, hidden]`` float32, after the final norm.
        anchor: ``[sequences]`` int64, a target id.
        w1: GGUF bytes ``[vocab, bytes]`` uint8 of ``rank`` values a row, by target id.
        w1_type: its ggml type id.
        w2: ``[draft vocab, rank]`` as :func:`repack` gives it.
        w2_type: its ggml type id. Float types read ``w1``'s row in float32, others packed as
            :func:`quant_act` does.
        confidence_weight: ``[hidden + rank]`` or ``[hidden]`` float32, or None: no head.
        confidence_bias: ``[1]`` float32, or None: 0.
        logit_scale: the factor s of head and chain.
        d2t: target id of every draft id ``[draft vocab]`` int64, or None: they are the same.
        temperature: ``[sequences]`` float32, >= 0; None: all greedy.
        uniform: ``[sequences, slots]`` float32 in [0, 1), not read at temperature 0; None with
            ``temperature``.
        mask_id: a target id that is never proposed; -1 is none.
        draft_topk: propose only the k largest of ``base``; 0 is off.
        head_type: 0 vanilla, 1 gated, 2 recurrent (rnn).
        joint: J as :func:`repack` gives it, ``[rank, hidden + rank]`` of a gated head,
            ``[3 rank, 2 rank + hidden]`` of a recurrent one; None in a vanilla head.
        joint_type: its ggml type id; activations as for ``w2``.
        joint_bias: float32 ``[rows of joint]``, or None: 0.

    Returns:
        ``(tokens, q, confidence)``: target ids int64 ``[sequences, slots]``; the distribution each
        was drawn from, float32 ``[sequences, slots, draft vocab]`` (one-hot at temperature 0), or
        ``[0]`` without ``temperature``; float32 ``[sequences, slots]``, or ``[0]`` without a head.

    Raises:
        RuntimeError: a shape, dtype or layout above does not hold; on CPU also an id outside w1 or
            a logit that is NaN or infinite, named with its place. On a GPU such a sequence has the
            token -1 from there on.

    Source: DSpark, its heads as speculators has them; the top-k is vLLM's ``dspark_draft_topk``.
    Formula: ``csrc/core/draft.h``. Backends: CPU, CUDA. Not differentiable.

    >>> w1, w2 = torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # the other token follows
    >>> from torch_dflash.ops import repack
    >>> packed = repack(w2.view(torch.uint8), 0, 2)
    >>> base, hidden, anchor = torch.zeros(1, 3, 2), torch.zeros(1, 3, 1), torch.tensor([0])
    >>> tables, greedy = (w1.view(torch.uint8), 0, packed, 0), (None, None)
    >>> markov_chain(base, hidden, anchor, *tables, None, None, 1.0, None, *greedy)[0]
    tensor([[1, 0, 1]])
    """
    return torch.ops.dflash.markov_chain.default(
        base,
        hidden,
        anchor,
        w1,
        w1_type,
        w2,
        w2_type,
        confidence_weight,
        confidence_bias,
        logit_scale,
        d2t,
        temperature,
        uniform,
        mask_id,
        draft_topk,
        head_type,
        joint,
        joint_type,
        joint_bias,
    )


@torch.library.register_fake("dflash::markov_chain")
def _(
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
    slots = base.shape[:2]
    q = base.new_empty(0) if temperature is None else torch.empty_like(base)
    confidence = base.new_empty(0 if confidence_weight is None else slots)
    return anchor.new_empty(slots), q, confidence
