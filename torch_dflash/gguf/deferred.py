"""Tensors that are computed while they are written, some rows at a time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .tensor import QuantTensor, TypedRows
from .types import TYPES

__all__ = ["DeferredTensor", "Stored", "pieces_of", "retyped", "with_row"]

_PIECE: Final = 1 << 20  # values computed in one go: 4 MB as float32


@dataclass(frozen=True, eq=False)
class DeferredTensor(TypedRows):
    """A tensor whose rows do not exist yet: what is written is computed as it is written.

    Attributes:
        ggml_type: type of the rows.
        shape: row-major.
        pieces: makes the packed rows anew, in order: uint8 ``[n, bytes_per_row]`` each.
    """

    ggml_type: int
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]


Stored = QuantTensor | DeferredTensor


def pieces_of(tensor: Stored) -> Iterable[Tensor]:
    """Packed rows of a tensor, in order; the whole of one that is already there."""
    return tensor.pieces() if isinstance(tensor, DeferredTensor) else (tensor.packed,)


def retyped(tensor: QuantTensor, ggml_type: int, name: str = "tensor") -> Stored:
    """A float tensor in another type, a piece at a time.

    Args:
        tensor: any weight type; quantized ones are decoded first.
        ggml_type: F32, F16, BF16, or one that ``torch.ops.dflash.quantize`` writes.
        name: for messages.

    Returns:
        ``tensor`` itself where it has the type already.

    Raises:
        ValueError: columns that are no whole quants. While pieces are made: a value that the type
            rounds to infinity, or a type that cannot be written.
    """
    if tensor.ggml_type == ggml_type:
        return tensor
    kind = TYPES[ggml_type]
    if tensor.columns % kind.elems:
        raise ValueError(
            f"{name}: rows must be a multiple of {kind.elems} values for {kind.name}, "
            f"got {tensor.columns}"
        )

    def pieces() -> Iterator[Tensor]:
        step = max(1, _PIECE // tensor.columns)
        for at in range(0, tensor.rows, step):
            rows = tensor.packed[at : at + step]
            part = QuantTensor(rows, tensor.ggml_type, (len(rows), tensor.columns)).to_dense()
            if kind.dtype is None:
                yield _quantized(part, ggml_type, name)
                continue
            values = part.to(kind.dtype)
            if kind.dtype == torch.float16 and not values.isfinite().all():
                raise ValueError(
                    f"{name}: values must be below 65520 for F16, got larger ones in rows "
                    f"{at}..{at + len(rows) - 1}; use bf16"
                )
            yield values.contiguous().view(torch.uint8)

    return DeferredTensor(ggml_type, tensor.shape, pieces)


def with_row(tensor: Stored, index: int, row: QuantTensor, name: str = "tensor") -> Stored:
    """The same matrix with one row replaced.

    Args:
        tensor: ``[rows, columns]``.
        index: of the row.
        row: ``[1, columns]`` of the same type.
        name: for messages.

    Raises:
        ValueError: a row of another type or width, or no such row.
    """
    if (row.ggml_type, row.shape) != (tensor.ggml_type, (1, tensor.columns)):
        raise ValueError(
            f"{name}: row must be {tensor.type_name} [1, {tensor.columns}], got {row!r}"
        )
    if not 0 <= index < tensor.rows:
        raise ValueError(f"{name}: row must be below {tensor.rows}, got {index}")

    def pieces() -> Iterator[Tensor]:
        at = 0
        for piece in pieces_of(tensor):
            if at <= index < at + len(piece):
                yield torch.cat([piece[: index - at], row.packed, piece[index - at + 1 :]])
            else:
                yield piece
            at += len(piece)

    return DeferredTensor(tensor.ggml_type, tensor.shape, pieces)


def _quantized(values: Tensor, ggml_type: int, name: str) -> Tensor:
    try:
        packed: Tensor = torch.ops.dflash.quantize.default(values, ggml_type)
    except RuntimeError as error:
        raise ValueError(f"{name}: {str(error).splitlines()[0]}") from None
    return packed
