"""llama.cpp's kernels, compiled by ``build_llama``."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..work import Absent, Conv, Delta, Matmul, Peer, Work
from .build_llama import LIBRARY
from .files import library

__all__ = ["Llama"]

_Q8_1_BYTES = 36  # per 32 values
_PADDING = 512  # values that llama.cpp reads beyond the last column of a tile of activations
_NMSE = 1e-3  # of 8-bit activations 1.5e-4 at most; another matrix gives 2


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class Llama(Peer):
    """Activations are packed as Q8_1 beforehand: only the product is timed."""

    name = "llama.cpp, kernels compiled here"

    def __init__(self, folder: Path) -> None:
        self._lib = ctypes.CDLL(str(library(folder, LIBRARY)))
        self._lib.llama_prepare()

    def matmul(self, work: Matmul) -> Work:
        """N up to 8 by mmvq, 16 and 32 by mmq; a GLU is one kernel for a single row."""
        entry = getattr(self._lib, f"llama_matmul_{work.type}", None)
        if entry is None:
            raise Absent(f"{work.type_name} was not compiled")
        rows = work.rows // 2 if work.glu else work.rows
        dst = torch.empty(work.n, rows, device=work.x.device)
        size = work.n * work.columns // 32 * _Q8_1_BYTES + 128 * _PADDING
        packed = torch.zeros(size, dtype=torch.uint8, device=work.x.device)
        self._lib.llama_quantize(
            work.type, _pointer(work.x), _pointer(packed), ctypes.c_int64(work.columns),
            ctypes.c_int64(work.n), _stream(),
        )  # fmt: skip
        sizes = [ctypes.c_int64(s) for s in (rows, work.columns, work.n)]

        def call(weight: Tensor) -> Callable[[], object]:
            # silu is applied to what llama.cpp calls the gate; the other half is its weight
            gate, up = (weight[:rows], weight[rows:]) if work.glu else (None, weight)

            def run() -> None:
                code = entry(
                    _pointer(up), _pointer(gate), _pointer(packed), _pointer(dst), *sizes, _stream()
                )
                if code:
                    raise Absent("no kernel for this number of rows or shape")

            return run

        calls = [call(weight) for weight in work.packed]
        calls[0]()
        torch.cuda.synchronize()
        if work.result is not None:
            off = (dst - work.result).double().pow(2).sum() / work.result.double().pow(2).sum()
            if not off.item() < _NMSE:
                raise Absent(f"its result is another: NMSE {off.item():.1e}")
        return Work(calls, work.packed[0].numel(), "8-bit activations, packing not timed")

    def delta(self, work: Delta) -> Work:
        """Snapshots of every row; gates, unit keys and the gated norm are other launches."""
        t, device = work.tokens, work.device
        k_rows = torch.randn(t, work.k_heads, work.dim, device=device)
        q = k = torch.nn.functional.normalize(k_rows, dim=-1)
        v = torch.randn(t, work.heads, work.dim, device=device)
        g, beta = (
            -torch.rand(t, work.heads, device=device),
            torch.rand(t, work.heads, device=device),
        )
        dst = torch.empty_like(v)
        size = work.heads * work.dim * work.dim
        states = [torch.zeros(t + 1, size, device=device) for _ in range(work.copies)]
        ints = [ctypes.c_int64(s) for s in (work.k_heads, work.heads, t)]

        def call(state: Tensor) -> Callable[[], object]:
            def run() -> None:
                self._lib.llama_gated_delta_net(
                    *map(_pointer, (q, k, v, g, beta, state, dst, state[1:])), *ints, t, _stream()
                )

            return run

        nbytes = (1 + t) * work.state_bytes
        return Work([call(s) for s in states], nbytes, "snapshots; without gates, l2norm and norm")

    def conv(self, work: Conv) -> Work:
        """The input with its history in front, which another launch has put together."""
        t, c = work.tokens, work.channels
        weight = torch.randn(c, work.taps, device=work.device)
        dst = torch.empty(t, c, device=work.device)
        inputs = [torch.randn(c, work.taps - 1 + t, device=work.device) for _ in range(work.copies)]
        ints = [ctypes.c_int64(s) for s in (c, work.taps, t)]

        def call(x: Tensor) -> Callable[[], object]:
            def run() -> None:
                self._lib.llama_ssm_conv(*map(_pointer, (x, weight, dst)), *ints, _stream())

            return run

        nbytes = 4 * (inputs[0].numel() + weight.numel() + dst.numel())
        return Work(
            [call(x) for x in inputs], nbytes, "without building its input or keeping state"
        )
