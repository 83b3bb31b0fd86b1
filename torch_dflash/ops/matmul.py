"""Quantized matrix products for decode and verify rows, and the layout they read."""

import torch
from torch import Tensor

from .act import new_activations

__all__ = ["qmm", "qmm_glu", "repack", "repack_bytes", "unpack"]


def repack_bytes(ggml_type: int, rows: int, columns: int) -> int:
    """Bytes of a repacked segment.

    Args:
        ggml_type: type id as stored in a GGUF file.
        rows: rows of the segment.
        columns: values of a row.

    Returns:
        Bytes, a multiple of 64: room for whole tiles of 16 rows, or the GGUF bytes filled up.

    Raises:
        RuntimeError: unknown type id, or ``columns`` is no whole number of quants.

    >>> repack_bytes(12, 20, 256)  # Q4_K: two tiles
    4736
    """
    return torch.ops.dflash.repack_bytes.default(ggml_type, rows, columns)


def repack(packed: Tensor, ggml_type: int, columns: int) -> Tensor:
    """GGUF bytes of one segment to the layout of :func:`qmm` on that device.

    On a CPU: tiles of 16 rows for Q4_K, Q5_K, Q6_K, Q8_0, Q4_0 and IQ4_XS, the GGUF bytes for every
    other type. On a GPU: the GGUF bytes. Concatenate the results to stack segments in one weight.

    Args:
        packed: uint8 ``[rows, bytes]``, contiguous.
        ggml_type: type id as stored in a GGUF file.
        columns: values of a row.

    Returns:
        uint8 ``[repack_bytes]``.

    Raises:
        RuntimeError: unknown type id, or bytes that do not hold ``columns`` values.

    Source: ``csrc/host/tiles.h``. Backends: CPU, CUDA. Not differentiable.
    """
    return torch.ops.dflash.repack.default(packed, ggml_type, columns)


def unpack(weight: Tensor, ggml_type: int, rows: int, columns: int) -> Tensor:
    """The inverse of :func:`repack`, byte for byte.

    Args:
        weight: uint8 ``[bytes]`` as :func:`repack` returned it.
        ggml_type: type id as stored in a GGUF file.
        rows: rows of the segment.
        columns: values of a row.

    Returns:
        uint8 ``[rows, bytes]``, GGUF's bytes.

    Raises:
        RuntimeError: unknown type id, a wrong size, or bytes that are no tile of that type.

    Source: ``csrc/host/tiles.h``. Backends: CPU, CUDA. Not differentiable.
    """
    return torch.ops.dflash.unpack.default(weight, ggml_type, rows, columns)


def qmm(
    x: Tensor,
    weight: Tensor,
    types: list[int],
    rows: list[int],
    columns: int,
    bias: Tensor | None = None,
) -> Tensor:
    r"""Multiply rows of activations with stacked quantized weights: :math:`x W^T + b`.

    Integer dot products per superblock of 256, four superblocks added in order to a leaf, leaves
    joined by one tree that depends on ``columns`` alone. So a row's result does not depend on the
    other rows, their number, threads or stacking.

    Args:
        x: float32 ``[N, columns]``, or packed by :func:`quant_act` or a fused epilogue: planes are
            uint8 ``[N, act_bytes(columns, 1)]``, Q8_1 is int8 ``[N, act_bytes(columns, 2)]``.
            Float32 rows are multiplied with the dequantized float32 weights, packed rows in
            integers where the type has a layout for it.
        weight: uint8 ``[bytes]``: the concatenated :func:`repack` results of the segments.
        types: ggml type id of every segment.
        rows: rows of every segment.
        columns: values of a row.
        bias: float32 ``[sum(rows)]``, added last.

    Returns:
        float32 ``[N, sum(rows)]``.

    Raises:
        RuntimeError: a shape, dtype, type id or weight size above does not hold.

    Formula: ``docs/contracts.md``, section 2. Backends: CPU, CUDA. Not differentiable.
    """
    return torch.ops.dflash.qmm.default(x, weight, types, rows, columns, bias)


def qmm_glu(
    x: Tensor, weight: Tensor, types: list[int], rows: int, columns: int, act_mode: int
) -> Tensor:
    r"""Gated linear unit: :math:`\operatorname{silu}(x G^T) \cdot x U^T`, packed if asked.

    The bits are those of :func:`qmm`, ``silu(gate) * up`` and :func:`quant_act` one after the
    other.

    Args:
        x: as in :func:`qmm`.
        weight: uint8 ``[bytes]``: the :func:`repack` results of gate and up, concatenated.
        types: ggml type ids of gate and up.
        rows: rows of each of the two.
        columns: values of a row.
        act_mode: of the result, whatever ``x`` is: 0 = float32, 1 = two int8 planes, 2 = Q8_1.

    Returns:
        float32 ``[N, rows]``, or packed as by :func:`quant_act`.

    Raises:
        RuntimeError: a shape, dtype, mode, type id or weight size above does not hold.

    Formula: ``docs/contracts.md``, section 2. Backends: CPU, CUDA. Not differentiable.
    """
    return torch.ops.dflash.qmm_glu.default(x, weight, types, rows, columns, act_mode)


@torch.library.register_fake("dflash::repack")
def _(packed: Tensor, ggml_type: int, columns: int) -> Tensor:
    return packed.new_empty(repack_bytes(ggml_type, packed.shape[0], columns))


@torch.library.register_fake("dflash::unpack")
def _(weight: Tensor, ggml_type: int, rows: int, columns: int) -> Tensor:
    from .quant import quant_geometry

    values, nbytes = quant_geometry(ggml_type)
    return weight.new_empty((rows, columns // values * nbytes))


@torch.library.register_fake("dflash::qmm")
def _(
    x: Tensor,
    weight: Tensor,
    types: list[int],
    rows: list[int],
    columns: int,
    bias: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], sum(rows)), dtype=torch.float32)


@torch.library.register_fake("dflash::qmm_glu")
def _(
    x: Tensor, weight: Tensor, types: list[int], rows: int, columns: int, act_mode: int
) -> Tensor:
    return new_activations(x, x.shape[0], rows, act_mode)
