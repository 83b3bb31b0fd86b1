"""Sampling and lossless acceptance as equations, in float64.

Sources: top-k and top-p as z-lab's ``dflash`` 0.1.0 applies them; rejection sampling of
arXiv:2211.17192; Philox 4x32-10 of Salmon et al. (SC 2011).
"""

import torch
from torch import Tensor

__all__ = [
    "accept",
    "accept_greedy",
    "accepted_length",
    "categorical",
    "next_distribution",
    "philox4x32_10",
    "sampling_probs",
    "uniform",
]

Words = tuple[int, int, int, int]


def philox4x32_10(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of the Philox counter-based generator on 32-bit words."""
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & word, (a >> 32) ^ c3 ^ k1, a & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """24 random bits of ``(seed; position, stream)`` as a float32 in [0, 1)."""

    def one(seed: int, position: int) -> float:
        seed, position = seed % 2**64, position % 2**64
        counter = (position % 2**32, position >> 32, stream, 0)
        return (philox4x32_10(counter, (seed % 2**32, seed >> 32))[0] >> 8) / 2**24

    pairs = zip(seeds.flatten().tolist(), positions.flatten().tolist(), strict=True)
    values = [one(s, p) for s, p in pairs]
    return torch.tensor(values, dtype=torch.float32).view(seeds.shape)


def sampling_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities of each row after temperature, then top-k, then top-p.

    Ids are ordered by (value descending, id ascending); temperature 0 is a one-hot arg max.
    """
    out = torch.zeros(logits.shape, dtype=torch.float64)
    for r, row in enumerate(logits.double().cpu()):
        by_logit = torch.sort(row, descending=True, stable=True).indices
        if temperature[r] == 0:
            out[r, by_logit[0]] = 1
            continue
        k = int(top_k[r]) or len(row)
        kept = by_logit[:k].sort().values
        probs = torch.softmax(row[kept] / temperature[r].double().cpu(), dim=-1)
        if top_p[r] < 1:
            order = torch.sort(probs, descending=True, stable=True).indices
            before = probs[order].cumsum(0) - probs[order]
            dropped = before >= float(top_p[r])
            dropped[0] = False
            probs[order[dropped]] = 0
            probs = probs / probs.sum()
        out[r, kept] = probs
    return out


def categorical(probs: Tensor, u: Tensor) -> Tensor:
    """The first id whose share of the running sum exceeds ``u``."""
    cumulative = probs.double().cumsum(-1)
    above = cumulative > u.double()[:, None] * cumulative[:, -1:]
    return above.to(torch.int8).argmax(-1)  # the first of equals


def _dense_q(draft: Tensor, vocab: int, i: int, q_ids: Tensor | None, q: Tensor | None) -> Tensor:
    """Distribution ``[vocab]`` that token ``i`` of one sequence was drawn from."""
    dense = torch.zeros(vocab, dtype=torch.float64)
    if q is None:
        dense[draft[i]] = 1
    elif q_ids is None:
        dense += q[i].double()
    else:
        dense.scatter_add_(0, q_ids[i], q[i].double())
    return dense


def accepted_length(
    draft: Tensor,
    offered: int,
    probs: Tensor,
    q_ids: Tensor | None,
    q: Tensor | None,
    u: Tensor,
) -> int:
    """Accepted tokens of one sequence: the longest prefix with ``u q(d) < p(d)``."""
    for i in range(offered):
        if draft[i] < 0:
            return i
        d = draft[i]
        q_d = _dense_q(draft, probs.shape[-1], i, q_ids, q)[d]
        if not u[i].double() * q_d < probs[i, d].double():
            return i
    return offered


def next_distribution(
    draft: Tensor,
    offered: int,
    probs: Tensor,
    q_ids: Tensor | None,
    q: Tensor | None,
    accepted: int,
) -> Tensor:
    """Distribution ``[vocab]`` of the token after the accepted ones, of one sequence.

    The normalised residual ``max(p - q, 0)`` at a rejected token; ``p`` itself where nothing was
    rejected or the residual is empty.
    """
    p = probs[accepted].double()
    if accepted < offered and draft[accepted] >= 0:
        residual = (p - _dense_q(draft, len(p), accepted, q_ids, q)).clamp(min=0)
        if residual.sum() > 0:
            p = residual
    return p / p.sum()


def accept(
    draft: Tensor,
    offered: Tensor,
    probs: Tensor,
    q_ids: Tensor | None,
    q: Tensor | None,
    u: Tensor,
    bonus_u: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling of every sequence: accepted lengths and next tokens."""
    lengths, tokens = [], []
    for s in range(draft.shape[0]):
        ids = None if q_ids is None else q_ids[s]
        row_q = None if q is None else q[s]
        n = int(offered[s])
        length = accepted_length(draft[s], n, probs[s], ids, row_q, u[s])
        nxt = next_distribution(draft[s], n, probs[s], ids, row_q, length)
        lengths.append(length)
        tokens.append(int(categorical(nxt[None], bonus_u[s, length : length + 1])))
    return torch.tensor(lengths, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int64)


def accept_greedy(draft: Tensor, offered: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The longest prefix that equals the target's own choices, and the choice after it."""
    lengths, tokens = [], []
    for s in range(draft.shape[0]):
        length = 0
        while length < int(offered[s]) and draft[s, length] == target_ids[s, length]:
            length += 1
        lengths.append(length)
        tokens.append(int(target_ids[s, length]))
    return torch.tensor(lengths, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int64)
