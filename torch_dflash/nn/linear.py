"""Linear layers over quantized weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..gguf.tensor import QuantTensor
from .module import Module

__all__ = ["ACT_FLOAT", "ACT_PLANES", "ACT_Q8_1", "QuantGLU", "QuantLinear"]

ACT_FLOAT, ACT_PLANES, ACT_Q8_1 = 0, 1, 2
_FLOAT_TYPES = frozenset({0, 1, 30})  # F32, F16, BF16
_SEGMENT_ALIGNMENT = 64


def _act_mode(types: Sequence[int], packed_mode: int) -> int:
    """Activations that weights of these types read: float32 for float weights, packed else."""
    if packed_mode not in (ACT_PLANES, ACT_Q8_1):
        raise ValueError(f"packed_mode must be 1 (planes) or 2 (Q8_1), got {packed_mode}")
    return ACT_FLOAT if all(t in _FLOAT_TYPES for t in types) else packed_mode


class _Stacked(Module):
    """Segments of one input width, repacked for the device they are on, in one buffer.

    Moving the module to another kind of device unpacks, moves and repacks: the layouts differ.
    """

    weight: Tensor

    def __init__(self, segments: Sequence[QuantTensor]) -> None:
        super().__init__()
        if not segments:
            raise ValueError("a linear layer needs at least one segment, got none")
        widths = sorted({s.columns for s in segments})
        if len(widths) > 1:
            raise ValueError(f"stacked segments must have one input width, got {widths}")
        self.columns = segments[0].columns
        self.types = [s.ggml_type for s in segments]
        self.rows = [s.rows for s in segments]
        self._offsets = [0]
        self.register_buffer("weight", self._repack([s.packed for s in segments]), persistent=False)

    def _repack(self, packed: Sequence[Tensor]) -> Tensor:
        sizes = [
            ops.repack_bytes(t, r, self.columns) for t, r in zip(self.types, self.rows, strict=True)
        ]
        self._offsets = [0]
        for size in sizes:
            padded = -(-size // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT
            self._offsets.append(self._offsets[-1] + padded)
        weight = packed[0].new_zeros(self._offsets[-1])
        for t, source, offset, size in zip(self.types, packed, self._offsets, sizes, strict=False):
            weight[offset : offset + size] = ops.repack(source, t, self.columns)
        return weight

    def packed(self) -> list[Tensor]:
        """The segments' GGUF bytes, ``uint8 [rows, bytes]`` each, as they came from the file."""
        return [
            ops.unpack(self.weight[start:end], t, rows, self.columns)
            for t, rows, start, end in zip(
                self.types, self.rows, self._offsets, self._offsets[1:], strict=False
            )
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        device = self.weight.device
        target = fn(torch.empty(0, dtype=torch.uint8, device=device)).device
        if target.type == device.type:
            return super()._apply(fn, recurse)
        moved = [fn(p) for p in self.packed()]
        self.weight = self._repack(moved)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"columns={self.columns}, rows={self.rows}, ggml_types={self.types}"


class QuantLinear(_Stacked):
    """``y = x W^T + b`` for stacked segments of any GGUF types.

    Args:
        segments: weights ``[rows, columns]`` of one input width; their outputs lie side by side.
        bias: float32 ``[sum of rows]`` or None.
        packed_mode: activations of quantized weights, ``ACT_PLANES`` or ``ACT_Q8_1``.

    ``act_mode`` says what ``forward`` wants: float32 rows (float weights), or rows packed by
    ``ops.quant_act``. All are accepted; the choice belongs to the weights, never to the row count.
    """

    bias: Tensor | None

    def __init__(
        self,
        segments: Sequence[QuantTensor],
        bias: Tensor | None = None,
        packed_mode: int = ACT_PLANES,
    ) -> None:
        super().__init__(segments)
        self.act_mode = _act_mode(self.types, packed_mode)
        if bias is not None and bias.shape != (sum(self.rows),):
            raise ValueError(f"bias must be [{sum(self.rows)}], got {list(bias.shape)}")
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: float32 ``[rows, columns]`` or packed activations, of either mode.

        Returns:
            float32 ``[rows, sum of segment rows]``.
        """
        return ops.qmm(x, self.weight, self.types, self.rows, self.columns, self.bias)

    def from_float(self, x: Tensor) -> Tensor:
        """:meth:`forward` of float32 rows, packed first when the weights want it."""
        return self.forward(self.prepare(x))

    def prepare(self, x: Tensor) -> Tensor:
        """Float32 rows as the weights want them: unchanged, or packed."""
        return x if self.act_mode == ACT_FLOAT else ops.quant_act(x, self.act_mode)

    def tail(self, x: Tensor, first: int) -> Tensor:
        """:meth:`forward` of the segments ``first ..`` alone: the same bits, only those columns."""
        row = sum(self.rows[:first])
        bias = None if self.bias is None else self.bias[row:]
        weight = self.weight[self._offsets[first] :]
        return ops.qmm(x, weight, self.types[first:], self.rows[first:], self.columns, bias)


class QuantGLU(_Stacked):
    """``silu(x W_gate^T) * (x W_up^T)``; gate and up may be of different types.

    Args:
        gate: ``[rows, columns]``.
        up: same shape.
        out_mode: activations that the next layer reads (its ``act_mode``).
        packed_mode: as of :class:`QuantLinear`.
    """

    def __init__(
        self, gate: QuantTensor, up: QuantTensor, out_mode: int, packed_mode: int = ACT_PLANES
    ) -> None:
        if gate.rows != up.rows:
            raise ValueError(f"gate and up must have equal rows, got {gate.rows} and {up.rows}")
        super().__init__([gate, up])
        self.act_mode = _act_mode(self.types, packed_mode)
        self.out_mode = out_mode

    def forward(self, x: Tensor) -> Tensor:
        """float32 or packed ``[rows, columns]`` -> float32 or packed ``[rows, gate.rows]``."""
        return ops.qmm_glu(x, self.weight, self.types, self.rows[0], self.columns, self.out_mode)
