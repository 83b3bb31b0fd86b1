"""The target (Qwen3.5-type hybrid) as a compact training module.

State-dict names are those of transformers' Qwen3_5ForCausalLM; `parity.py` compares the two. The
gated delta rule runs in chunks of 64 as matrix products only: the triangular inverse by block
doubling, and the state between chunks as S <- M S + N with M and N of every chunk computed at
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class TargetConfig:
    vocab_size: int = 4096
    hidden_size: int = 512
    intermediate_size: int = 1024
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 256
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rotary_dim: int = 64
    rope_theta: float = 100000.0
    mrope_section: tuple[int, ...] = (11, 11, 10)
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    layer_types: tuple[str, ...] = field(
        default=("linear_attention", "linear_attention", "full_attention") * 2
    )

    @classmethod
    def from_hf(cls, c: dict[str, Any]) -> TargetConfig:
        rope = c["rope_parameters"]
        names = [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "rms_norm_eps",
            "tie_word_embeddings",
        ]
        return cls(
            **{n: c[n] for n in names},
            rotary_dim=int(c["head_dim"] * rope["partial_rotary_factor"]),
            rope_theta=rope["rope_theta"],
            mrope_section=tuple(rope["mrope_section"][:3]),
            layer_types=tuple(c["layer_types"]),
        )

    def to_hf(self, special: dict[str, int]) -> dict[str, Any]:
        """The published config.json. On text, M-RoPE is plain RoPE: sections do not matter."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": special["<|endoftext|>"],
            "pad_token_id": special["<|endoftext|>"],
            "dtype": "float32",
            "full_attention_interval": 3,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "num_hidden_layers": len(self.layer_types),
            "max_position_embeddings": 2048,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
                "mrope_interleaved": True,
                "mrope_section": list(self.mrope_section),
            },
            "use_cache": True,
            "layer_types": list(self.layer_types),
            **{
                n: getattr(self, n)
                for n in [
                    "vocab_size",
                    "hidden_size",
                    "intermediate_size",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "head_dim",
                    "linear_num_key_heads",
                    "linear_num_value_heads",
                    "linear_key_head_dim",
                    "linear_value_head_dim",
                    "linear_conv_kernel_dim",
                    "rms_norm_eps",
                    "tie_word_embeddings",
                ]
            },
        }


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in float32, back in x's type."""
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope_tables(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., dim] of integer positions, NeoX halves."""
    inv = 1.0 / theta ** (
        torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    )
    angle = positions[..., None].float() * inv
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotation of the first cos.shape[-1] dims of x [..., D]; the others pass."""
    n = cos.shape[-1]
    r, rest = x[..., :n].float(), x[..., n:]
    a, b = r.chunk(2, -1)
    out = (r * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)
    return torch.cat([out, rest], -1) if rest.shape[-1] else out


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., n, n], n a power of two."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        n = a.shape[-1]
        idx = torch.arange(n, device=a.device)
        inv = torch.eye(n, device=a.device, dtype=a.dtype).expand_as(a)
        size = 1
        while size < n:  # inv is the inverse of the diagonal blocks of `size`; join pairs of blocks
            same = (idx[:, None] // (2 * size)) == (idx[None, :] // (2 * size))
            off = same & ((idx[:, None] // size) != (idx[None, :] // size))
            inv = inv - inv @ (a * off) @ inv
            size *= 2
        ctx.save_for_backward(inv)
        return inv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inv,) = ctx.saved_tensors
        t = inv.transpose(-1, -2)
        return -(t @ grad @ t).tril(-1)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Chunked gated delta rule in float32.

    q, k [B, H, T, dk] (already l2-normalised, q scaled), v [B, H, T, dv], log_decay and beta [B,
    H, T],
    state [B, H, dk, dv] or None. Returns out [B, H, T, dv] and the state after the last row.
    """
    b, h, t, dk = q.shape
    dv = v.shape[-1]
    pad = -t % chunk
    if pad:  # beta 0 and decay 1: rows that leave the state alone
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        log_decay, beta = (F.pad(x, (0, pad)) for x in (log_decay, beta))
    n = (t + pad) // chunk
    q, k, v = (x.reshape(b, h, n, chunk, -1) for x in (q, k, v))
    g = log_decay.reshape(b, h, n, chunk).cumsum(-1)
    kb = k * beta.reshape(b, h, n, chunk, 1)
    vb = v * beta.reshape(b, h, n, chunk, 1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, -1e30).exp()
    kt = k.transpose(-1, -2)
    inv = UnitLowerInverse.apply(((kb @ kt) * decay).tril(-1))
    u = inv @ vb  # rows to write if the chunk began from a zero state
    w = inv @ (kb * g.exp()[..., None])  # how the entering state changes them
    last = g[..., -1:]
    kd = (k * (last - g).exp()[..., None]).transpose(-1, -2)
    m = last.exp()[..., None] * torch.eye(dk, device=q.device, dtype=q.dtype) - kd @ w
    add = kd @ u
    s = torch.zeros(b, h, dk, dv, device=q.device, dtype=q.dtype) if state is None else state
    entering = []
    for i in range(n):
        entering.append(s)
        s = m[:, :, i] @ s + add[:, :, i]
    s0 = torch.stack(entering, 2)
    out = (q * g.exp()[..., None]) @ s0 + ((q @ kt) * decay) @ (u - w @ s0)
    return out.reshape(b, h, n * chunk, dv)[:, :, :t], s


class Norm(nn.Module):
    """RMSNorm; `offset` 1 stores weight - 1 (Qwen3.5), 0 the weight itself."""

    def __init__(self, dim: int, eps: float, offset: float) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight + self.offset, self.eps)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps, 1.0)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps, 1.0)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, H] -> q [B, nh, T, d], k and v [B, nkv, T, d], gate [B, T, nh*d]."""
        b, t, _ = x.shape
        d = self.c.head_dim
        q, gate = self.q_proj(x).view(b, t, -1, 2 * d).chunk(2, -1)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, -1, d)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, d).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v, gate.reshape(b, t, -1)

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v, gate = self.project(x, cos, sin)
        r = q.shape[1] // k.shape[1]
        ke, ve = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        y = F.scaled_dot_product_attention(q, ke, ve, is_causal=True)
        return self.finish(y, gate), (k, v)


