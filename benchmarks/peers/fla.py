"""fla-core's recurrent Gated DeltaNet kernel (Triton)."""

import importlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..work import Delta, Peer, Work
from .files import on_path

__all__ = ["Fla"]


class Fla(Peer):
    """Keeps the final state alone: nothing to roll back to."""

    def __init__(self, folder: Path) -> None:
        on_path(folder, "fla")
        self.name = f"fla-core {importlib.import_module('fla').__version__}"
        module = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
        self._run = module.fused_recurrent_gated_delta_rule_fwd

    def delta(self, work: Delta) -> Work:
        """Gates and unit keys in the kernel, no norm."""
        shape = 1, work.tokens

        def random(*size: int) -> Tensor:
            return torch.randn(*shape, *size, device=work.device, dtype=torch.bfloat16)

        q, k = random(work.k_heads, work.dim), random(work.k_heads, work.dim)
        v, g, beta = random(work.heads, work.dim), random(work.heads), random(work.heads)
        A_log, dt_bias = (torch.randn(work.heads, device=work.device) for _ in range(2))
        states = [
            torch.zeros(1, work.heads, work.dim, work.dim, device=work.device)
            for _ in range(work.copies)
        ]

        def call(state: Tensor) -> Callable[[], object]:
            return lambda: self._run(
                q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
                scale=work.dim**-0.5, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True,
            )  # fmt: skip

        note = "bfloat16, final state only, without norm"
        return Work([call(s) for s in states], 2 * work.state_bytes, note)
