"""Tensors that are computed while they are written, some rows at a time."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .tensor import QuantTensor
from .types import TYPES, GGMLType

__all__ = ["DeferredTensor", "Stored", "pieces_of", "retyped"]

_PIECE: Final = 1 << 23  # values computed in one go: 32 MB as float32


@dataclass(frozen=True, eq=False)
class DeferredTensor:
    """A tensor whose rows do not exist yet: what is written is computed as it is written.

    Attributes:
        ggml_type: type of the rows.
        shape: row-major.
        pieces: makes the packed rows anew, in order: uint8 ``[n, bytes_per_row]`` each.
    """

    ggml_type: int
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def type(self) -> GGMLType:
        """The GGML type: name and geometry."""
        return TYPES[self.ggml_type]

    @property
    def type_name(self) -> str:
        """Name of the GGML type."""
        return self.type.name

    @property
    def columns(self) -> int:
        """Values per row: the last dimension (1 for a scalar)."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Number of packed rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes that ``pieces`` yields altogether."""
        return self.rows * self.type.row_bytes(self.columns)


Stored = QuantTensor | DeferredTensor


def pieces_of(tensor: Stored) -> Iterable[Tensor]:
    """Packed rows of a tensor, in order; the whole of one that is already there."""
    return tensor.pieces() if isinstance(tensor, DeferredTensor) else (tensor.packed,)


def retyped(tensor: QuantTensor, ggml_type: int, name: str = "tensor") -> Stored:
    """A float tensor in another plain float type, a piece at a time.

    Args:
        tensor: any weight type; quantized ones are decoded.
        ggml_type: F32, F16 or BF16.
        name: for messages.

    Returns:
        ``tensor`` itself where it has the type already.

    Raises:
        ValueError: another type. While pieces are made: a finite value that the type rounds to
            infinity.
    """
    if tensor.ggml_type == ggml_type:
        return tensor
    dtype = TYPES[ggml_type].dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: type must be F32, F16 or BF16, got {TYPES[ggml_type].name}")

    def pieces() -> Iterator[Tensor]:
        step = max(1, _PIECE // tensor.columns)
        for at in range(0, tensor.rows, step):
            rows = tensor.packed[at : at + step]
            part = QuantTensor(rows, tensor.ggml_type, (len(rows), tensor.columns))
            values = part.to_dense().to(dtype)
            if dtype == torch.float16 and not values.isfinite().all():
                raise ValueError(
                    f"{name}: values must be below 65520 for F16, got larger ones in rows "
                    f"{at}..{at + len(rows) - 1}; use bf16"
                )
            yield values.contiguous().view(torch.uint8)

    return DeferredTensor(ggml_type, tensor.shape, pieces)
