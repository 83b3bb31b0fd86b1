"""Layers of the native targets: attention, Gated DeltaNet, FFN."""

import torch
from torch import Tensor

from .. import ops
from ..decoding.kv_cache import Rows
from ..drafters.rope import RopeConfig
from ..gguf.tensor import QuantTensor
from ..nn import ACT_PLANES, Module, QuantGLU, QuantLinear
from .state import GDNShape, TargetState

__all__ = ["Attention", "FeedForward", "GatedDeltaNet"]


class Attention(Module):
    """Full attention of a target: q/k norm if the file has it, rotary part, optional output gate.

    Args:
        qkv: segments q (heads side by side, each ``[q | gate]`` if gated), k, v; or all in one.
        out: output projection.
        q_norm, k_norm: float32 ``[head_dim]`` or None.
        heads, kv_heads, head_dim: sizes.
        gated: whether each query head brings a sigmoid gate.
        eps: of the norms.
        rope: rotary embedding.
        bias: of q, k and v side by side, or None.
        out_bias: of the output projection, or None.
        packed_mode: activations of quantized weights, as of ``nn.QuantLinear``.
    """

    inv_freq: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    def __init__(
        self,
        qkv: list[QuantTensor],
        out: QuantTensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        gated: bool,
        eps: float,
        rope: RopeConfig,
        bias: Tensor | None = None,
        out_bias: Tensor | None = None,
        packed_mode: int = ACT_PLANES,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.gated, self.eps, self.scale = gated, eps, head_dim**-0.5
        self.attention_scaling = rope.attention_scaling
        self.qkv = QuantLinear(qkv, bias, packed_mode)
        self.out = QuantLinear([out], out_bias, packed_mode)
        self.act_mode = self.qkv.act_mode
        self.width = head_dim * (2 if gated else 1)
        self.columns = [heads * self.width, kv_heads * head_dim, kv_heads * head_dim]
        self.register_buffer("inv_freq", rope.inv_freq(), persistent=False)
        self.register_buffer("q_norm", q_norm, persistent=False)
        self.register_buffer("k_norm", k_norm, persistent=False)

    def forward(self, u: Tensor, step: Rows, state: TargetState, index: int) -> Tensor:
        """Run rows that stand at ``step.positions``; ``index`` counts the attention layers."""
        rows, width = step.rows, self.width
        qkv = self.qkv(u)
        q, k, v = qkv.split(self.columns, 1)
        q = q.view(rows, self.heads, width)
        k_cache, v_cache = state.kv.k[index], state.kv.v[index]
        rotated = ops.qk_norm_rope_store(
            q[..., : self.head_dim] if self.gated else q,
            k.view(rows, self.kv_heads, self.head_dim),
            v.view(rows, self.kv_heads, self.head_dim),
            self.q_norm,
            self.k_norm,
            self.eps,
            False,
            step.positions,
            self.inv_freq,
            self.attention_scaling,
            [],
            step.positions,
            k_cache,
            v_cache,
        )
        o = ops.block_attention(
            rotated,
            k_cache,
            v_cache,
            state.kv.page_table,
            step.lengths,
            step.cu_seqlens,
            self.scale,
            0,
            True,
            None,
            q[..., self.head_dim :] if self.gated else None,
            1.0,
            self.out.act_mode,
        )
        return self.out(o)


class GatedDeltaNet(Module):
    """Gated DeltaNet layer of a GGUF target: V heads in tiled order.

    Args:
        segments: qkv, z, b, a projections.
        out: output projection.
        conv: float32 ``[channels, taps]``.
        A: ``-exp(A_log)``, float32 ``[v_heads]``.
        dt_bias: float32 ``[v_heads]``.
        norm: weight of the gated norm, float32 ``[v_dim]``.
        shape: sizes.
        eps: of the gated norm.
        packed_mode: activations of quantized weights, as of ``nn.QuantLinear``.
    """

    conv: Tensor
    A: Tensor
    dt_bias: Tensor
    norm: Tensor

    def __init__(
        self,
        segments: list[QuantTensor],
        out: QuantTensor,
        conv: Tensor,
        A: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        shape: GDNShape,
        eps: float,
        packed_mode: int = ACT_PLANES,
    ) -> None:
        super().__init__()
        self.shape, self.eps = shape, eps
        self.proj = QuantLinear(segments, packed_mode=packed_mode)
        self.out = QuantLinear([out], packed_mode=packed_mode)
        self.act_mode = self.proj.act_mode
        self.columns = [shape.channels, shape.v_heads * shape.v_dim, shape.v_heads, shape.v_heads]
        for name, value in (("conv", conv), ("A", A), ("dt_bias", dt_bias), ("norm", norm)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, u: Tensor, step: Rows, state: TargetState, index: int) -> Tensor:
        """Run rows of one sequence; ``index`` counts the recurrent layers."""
        s, r = self.shape, state.recurrent
        assert r is not None
        qkv, z, b, a = self.proj(u).split(self.columns, 1)
        mixed = ops.ssm_conv_step(
            qkv, r.conv[index], self.conv, None, True, r.slots, r.conv_accepted,
            step.cu_seqlens,
        )  # fmt: skip
        common = (
            mixed,
            a,
            b,
            self.A,
            self.dt_bias,
            z,
            self.norm,
            self.eps,
            False,
            s.k_heads,
            s.k_dim,
            True,
            r.state[index],
        )
        mode = self.out.act_mode
        if (slot := r.prefill_slot) is not None:
            o = ops.gdn_prefill(*common, slot, torch.ones_like(slot), step.cu_seqlens, mode)
        elif r.kind == "snapshots":
            o = ops.gdn_step(*common, r.indices, r.accepted, step.cu_seqlens, mode)
        else:
            o = ops.gdn_journal_step(
                *common, r.slots, r.accepted, r.parity,
                r.journal_k[index], r.journal_u[index], r.journal_decay[index],
                step.cu_seqlens, mode,
            )  # fmt: skip
        return self.out(o)


class FeedForward(Module):
    """``down(silu(gate x) * up x)``.

    Args:
        gate, up, down: weights; gate and up may be of different types.
        packed_mode: activations of quantized weights, as of ``nn.QuantLinear``.
    """

    def __init__(
        self,
        gate: QuantTensor,
        up: QuantTensor,
        down: QuantTensor,
        packed_mode: int = ACT_PLANES,
    ) -> None:
        super().__init__()
        self.down = QuantLinear([down], packed_mode=packed_mode)
        self.glu = QuantGLU(gate, up, self.down.act_mode, packed_mode)
        self.act_mode = self.glu.act_mode

    def forward(self, u: Tensor) -> Tensor:
        """float32 or packed rows -> float32 ``[rows, hidden]``."""
        return self.down(self.glu(u))