class GatedDeltaNet(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.kdim = c.linear_num_key_heads * c.linear_key_head_dim
        self.vdim = c.linear_num_value_heads * c.linear_value_head_dim
        conv = 2 * self.kdim + self.vdim
        self.conv1d = nn.Conv1d(conv, conv, c.linear_conv_kernel_dim, groups=conv, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(c.linear_num_value_heads))
        self.A_log = nn.Parameter(torch.empty(c.linear_num_value_heads).uniform_(0.01, 16).log())
        self.norm = Norm(c.linear_value_head_dim, c.rms_norm_eps, 0.0)
        self.out_proj = nn.Linear(self.vdim, c.hidden_size, bias=False)
        self.in_proj_qkv = nn.Linear(c.hidden_size, conv, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, self.vdim, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, c.linear_num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, c.linear_num_value_heads, bias=False)

    def inputs(
        self, x: Tensor, window: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, H], window [B, K-1, C] (conv history) -> q, k, v, log_decay, beta, window."""
        c = self.c
        b, t, _ = x.shape
        mixed = torch.cat([window.to(x.dtype), self.in_proj_qkv(x).to(x.dtype)], 1)
        taps = c.linear_conv_kernel_dim
        weight = self.conv1d.weight[:, 0].float()
        y = sum(mixed[:, i : i + t].float() * weight[:, i] for i in range(taps))
        q, k, v = F.silu(y).split([self.kdim, self.kdim, self.vdim], -1)
        r = c.linear_num_value_heads // c.linear_num_key_heads

        def heads(z: Tensor, d: int) -> Tensor:
            return z.reshape(b, t, -1, d).transpose(1, 2)

        def unit(z: Tensor) -> Tensor:
            return z * torch.rsqrt(z.square().sum(-1, keepdim=True) + 1e-6)

        q = (
            unit(heads(q, c.linear_key_head_dim)).repeat_interleave(r, 1)
            * c.linear_key_head_dim**-0.5
        )
        k = unit(heads(k, c.linear_key_head_dim)).repeat_interleave(r, 1)
        v = heads(v, c.linear_value_head_dim)
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        log_decay = (
            -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        ).transpose(1, 2)
        return q, k, v, log_decay, beta, mixed[:, t:]

    def finish(self, x: Tensor, out: Tensor) -> Tensor:
        """Gated norm and output projection; out [B, nv, T, dv] float32."""
        b, t, _ = x.shape
        z = self.in_proj_z(x).view(b, t, -1, self.c.linear_value_head_dim)
        y = self.norm(out.transpose(1, 2)) * F.silu(z.float())
        return self.out_proj(y.to(x.dtype).reshape(b, t, -1))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        window = x.new_zeros(
            x.shape[0], self.c.linear_conv_kernel_dim - 1, 2 * self.kdim + self.vdim
        )
        q, k, v, log_decay, beta, window = self.inputs(x, window)
        with torch.autocast(x.device.type, enabled=False):
            out, state = gated_delta(q, k, v, log_decay, beta)
        return self.finish(x, out), (window, state)


class Layer(nn.Module):
    def __init__(self, c: TargetConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps, 1.0)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps, 1.0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        u = self.input_layernorm(x)
        if self.kind == "linear_attention":
            y, cache = self.linear_attn(u)
        else:
            y, cache = self.self_attn(u, cos, sin)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Body(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.layer_types)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps, 1.0)


class Target(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.config = c
        self.model = Body(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                std = 0.02
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * len(c.layer_types))
                nn.init.normal_(p, std=std)

    def hidden(
        self, ids: Tensor, capture: tuple[int, ...] = (), stop: int | None = None
    ) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
        """ids [B, T] -> post-norm hidden [B, T, H], captured layers' outputs, every layer's cache.

        With `stop`, the layers after it do not run and the first result is that layer's output.
        """
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        cos, sin = rope_tables(
            torch.arange(ids.shape[1], device=ids.device),
            self.config.rotary_dim,
            self.config.rope_theta,
        )
        taken, caches = [], []
        for i, layer in enumerate(self.model.layers):
            x, cache = layer(x, cos, sin)
            caches.append(cache)
            if i in capture:
                taken.append(x)
            if i == stop:
                return x, taken, caches
        return self.model.norm(x), taken, caches

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return self.lm_head(self.hidden(ids)[0])

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of labels [B, T] given ids [B, T]."""
        return F.cross_entropy(self(ids).flatten(0, 1).float(), labels.flatten())
