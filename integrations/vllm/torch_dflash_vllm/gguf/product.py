"""Rows times quants: the operators' product, and in prefills a library's.

The operators multiply quants as they are, in tiles of 32 rows: right for decode and verify rows,
slow for thousands. A library's product of dequantized weights is right for those. The step decides
which it is, by what ``TORCH_DFLASH_GGUF_PREFILL`` says:

* ``auto``, the default on a GPU: a library's in steps of many rows that do nothing but prefill;
* ``gemm``: a library's in every step that holds a prefill;
* ``exact``, the default on a CPU: the operators' everywhere.

A step without prefills is exact in all of them, and so is everything inside a captured graph.
"""

import os
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform

from torch_dflash import ops
from torch_dflash.nn import ACT_FLOAT

__all__ = ["linear", "multiply", "prefill_mode"]

MODE = "TORCH_DFLASH_GGUF_PREFILL"
Mode = Literal["auto", "gemm", "exact"]
_MODES: tuple[Mode, ...] = ("auto", "gemm", "exact")
_ROWS = 8192  # of a weight that are dequantized at a time
# Rows of a prefill from which on dequantizing a weight costs less than multiplying its quants
# in tiles: an estimate, weights are read and written as floats of 4 and 2 bytes.
_MANY = 256


def prefill_mode() -> Mode:
    """What the environment asks for, or the platform's default.

    Raises:
        ValueError: something else than ``auto``, ``gemm`` or ``exact``.
    """
    value = os.environ.get(MODE, "exact" if current_platform.is_cpu() else "auto")
    for mode in _MODES:
        if value == mode:
            return mode
    raise ValueError(f"{MODE} must be auto, gemm or exact, got {value!r}")


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
    mixed: bool,
) -> Tensor:
    """:func:`multiply`, or a library's product if this step prefills.

    Opaque to compilers: which of them is decided when it runs.

    Args:
        x, weight, types, rows, columns, act_mode, bias: of :func:`multiply`.
        decode_rows: most rows of a request that decodes or verifies.
        mixed: a library's also in a step that decodes or verifies besides, and of few rows.
    """
    if _library(x, decode_rows, mixed):
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
    mixed: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], sum(rows))


def _library(x: Tensor, decode_rows: int, mixed: bool) -> bool:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    if not is_forward_context_available() or (not mixed and x.shape[0] < _MANY):
        return False
    context = get_forward_context()
    if context.attn_metadata is None:  # vLLM measures memory: what a prefill will take must be seen
        return True
    name = "dflash_prefills" if mixed else "dflash_prefills_only"
    known: bool | None = getattr(context, name, None)
    if known is None:  # once a step, not once a layer
        known = _prefills(context.attn_metadata, decode_rows, mixed)
        setattr(context, name, known)
    return known


def _prefills(metadata: Any, decode_rows: int, mixed: bool) -> bool:
    """Whether a step holds a prefill, or nothing but prefills.

    Recurrent layers count both; attention layers know where the rows of every request begin.
    """
    parts = metadata if isinstance(metadata, list) else [metadata]
    layers = [m for part in parts for m in part.values()]
    counted = [m for m in layers if hasattr(m, "num_prefills")]
    if mixed:
        longest = max((getattr(m, "max_query_len", 1) for m in layers), default=1)
        return any(m.num_prefills > 0 for m in counted) or longest > decode_rows
    if counted:
        return all(
            m.num_prefills > 0 and m.num_decodes == 0 and getattr(m, "num_spec_decodes", 0) == 0
            for m in counted
        )
    starts = [m.query_start_loc for m in layers if getattr(m, "query_start_loc", None) is not None]
    lengths = starts[0].diff().tolist() if starts else []
    return bool(lengths) and all(n == 0 or n > decode_rows for n in lengths)


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
