"""Samples of the quantized matmul; the oracle is gguf-py and float64."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from .. import operator
from .act import cpu_planes
from .quant import gguf_dequantize, random_packed

GROUP_BYTES = {torch.uint8: 592, torch.int8: 320}  # planes, Q8_1


def unpack_activations(packed: Tensor, columns: int) -> Tensor:
    """Float64 values ``[rows, columns]`` of packed activations."""
    if packed.is_cuda and packed.dtype == torch.uint8:
        packed = cpu_planes(packed)
    groups = packed.cpu().view(packed.shape[0], -(-columns // 256), GROUP_BYTES[packed.dtype])
    if packed.dtype == torch.int8:
        scale = groups[..., :32].contiguous().view(torch.float32).double()
        values = groups[..., 64:].double() * scale.repeat_interleave(32, -1)
    else:
        scale = groups[..., :4].contiguous().view(torch.float32).double()
        codes = groups[..., 80:].contiguous().view(torch.int8).double()
        values = (254 * codes[..., :256] + codes[..., 256:]) * scale
    return values.view(packed.shape[0], -1 if len(values) else columns)[:, :columns]


def weight_rows(weight: Tensor, types: list[int], rows: list[int], columns: int) -> Tensor:
    """Float64 weights ``[sum(rows), columns]`` of stacked segments."""
    parts, offset = [], 0
    for ggml_type, n in zip(types, rows, strict=True):
        size = ops.repack_bytes(ggml_type, n, columns)
        packed = ops.unpack(weight[offset : offset + size], ggml_type, n, columns)
        parts.append(gguf_dequantize(packed, ggml_type).double().cpu())
        offset += size
    return torch.cat(parts)


def matmul64(
    x: Tensor, weight: Tensor, types: list[int], rows: list[int], columns: int, bias: Any = None
) -> Tensor:
    """Float64 oracle of qmm: the values that x and the weight hold, multiplied."""
    values = x.double().cpu() if x.dtype == torch.float32 else unpack_activations(x, columns)
    y = values @ weight_rows(weight, types, rows, columns).T
    return y if bias is None else y + bias.double().cpu()


def _qmm(*args: Any) -> Tensor:
    return matmul64(*args).float().to(args[0].device)


def _qmm_glu(
    x: Tensor, weight: Tensor, types: list[int], rows: int, columns: int, act_mode: int
) -> Tensor:
    gate, up = matmul64(x, weight, types, [rows, rows], columns).split(rows, 1)
    y = (F.silu(gate) * up).float().to(x.device)
    return y if act_mode == 0 else ops.quant_act(y, act_mode)


def segments(
    types: list[int], rows: list[int], columns: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A stacked weight and its float64 rows."""
    weight = torch.cat(
        [
            ops.repack(
                random_packed(t, n, columns // ops.quant_geometry(t)[0], generator), t, columns
            )
            for t, n in zip(types, rows, strict=True)
        ]
    )
    return weight, weight_rows(weight, types, rows, columns)


def small_rows(count: int, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Activations that make sums of |w x| at most 1: float32 roundings then stay far below 1e-6."""
    x = torch.rand(count, weights.shape[1], generator=generator).double() * 2 - 1
    return (x / weights.abs().sum(1).max().clamp(min=1e-30)).float()


def on(device: torch.device, weight: Tensor, types: list[int], rows: list[int], k: int) -> Tensor:
    """The weight as that device's repack() gives it."""
    if device.type == "cpu":
        return weight
    parts, offset = [], 0
    for ggml_type, n in zip(types, rows, strict=True):
        size = ops.repack_bytes(ggml_type, n, k)
        packed = ops.unpack(weight[offset : offset + size], ggml_type, n, k)
        parts.append(ops.repack(packed.to(device), ggml_type, k))
        offset += size
    return torch.cat(parts)


@operator("qmm", oracle=_qmm)
def qmm(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(0)
    cases = [([t], [17], 512) for t in ops.quant_types()]
    cases += [
        ([8], [3], 32),
        ([2, 8], [16, 5], 2880),
        ([12, 23, 14, 0, 13], [16, 5, 33, 4, 20], 1280),
    ]
    for n, (types, rows, columns) in enumerate(cases):
        weight, values = segments(types, rows, columns, g)
        weight = on(device, weight, types, rows, columns)
        x = small_rows((1, 3, 0, 5)[n % 4] if n < len(cases) - 1 else 9, values, g).to(device)
        bias = torch.randn(sum(rows), generator=g).to(device) if n % 3 == 0 else None
        for act_mode in (1, 2, 0):
            yield ops.quant_act(x, act_mode), weight, types, rows, columns, bias


@operator("qmm_glu", oracle=_qmm_glu)
def qmm_glu(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(0)
    cases = [([12, 12], 40, 256), ([23, 12], 300, 1280), ([14, 1], 16, 256), ([8, 8], 1, 32)]
    for n, (types, rows, columns) in enumerate(cases):
        both = [rows, rows]
        weight, values = segments(types, both, columns, g)
        weight = on(device, weight, types, both, columns)
        x = small_rows(n + 1, values, g).to(device)
        for act_mode in (1, 2):
            yield ops.quant_act(x, act_mode), weight, types, rows, columns, 0
            # packed outputs of zeros only: a code may fall on the other side of a tie in float64
            yield ops.quant_act(x * 0, act_mode), weight, types, rows, columns, act_mode


def _repack(packed: Tensor, ggml_type: int, columns: int) -> Tensor:
    """Rows whose GGUF bytes are kept: all of them on a GPU, types without tiles on a CPU."""
    size = ops.repack_bytes(ggml_type, packed.shape[0], columns)
    return F.pad(packed.flatten(), (0, size - packed.numel()))


@operator("repack", oracle=_repack)
def repack(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(0)
    for ggml_type in ops.quant_types():
        if device.type == "cpu" and ggml_type in (2, 8, 12, 13, 14, 23):
            continue  # their tiles: tests/ops/test_repack.py
        values = ops.quant_geometry(ggml_type)[0]
        yield random_packed(ggml_type, 3, 2, g).to(device), ggml_type, 2 * values


def _unpack(weight: Tensor, ggml_type: int, rows: int, columns: int) -> Tensor:
    values, nbytes = ops.quant_geometry(ggml_type)
    return weight[: rows * (columns // values) * nbytes].view(rows, -1)


@operator("unpack", oracle=_unpack)
def unpack(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for packed, ggml_type, columns in repack(device):
        yield ops.repack(packed, ggml_type, columns), ggml_type, packed.shape[0], columns
