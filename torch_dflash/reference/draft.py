"""The drafters' own operators as equations, in float64; weights come as plain matrices.

Sources: the grouped convolution and the selector of z-lab's DFlash2, the Markov chain and the
confidence head of DSpark.
"""

import torch
from torch import Tensor

from .sampling import categorical, sampling_probs

__all__ = ["grouped_conv", "markov_chain", "selector_walk"]


def grouped_conv(x: Tensor, coef: Tensor, base: Tensor, side: int, cu_seqlens: Tensor) -> Tensor:
    """``y_i = sum over t of (base[t] + coef_i[t]) x_{i-t}``, never across a block boundary."""
    _, taps, columns = base.shape
    groups = coef.shape[1] // (2 * taps)
    dynamic = coef.double().view(-1, 2, taps, groups)[:, side]
    weight = base.double()[side] + dynamic.repeat_interleave(columns // groups, dim=-1)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for first, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for i in range(first, end):
            for t in range(min(taps, i - first + 1)):
                out[i] += weight[i, t] * x[i - t].double()
    return out


def _choose(scores: Tensor, temperature: Tensor, u: Tensor) -> tuple[int, Tensor]:
    """Index of one of the scores, and the distribution it was drawn from."""
    off = torch.tensor([0]), torch.tensor([1.0])
    q = sampling_probs(scores[None], temperature.view(1), *off)
    return int(categorical(q, u.view(1)) if temperature > 0 else q.argmax()), q[0]


def selector_walk(
    ids: Tensor,
    scores: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    temperature: Tensor,
    u: Tensor,
) -> tuple[Tensor, Tensor]:
    """``score_c + sum over r of A[pred]_r g_r B[c]_r``, slot by slot along the chosen path."""
    tokens = torch.zeros(ids.shape[:2], dtype=torch.int64)
    q = torch.zeros(scores.shape, dtype=torch.float64)
    for s in range(ids.shape[0]):
        previous = int(anchor[s])
        for j in range(ids.shape[1]):
            met = predecessor[previous].double() * hidden[s, j].double()
            total = scores[s, j].double() + successor[ids[s, j]].double() @ met
            k, q[s, j] = _choose(total, temperature[s], u[s, j])
            previous = int(ids[s, j, k])
            tokens[s, j] = previous
    return tokens, q


def markov_chain(
    base: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    confidence_weight: Tensor | None,
    confidence_bias: Tensor | None,
    logit_scale: float,
    d2t: Tensor | None,
    temperature: Tensor | None,
    u: Tensor | None,
    mask_id: int = -1,
    draft_topk: int = 0,
    head_type: int = 0,
    joint: Tensor | None = None,
    joint_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``z = logit_scale (base + w2 r)``, slot by slot; confidence from ``[h; w1[prev]]``.

    r is ``w1[prev]``; in a gated head (1) ``sigmoid(J [h; w1[prev]] + b) * w1[prev]``; in a
    recurrent one (2) the output of a cell over ``[state; w1[prev]; h]``.
    """
    sequences, slots, vocab = base.shape
    tokens = torch.zeros(sequences, slots, dtype=torch.int64)
    q = torch.zeros(base.shape, dtype=torch.float64)
    confidence = torch.zeros(sequences, slots, dtype=torch.float64)
    targets = torch.arange(vocab) if d2t is None else d2t
    greedy = torch.zeros(1)
    for s in range(sequences):
        previous = int(anchor[s])
        state = torch.zeros(w1.shape[1], dtype=torch.float64)
        for j in range(slots):
            e = w1[previous].double()
            row, h = e, hidden[s, j].double()
            bias = 0 if joint_bias is None else joint_bias.double()
            if head_type == 1 and joint is not None:
                row = torch.sigmoid(joint.double() @ torch.cat([h, e]) + bias) * e
            if head_type == 2 and joint is not None:
                gate, new, out = (joint.double() @ torch.cat([state, e, h]) + bias).chunk(3)
                gate = torch.sigmoid(gate)
                state = gate * state + (1 - gate) * torch.tanh(new)
                row = torch.tanh(out)
            z = logit_scale * (base[s, j].double() + w2.double() @ row)
            if draft_topk:
                order = torch.sort(base[s, j], descending=True, stable=True).indices
                z[order[draft_topk:]] = -torch.inf
            z[targets == mask_id] = -torch.inf
            draw = greedy if u is None else u[s, j]
            k, q[s, j] = _choose(z, greedy if temperature is None else temperature[s], draw)
            if confidence_weight is not None:
                weight = confidence_weight.double().flatten()
                features = torch.cat([h, e])[: len(weight)]
                bias = 0 if confidence_bias is None else confidence_bias.double()
                confidence[s, j] = torch.sigmoid(features @ weight + bias)
            previous = int(targets[k])
            tokens[s, j] = previous
    return tokens, q, confidence
