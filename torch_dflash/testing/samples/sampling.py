"""Samples of the sampling and acceptance operators; the oracles are the float64 references."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ...reference import sampling as reference
from .. import operator

Args = tuple[Any, ...]


def on_cpu(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """The references compute on the CPU; their results go where the arguments came from."""

    @wraps(oracle)
    def moved(*args: Any) -> Any:
        device = next(a.device for a in args if isinstance(a, Tensor))
        out = oracle(*(a.cpu() if isinstance(a, Tensor) else a for a in args))
        return tuple(t.to(device) for t in out) if isinstance(out, tuple) else out.to(device)

    return moved


@on_cpu
def _sampling_probs(*args: Tensor) -> Tensor:
    return reference.sampling_probs(*args).float()


@operator("uniform", oracle=on_cpu(reference.uniform))
def uniform(device: torch.device) -> Iterator[Args]:
    g = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    for shape in [(0,), (), (7,), (3, 5)]:
        seeds = torch.randint(low, high, shape, generator=g)
        positions = torch.randint(0, 2**40, shape, generator=g)
        for stream in range(3):
            yield seeds.to(device), positions.to(device), stream


@operator("sampling_probs", oracle=_sampling_probs)
def sampling_probs(device: torch.device) -> Iterator[Args]:
    g = torch.Generator().manual_seed(1)
    for rows, vocab in [(0, 5), (1, 1), (6, 40), (6, 1024), (6, 2050), (6, 9000)]:
        logits = torch.randn(rows, vocab, generator=g) * 4
        if vocab > 8:
            logits[:, 3] = -torch.inf
            logits[:, 5] = logits[:, 4]  # a tie
        temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.8, 1e-3])[:rows]
        top_k = torch.tensor([0, 0, 8, 16, 17, 5])[:rows]
        top_p = torch.tensor([1.0, 0.9, 1.0, 0.6, 0.95, 0.01])[:rows]
        yield logits.to(device), temperature.to(device), top_k.to(device), top_p.to(device)


def _rows(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.softmax(torch.randn(*shape, generator=generator) * 2, -1)


@operator("categorical", oracle=on_cpu(reference.categorical))
def categorical(device: torch.device) -> Iterator[Args]:
    g = torch.Generator().manual_seed(2)
    for rows, vocab in [(0, 3), (1, 1), (9, 8), (5, 1025), (3, 5000)]:
        probs = _rows(rows, vocab, generator=g)
        if vocab > 2:
            probs[:, ::2] = 0
        yield (probs * 3).to(device), torch.rand(rows, generator=g).to(device)


@operator("accept", oracle=on_cpu(reference.accept))
def accept(device: torch.device) -> Iterator[Args]:
    g = torch.Generator().manual_seed(3)
    for sequences, tokens, vocab, candidates in [
        (0, 2, 4, 2),
        (1, 0, 5, 1),
        (8, 4, 12, 3),
        (2, 3, 9000, 5),
    ]:
        probs = _rows(sequences, tokens + 1, vocab, generator=g)
        dense = _rows(sequences, tokens, vocab, generator=g)
        ids = torch.rand(sequences, tokens, vocab, generator=g).argsort(-1)[..., :candidates]
        sparse = _rows(sequences, tokens, candidates, generator=g)
        draft = ids[..., 0].contiguous()
        if sequences > 1:
            draft[1, 2] = -1
        offered = torch.randint(0, tokens + 1, (sequences,), generator=g, dtype=torch.int32)
        u = torch.rand(sequences, tokens, generator=g)
        bonus = torch.rand(sequences, tokens + 1, generator=g)
        for q_ids, q in [(None, None), (None, dense), (ids.contiguous(), sparse)]:
            args = (draft, offered, probs, q_ids, q, u, bonus)
            yield tuple(None if a is None else a.to(device) for a in args)


@operator("accept_greedy", oracle=on_cpu(reference.accept_greedy))
def accept_greedy(device: torch.device) -> Iterator[Args]:
    g = torch.Generator().manual_seed(4)
    for sequences, tokens in [(0, 3), (1, 0), (9, 5), (2, 70)]:
        draft = torch.randint(0, 2, (sequences, tokens), generator=g)
        target = torch.randint(0, 2, (sequences, tokens + 1), generator=g)
        offered = torch.randint(0, tokens + 1, (sequences,), generator=g, dtype=torch.int32)
        yield draft.to(device), offered.to(device), target.to(device)
