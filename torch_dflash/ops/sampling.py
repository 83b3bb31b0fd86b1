"""Sampling and lossless acceptance."""

import torch
from torch import Tensor

__all__ = ["accept", "accept_greedy", "categorical", "sampling_probs", "uniform"]


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    r"""Random numbers that depend on what they are for, never on when or where they are drawn.

    Philox 4x32-10 with the seed as key and ``(position, stream)`` as counter; the upper 24 bits of
    the first word, times :math:`2^{-24}`.

    Args:
        seeds: int64, any shape: one seed per sequence, repeated as needed.
        positions: int64, the same shape: what the number is drawn for, e.g. a token's position.
        stream: 0 (the target's token), 1 (a draft token) or 2 (an acceptance); streams are
            independent of each other.

    Returns:
        float32 of the same shape, in ``[0, 1)``, multiples of ``2**-24``.

    Raises:
        RuntimeError: another stream, or a shape, dtype or device above does not hold.

    Source: Salmon et al., SC 2011. Formula: ``csrc/core/random.h``. Backends: CPU, CUDA.
    Not differentiable.

    >>> uniform(torch.tensor([0, 0]), torch.tensor([0, 1]), 0)
    tensor([0.3990, 0.9722])
    """
    return torch.ops.dflash.uniform.default(seeds, positions, stream)


