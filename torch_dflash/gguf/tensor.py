"""A tensor as it lies in a file: packed bytes, a GGML type and a shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .types import TYPES, GGMLType, ggml_type_of

__all__ = ["QuantTensor"]

_CHECK_BYTES = 1 << 22  # how much first_nonfinite looks at in one go: temporaries stay in cache


class TypedRows:
    """What a GGML type and a shape say about a tensor, whether its rows are there or not.

    Attributes:
        ggml_type: type id as stored in a GGUF file.
        shape: row-major (Hugging Face) order, ``(out, in)`` for a matrix.
    """

    ggml_type: int
    shape: tuple[int, ...]

    @property
    def type(self) -> GGMLType:
        """The GGML type: name and geometry."""
        return TYPES[self.ggml_type]

    @property
    def type_name(self) -> str:
        """Name of the GGML type, such as ``Q4_K``."""
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
        """Bytes of all packed rows."""
        return self.rows * self.type.row_bytes(self.columns)


@dataclass(frozen=True, eq=False)
class QuantTensor(TypedRows):
    """Packed rows of one GGML type; plain floats and integers are stored the same way.

    Everything that is loaded is a QuantTensor, whatever the file was. Nothing here copies or
    rounds: rows are selected, cut and joined as whole quants.

    Attributes:
        packed: uint8 ``[rows, bytes_per_row]``, contiguous; ``rows = prod(shape[:-1])``.
        ggml_type: type id as stored in a GGUF file.
        shape: row-major (Hugging Face) order, ``(out, in)`` for a matrix.

    Raises:
        ValueError: an attribute does not fit the others.

    >>> QuantTensor(torch.zeros(3, 34, dtype=torch.uint8), 8, (3, 32))
    QuantTensor(Q8_0 [3, 32], 102 bytes)
    """

    packed: Tensor
    ggml_type: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the attributes against each other."""
        if self.ggml_type not in TYPES:
            raise ValueError(
                f"QuantTensor: ggml_type must be one of {sorted(TYPES)}, got {self.ggml_type}"
            )
        if self.packed.dtype != torch.uint8 or not self.packed.is_contiguous():
            raise ValueError(
                "QuantTensor: packed must be contiguous uint8, got "
                f"{'' if self.packed.is_contiguous() else 'strided '}{self.packed.dtype}"
            )
        if self.columns < 1 or min(self.shape, default=1) < 0 or self.columns % self.type.elems:
            raise ValueError(
                f"QuantTensor: the last dimension of {[*self.shape]} must be a positive multiple "
                f"of {self.type.elems} for {self.type_name}, got {self.columns}"
            )
        want = (self.rows, self.type.row_bytes(self.columns))
        if tuple(self.packed.shape) != want:
            raise ValueError(
                f"QuantTensor: packed must be {[*want]} for {self.type_name} {[*self.shape]}, "
                f"got {[*self.packed.shape]}"
            )

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "QuantTensor":
        """View a float or integer tensor as packed rows, without a copy.

        Args:
            tensor: contiguous, any shape with a non-empty last dimension; float16, bfloat16,
                float32, float64, a signed integer, or bool (kept as I8).

        Raises:
            ValueError: the tensor is strided or GGML has no type of its dtype.
        """
        ggml_type = ggml_type_of(tensor.dtype)
        if ggml_type is None:
            raise ValueError(
                "QuantTensor.from_tensor: dtype must be float16, bfloat16, float32, float64, "
                f"int8, int16, int32, int64 or bool, got {tensor.dtype}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"QuantTensor.from_tensor: tensor must be contiguous, got strides "
                f"{tensor.stride()} for {[*tensor.shape]}; call .contiguous() first"
            )
        shape = tuple(tensor.shape)
        columns = shape[-1] if shape else 1
        rows = tensor.detach().reshape(math.prod(shape[:-1]), columns)
        return cls(rows.view(torch.uint8), ggml_type, shape)

    def __repr__(self) -> str:
        """Type, shape and size; never the values."""
        return f"QuantTensor({self.type_name} {[*self.shape]}, {self.nbytes} bytes)"

    def to(self, device: torch.device | str) -> "QuantTensor":
        """The same tensor on ``device``; itself where it already is there."""
        packed = self.packed.to(device)
        return self if packed is self.packed else QuantTensor(packed, self.ggml_type, self.shape)

    def to_dense(self) -> Tensor:
        """The values, in ``shape``.

        Returns:
            Plain types: a view of ``packed`` in their own dtype. Quantized types: a new float32
            tensor from ``torch.ops.dflash.dequantize``.

        Raises:
            RuntimeError: the library has no decoder for a quantized type.
        """
        if self.type.dtype is not None:
            return self.packed.view(self.type.dtype).reshape(self.shape)
        return torch.ops.dflash.dequantize.default(self.packed, self.ggml_type).reshape(self.shape)

    def take_rows(self, index: Tensor) -> "QuantTensor":
        """Select along the first dimension, quants unchanged.

        Args:
            index: int64 ``[n]``, each in ``[0, shape[0])``; repeats allowed.

        Returns:
            A copy of shape ``(n, *shape[1:])``.

        Raises:
            ValueError: a scalar, or a 1-D tensor of a quantized type.
            IndexError: an index is out of range.
        """
        items = self._items("take_rows")
        if index.dtype != torch.int64 or index.dim() != 1:
            raise ValueError(
                "QuantTensor.take_rows: index must be int64 [n], got "
                f"{index.dtype} {[*index.shape]}"
            )
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.shape[0]:
            raise IndexError(
                f"QuantTensor.take_rows: index must be in [0, {self.shape[0]}), got "
                f"{int(index.min())}..{int(index.max())}"
            )
        return self._like(items.index_select(0, index.to(items.device)))

    def split(self, sizes: Sequence[int]) -> tuple["QuantTensor", ...]:
        """Cut along the first dimension into views of the given sizes.

        Raises:
            ValueError: a scalar, a 1-D tensor of a quantized type, or sizes that do not add up.
        """
        items = self._items("split")
        if min(sizes, default=0) < 0 or sum(sizes) != self.shape[0]:
            raise ValueError(
                f"QuantTensor.split: sizes must add up to {self.shape[0]}, got {[*sizes]}"
            )
        return tuple(self._like(part) for part in torch.split(items, [*sizes]))

    @staticmethod
    def cat(tensors: Sequence["QuantTensor"]) -> "QuantTensor":
        """Join along the first dimension.

        Raises:
            ValueError: none given, or types or inner dimensions differ.
        """
        if not tensors:
            raise ValueError("QuantTensor.cat: tensors must hold at least one, got none")
        first = tensors[0]
        for t in tensors[1:]:
            if t.ggml_type != first.ggml_type or t.shape[1:] != first.shape[1:]:
                raise ValueError(f"QuantTensor.cat: {t!r} must match {first!r} but for its rows")
        return first._like(torch.cat([t._items("cat") for t in tensors]))

    def first_nonfinite(self) -> tuple[int, int] | None:
        """Row and quant of the first scale (plain floats: value) that is NaN or infinite.

        Only scales are looked at, so a tensor of gigabytes takes about a second. None if all are
        finite, and always for integer types. The tensor must be on the CPU.
        """
        quants = self.packed.reshape(-1, self.type.bytes).numpy()
        step = max(1, _CHECK_BYTES // self.type.bytes)
        for start in range(0, len(quants), step):
            bad = self.type.nonfinite(quants[start : start + step])
            if bad.any():
                return divmod(start + int(bad.argmax()), self.columns // self.type.elems)
        return None

    def _items(self, op: str) -> Tensor:
        """``packed`` as ``[shape[0], bytes]``."""
        if not self.shape or (len(self.shape) == 1 and self.type.elems > 1):
            raise ValueError(
                f"QuantTensor.{op}: needs rows that are whole quants, got {self!r}; "
                "a 1-D tensor of a quantized type is one row"
            )
        inner = math.prod(self.shape[1:])  # of a matrix row: its columns; of a vector: one value
        return self.packed.reshape(self.shape[0], self.type.row_bytes(inner))

    def _like(self, items: Tensor) -> "QuantTensor":
        shape = (items.shape[0], *self.shape[1:])
        if len(shape) == 1 and not shape[0]:
            raise ValueError("QuantTensor: a 1-D tensor must keep at least one value, got none")
        rows = math.prod(shape[:-1])
        return QuantTensor(
            items.reshape(rows, self.type.row_bytes(shape[-1])), self.ggml_type, shape
        )
