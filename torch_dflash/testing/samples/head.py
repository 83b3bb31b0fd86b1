"""Samples of head_topk; the oracle sorts by (value, id) in Python."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import operator


def by_value_then_id(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of every row, equal values by ascending id: a stable sort."""
    best = torch.sort(values, dim=-1, descending=True, stable=True)
    return best.values[:, :k], best.indices[:, :k]


def _oracle(logits: Tensor, k: int, multiplier: float, softcap: float) -> tuple[Tensor, Tensor]:
    z = logits.double() * multiplier
    if softcap > 0:
        z = softcap * torch.tanh(z / softcap)
    values, ids = by_value_then_id(z, k)
    return values.float(), ids


@operator("head_topk", oracle=_oracle)
def head_topk(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(0)
    for rows, vocabulary, k, multiplier, softcap in [
        (0, 5, 2, 1.0, 0.0),
        (1, 1, 1, 1.0, 0.0),
        (3, 1000, 1, 1.0, 0.0),
        (2, 40000, 16, 0.196, 20.0),
        (2, 9000, 32, 1.0, 0.0),
        (1, 4097, 1, 1.0, 0.0),
        (2, 300, 300, 2.0, 0.0),
    ]:
        yield torch.randn(rows, vocabulary, generator=g).to(device), k, multiplier, softcap
