"""Rows times quants: the operators' product, and in prefills, where asked for, a library's.

The operators multiply quants as they are, in tiles of 32 rows: right for decode and verify rows,
slow for thousands. ``TORCH_DFLASH_GGUF_PREFILL=gemm`` dequantizes weights in every step that holds
a prefill and multiplies them as a library does. The step decides, never the number of rows: a step
without prefills is exact either way, and so is everything inside a captured graph.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available

from torch_dflash import ops
from torch_dflash.nn import ACT_FLOAT

__all__ = ["gemm_wanted", "linear", "multiply"]

MODE = "TORCH_DFLASH_GGUF_PREFILL"
_ROWS = 8192  # of a weight that are dequantized at a time


def gemm_wanted() -> bool:
    """What the environment asks for.

    Raises:
        ValueError: something else than ``exact`` or ``gemm``.
    """
    value = os.environ.get(MODE, "exact")
    if value not in ("exact", "gemm"):
        raise ValueError(f"{MODE} must be exact or gemm, got {value!r}")
    return value == "gemm"


def multiply(
    x: Tensor,
    weight: Tensor,
    types: list[int],
    rows: list[int],
    columns: int,
    act_mode: int,
    bias: Tensor | None,
) -> Tensor:
    """``x W^T + b`` of repacked segments, a row's result depending on that row alone.

    Args:
        x: ``[rows, columns]``, float32, float16 or bfloat16.
        weight: of ``QuantLinear``.
        types, rows, columns: of its segments.
        act_mode: activations that they read.
        bias: float32 ``[sum of rows]`` or None.

    Returns:
        ``[rows, sum of rows]`` in the dtype of ``x``.
    """
    read = x.float() if act_mode == ACT_FLOAT else ops.quant_act(x, act_mode)
    return ops.qmm(read, weight, types, rows, columns, bias).to(x.dtype)


@torch.library.custom_op("dflash_vllm::linear", mutates_args=())
def linear(
    x: Tensor,
    weight: Tensor,
    types: list[int],
    rows: list[int],
    columns: int,
    act_mode: int,
    bias: Tensor | None,
    decode_rows: int,
) -> Tensor:
    """:func:`multiply`, or a library's product if this step holds a prefill.

    Opaque to compilers: which of them is decided when it runs.

    Args:
        x, weight, types, rows, columns, act_mode, bias: of :func:`multiply`.
        decode_rows: most rows of a request that decodes or verifies.
    """
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if not captured and _prefilling(decode_rows):
        return _gemm(x, weight, types, rows, columns, bias)
    return multiply(x, weight, types, rows, columns, act_mode, bias)


@linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    types: list[int],
    rows: list[int],
    columns: int,
    act_mode: int,
    bias: Tensor | None,
    decode_rows: int,
) -> Tensor:
    return x.new_empty(x.shape[0], sum(rows))


def _prefilling(decode_rows: int) -> bool:
    if not is_forward_context_available():
        return False
    metadata = get_forward_context().attn_metadata
    if metadata is None:  # vLLM measures memory: what a prefill will take must be seen
        return True
    parts = metadata if isinstance(metadata, list) else [metadata]
    return any(_holds_prefill(part.values(), decode_rows) for part in parts)


def _holds_prefill(layers: Iterable[Any], decode_rows: int) -> bool:
    """Recurrent layers count prefills, attention layers know the longest request's rows."""
    return any(
        getattr(m, "num_prefills", 0) > 0 or getattr(m, "max_query_len", 1) > decode_rows
        for m in layers
    )


def _gemm(
    x: Tensor, weight: Tensor, types: list[int], rows: list[int], columns: int, bias: Tensor | None
) -> Tensor:
    out = x.new_empty(x.shape[0], sum(rows))
    start = first = 0
    for kind, count in zip(types, rows, strict=True):
        size = ops.repack_bytes(kind, count, columns)
        packed = ops.unpack(weight[start : start + size], kind, count, columns)
        for row in range(0, count, _ROWS):
            dense = ops.dequantize(packed[row : row + _ROWS], kind).to(x.dtype)
            out[:, first + row : first + row + dense.shape[0]] = x @ dense.T
        start, first = start + size, first + count
    return out if bias is None else out.add_(bias)