@torch.library.register_fake("dflash::uniform")
def _(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    return seeds.new_empty(seeds.shape, dtype=torch.float32)


def sampling_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    r"""Probabilities of the next token after temperature, then top-k, then top-p.

    .. math::
        e_i = \exp\frac{x_i - \max x}{t}\,[i \in \text{top-k}], \quad p_i = e_i / \sum e, \quad
        p'_i = p_i\,[\textstyle\sum_{j \prec i} p_j < \text{top-p}] / \sum

    where :math:`\prec` orders ids by (probability descending, id ascending); so at least one id is
    kept. Temperature 0 gives a one-hot arg max, the lowest id among equals.

    Args:
        logits: ``[rows, vocab]`` float32, finite or ``-inf`` (a forbidden id), not all ``-inf``.
        temperature: ``[rows]`` float32, >= 0.
        top_k: ``[rows]`` int64, >= 0; 0 is off.
        top_p: ``[rows]`` float32 in (0, 1]; 1 is off.

    Returns:
        float32 ``[rows, vocab]``, each row of sum 1 up to rounding, exactly 0 outside the
        selection.

    Raises:
        RuntimeError: a shape, dtype or layout above does not hold; on CPU also a value, named with
            its row. On a GPU such a row becomes NaN.

    Source: the order of z-lab's ``dflash``. Formula: ``csrc/core/sampling.h``. Backends: CPU, CUDA.
    Not differentiable.

    >>> off = torch.tensor([0]), torch.tensor([1.0])
    >>> sampling_probs(torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([0.0]), *off)
    tensor([[0., 0., 1.]])
    """
    return torch.ops.dflash.sampling_probs.default(logits, temperature, top_k, top_p)


@torch.library.register_fake("dflash::sampling_probs")
def _(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    return torch.empty_like(logits)


def categorical(probs: Tensor, uniform: Tensor) -> Tensor:
    r"""Draw a token: the inverse of the distribution function in id order.

    .. math:: \min \{ i : \textstyle\sum_{j \le i} p_j > u \sum_j p_j \}

    Args:
        probs: ``[rows, vocab]`` float32, >= 0, not necessarily of sum 1.
        uniform: ``[rows]`` float32 in [0, 1).

    Returns:
        int64 ``[rows]``; never an id of probability 0.

    Raises:
        RuntimeError: a shape, dtype or layout above does not hold; on CPU also a value, named with
            its row. On a GPU such a row gives -1.

    Formula: ``csrc/core/sampling.h``. Backends: CPU, CUDA. Not differentiable.

    >>> categorical(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([0.5]))
    tensor([2])
    """
    return torch.ops.dflash.categorical.default(probs, uniform)


@torch.library.register_fake("dflash::categorical")
def _(probs: Tensor, uniform: Tensor) -> Tensor:
    return probs.new_empty(probs.shape[:1], dtype=torch.int64)


def accept(
    draft: Tensor,
    offered: Tensor,
    probs: Tensor,
    q_ids: Tensor | None,
    q: Tensor | None,
    uniform: Tensor,
    bonus_uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Lossless acceptance by rejection sampling: what is emitted has the target's distribution.

    Token :math:`d_i` is accepted iff :math:`u_i\,q_i(d_i) < p_i(d_i)`. The first rejected position
    is drawn from :math:`\max(p_i - q_i, 0)`, or from :math:`p_i` where that is empty; after a chain
    without rejection the next token is drawn from the row that follows it.

    Args:
        draft: ``[sequences, tokens]`` int64. An id of -1 ends a chain, as if no more were offered.
        offered: ``[sequences]`` int32, how many of them count, 0 to ``tokens``.
        probs: ``[sequences, tokens + 1, vocab]`` float32, the target's distributions (see
            :func:`sampling_probs`; a one-hot row is greedy).
        q_ids: ``[sequences, tokens, candidates]`` int64, or None.
        q: what each draft token was drawn from, float32: over ``q_ids`` if given, else
            ``[sequences, tokens, vocab]``. None: the drafter was certain (one-hot).
        uniform: ``[sequences, tokens]`` float32 in [0, 1), for the acceptances.
        bonus_uniform: ``[sequences, tokens + 1]`` float32 in [0, 1), for the next token: the entry
            of the position at which it is drawn is used.

    Returns:
        ``(length, next)``: accepted tokens int32 ``[sequences]`` and the token after them int64
        ``[sequences]``.

    Raises:
        RuntimeError: a shape, dtype or layout above does not hold; on CPU also a value, named with
            its sequence. On a GPU such a sequence gives next = -1.

    Source: arXiv:2211.17192. Formula: ``csrc/core/accept.h``. Backends: CPU, CUDA.
    Not differentiable.

    >>> p = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> u = torch.tensor([[0.4]]), torch.tensor([[0.0, 0.0]])
    >>> accept(torch.tensor([[0]]), torch.tensor([1], dtype=torch.int32), p, None, None, *u)
    (tensor([1], dtype=torch.int32), tensor([1]))
    """
    return torch.ops.dflash.accept.default(draft, offered, probs, q_ids, q, uniform, bonus_uniform)


def _acceptance(draft: Tensor) -> tuple[Tensor, Tensor]:
    sequences = draft.shape[:1]
    return (
        draft.new_empty(sequences, dtype=torch.int32),
        draft.new_empty(sequences, dtype=torch.int64),
    )


@torch.library.register_fake("dflash::accept")
def _(
    draft: Tensor,
    offered: Tensor,
    probs: Tensor,
    q_ids: Tensor | None,
    q: Tensor | None,
    uniform: Tensor,
    bonus_uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    return _acceptance(draft)


def accept_greedy(draft: Tensor, offered: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy acceptance: the longest prefix that the target would have chosen itself.

    Args:
        draft: ``[sequences, tokens]`` int64; an id of -1 ends a chain.
        offered: ``[sequences]`` int32, how many of them count, 0 to ``tokens``.
        target_ids: ``[sequences, tokens + 1]`` int64, the target's arg max after the anchor and
            after every draft token.

    Returns:
        ``(length, next)``: accepted tokens int32 ``[sequences]`` and the token after them int64
        ``[sequences]``.

    Raises:
        RuntimeError: a shape, dtype or layout above does not hold; on CPU also ``offered`` out of
            range or a negative target id that would be emitted.

    Formula: ``csrc/core/accept.h``. Backends: CPU, CUDA. Not differentiable.

    >>> draft, target = torch.tensor([[4, 5, 6]]), torch.tensor([[4, 5, 7, 8]])
    >>> accept_greedy(draft, torch.tensor([3], dtype=torch.int32), target)
    (tensor([2], dtype=torch.int32), tensor([7]))
    """
    return torch.ops.dflash.accept_greedy.default(draft, offered, target_ids)


@torch.library.register_fake("dflash::accept_greedy")
def _(draft: Tensor, offered: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    return _acceptance(draft)
