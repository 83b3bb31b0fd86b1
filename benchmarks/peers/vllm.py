"""Kernels of vLLM's wheel: Marlin, Gated DeltaNet, convolution, norm."""

import importlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..work import Absent, Conv, Delta, Matmul, Norm, Peer, Work
from .files import library, on_path

__all__ = ["Vllm"]

_GROUP = 128
_UINT4_B8 = (1 << 50) | (8 << 17) | (4 << 8)  # vLLM's id of 4-bit codes with an offset of 8
_MOST_TOKENS = 8  # of its Gated DeltaNet kernel


class Vllm(Peer):
    """Activations are bfloat16; Marlin's weights are 4-bit codes with a scale per 128 (W4A16)."""

    name = "vLLM 0.33"

    def __init__(self, folder: Path) -> None:
        torch.ops.load_library(str(library(folder, "vllm_kernels.so")))
        self._ops = torch.ops._C
        self._conv: Callable[..., Tensor] | None = None
        self._weights: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
        try:
            on_path(folder, "vllm_causal_conv1d.py")
            self._conv = importlib.import_module("vllm_causal_conv1d").causal_conv1d_update
        except Absent:
            pass

    def matmul(self, work: Matmul) -> Work:
        """Marlin; random codes, so only its time means something."""
        if work.glu:
            raise Absent("Marlin has no fused GLU")
        if work.type_name != "Q4_K":
            raise Absent("Marlin's 4 bits are compared with Q4_K alone")
        rows, columns, device = work.rows, work.columns, work.x.device
        key = rows, columns, len(work.packed)
        if key not in self._weights:  # one shape at a time
            self._weights = {key: [self._marlin_weight(rows, columns, device) for _ in work.packed]}
        x = work.x.to(torch.bfloat16)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        workspace = torch.zeros(multiprocessors, dtype=torch.int32, device=device)

        def call(weight: tuple[Tensor, Tensor]) -> Callable[[], object]:
            return lambda: self._ops.marlin_gemm(
                x, None, weight[0], None, weight[1], None, None, None, workspace, _UINT4_B8,
                work.n, rows, columns, False, True, False,
            )  # fmt: skip

        weights = self._weights[key]
        nbytes = sum(t.numel() * t.element_size() for t in weights[0])
        return Work([call(w) for w in weights], nbytes, "Marlin W4A16, groups of 128")

    @staticmethod
    def _marlin_weight(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = columns // 16, 2 * rows
        codes = torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, device=device)
        scales = torch.rand(columns // _GROUP, rows, device=device).mul(0.01).to(torch.bfloat16)
        return codes, scales

    def delta(self, work: Delta) -> Work:
        """Gates, unit keys, gated norm, the state after every row."""
        if work.tokens > _MOST_TOKENS:
            raise Absent(f"its kernel takes {_MOST_TOKENS} rows at most")
        t, device = work.tokens, work.device

        def random(*size: int) -> Tensor:
            return torch.randn(*size, device=device, dtype=torch.bfloat16)

        width = 2 * work.k_heads * work.dim + work.heads * work.dim
        mixed, a, b = random(t, width), random(t, work.heads), random(t, work.heads)
        A_log, dt_bias = (torch.randn(work.heads, device=device) for _ in range(2))
        gate, out = (random(t, work.heads, work.dim) for _ in range(2))
        weight = torch.ones(work.dim, device=device, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, t], dtype=torch.int32, device=device)
        accepted = torch.ones(1, dtype=torch.int32, device=device)
        slots = 1 + t * work.copies
        state = torch.zeros(slots, work.heads, work.dim, work.dim, device=device)
        indices = torch.arange(1, slots, dtype=torch.int32, device=device).view(-1, 1, t)

        def call(index: Tensor) -> Callable[[], object]:
            return lambda: self._ops.fused_gdn_decode_post_conv_mtp(
                mixed, a, b, A_log, dt_bias, index, cu_seqlens, accepted, state, gate, weight, out,
                work.dim**-0.5, 1e-6, "silu",
            )  # fmt: skip

        note = "bfloat16 activations, snapshots"
        return Work([call(i) for i in indices], (1 + t) * work.state_bytes, note)

    def conv(self, work: Conv) -> Work:
        """Its Triton kernel, with the window that speculation needs."""
        if self._conv is None:
            raise Absent("the folder has no vllm_causal_conv1d.py")
        update, t, device = self._conv, work.tokens, work.device
        x = torch.randn(t, work.channels, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        weight = torch.randn(work.channels, work.taps, device=device, dtype=torch.bfloat16)
        width = work.taps - 1 + t - 1
        state = torch.zeros(
            1 + work.copies, width, work.channels, device=device, dtype=torch.bfloat16
        ).transpose(1, 2)
        cu_seqlens = torch.tensor([0, t], dtype=torch.int32, device=device)
        accepted = torch.ones(1, dtype=torch.int32, device=device)
        slots = torch.arange(1, 1 + work.copies, dtype=torch.int32, device=device).view(-1, 1)

        def call(slot: Tensor) -> Callable[[], object]:
            return lambda: update(
                x, state, weight, None, "silu", conv_state_indices=slot,
                num_accepted_tokens=accepted, query_start_loc=cu_seqlens, max_query_len=t, out=out,
            )  # fmt: skip

        nbytes = 2 * (2 * x.numel() + weight.numel() + 2 * width * work.channels)
        return Work([call(s) for s in slots], nbytes, "bfloat16")

    def norm(self, work: Norm) -> Work:
        """fused_add_rms_norm, in bfloat16 and in place."""
        x, residual = (
            torch.randn(work.n, work.columns, device=work.device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        weight = torch.ones(work.columns, device=work.device, dtype=torch.bfloat16)
        nbytes = 2 * 4 * x.numel()
        call = lambda: self._ops.fused_add_rms_norm(x, residual, weight, 1e-6)  # noqa: E731
        return Work([call], nbytes, "bfloat16 in and out, nothing packed")
