"""The three drafters as training modules: many anchors of one sequence at once.

Equations E1-E11 of the format notes: context keys and values come from fc and hidden_norm of the
target's captured rows below the anchor; the block is [anchor, mask, ...] at the anchor's
positions, bidirectional inside itself. State-dict names are the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from model import Mlp, Norm, rope_tables, rotate
from torch import Tensor, nn

KINDS = ("dflash", "dflash2", "dspark")


@dataclass
class DrafterConfig:
    kind: str = "dflash"
    vocab_size: int = 4096
    hidden_size: int = 512
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100000.0
    block_size: int = 8
    mask_token_id: int = 4095
    target_layer_ids: tuple[int, ...] = (0, 2, 4)
    num_target_layers: int = 6
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    markov_rank: int = 64

    @classmethod
    def tiny(cls, kind: str) -> DrafterConfig:
        return cls(kind=kind, block_size=7 if kind == "dspark" else 8)

    @classmethod
    def from_hf(cls, c: dict[str, Any]) -> DrafterConfig:
        d = c["dflash_config"]
        kind = {
            "DFlashDraftModel": "dflash",
            "DFlash2DraftModel": "dflash2",
            "DSparkDraftModel": "dspark",
        }
        names = [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "num_target_layers",
        ]
        own = (
            "mask_token_id",
            "conv_kernel_size",
            "conv_group_size",
            "selector_rank",
            "selector_top_k",
            "markov_rank",
        )
        return cls(
            kind=kind[c["architectures"][0]],
            **{n: c[n] for n in names},
            **{n: d[n] for n in own if n in d},
            rope_theta=c["rope_parameters"]["rope_theta"],
            target_layer_ids=tuple(d["target_layer_ids"]),
            block_size=d.get("block_size", c.get("block_size", 16)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The published config.json."""
        own: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        top: dict[str, Any] = {}
        if self.kind == "dflash2":
            for n in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
                own[n] = getattr(self, n)
        if self.kind == "dspark":
            own |= {"markov_rank": self.markov_rank, "projector_type": "dspark"}
            top = {
                "block_size": self.block_size,
                "markov_head_type": "vanilla",
                "sample_from_anchor": True,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            }
        name = {
            "dflash": "DFlashDraftModel",
            "dflash2": "DFlash2DraftModel",
            "dspark": "DSparkDraftModel",
        }
        return {
            "architectures": [name[self.kind]],
            "model_type": "qwen3",
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "is_causal": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "num_target_layers": self.num_target_layers,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "dflash_config": own,
            **top,
        }


class Conv(nn.Module):
    """DFlash2's grouped dynamic conv; both sides' coefficients come from the normed input."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.taps, self.group = c.conv_kernel_size, c.conv_group_size
        base = torch.zeros(2, self.taps, c.hidden_size)
        base[:, 0] = 1.0  # starts as the identity
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(
            c.hidden_size, 2 * self.taps * (c.hidden_size // self.group), bias=False
        )
        nn.init.zeros_(self.kernel_projection.weight)

    def coefficients(self, u: Tensor) -> Tensor:
        """u [..., n, H] -> [..., n, 2, taps, groups]."""
        return self.kernel_projection(u).unflatten(-1, (2, self.taps, -1))

    def forward(self, x: Tensor, coef: Tensor, side: int) -> Tensor:
        """x [..., n, H] convolved along its rows; nothing enters from outside the block."""
        n = x.shape[-2]
        out = torch.zeros_like(x)
        for t in range(min(self.taps, n)):
            kernel = self.base_kernel[side, t] + coef[..., side, t, :].repeat_interleave(
                self.group, -1
            )
            out = out + (kernel * F.pad(x, (0, 0, t, 0))[..., :n, :]).to(x.dtype)
        return out


class BlockAttention(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps, 0.0)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps, 0.0)

    def forward(
        self,
        u: Tensor,
        ctx: Tensor,
        hidden: Tensor,
        tables: tuple[Tensor, Tensor],
        ctx_tables: tuple[Tensor, Tensor],
    ) -> Tensor:
        """u [B, A, n, H], ctx [B, T, H]; hidden [B, A, T]: context rows that may not be seen."""
        b, a, n, _ = u.shape
        t, d, kv = ctx.shape[1], self.c.head_dim, self.c.num_key_value_heads
        r = self.c.num_attention_heads // kv
        q = rotate(
            self.q_norm(self.q_proj(u).view(b, a, n, -1, d)), *(x[:, :, :, None] for x in tables)
        )
        k = rotate(
            self.k_norm(self.k_proj(u).view(b, a, n, -1, d)), *(x[:, :, :, None] for x in tables)
        )
        v = self.v_proj(u).view(b, a, n, kv, d)
        kc = rotate(
            self.k_norm(self.k_proj(ctx).view(b, t, kv, d)), *(x[:, None] for x in ctx_tables)
        )
        vc = self.v_proj(ctx).view(b, t, kv, d)
        q = (
            (q * d**-0.5).view(b, a, n, kv, r, d).permute(0, 3, 1, 4, 2, 5).contiguous()
        )  # b kv a r n d
        k = k.permute(0, 3, 1, 2, 4)[:, :, :, None]  # b kv a 1 n d
        v = v.permute(0, 3, 1, 2, 4)[:, :, :, None].to(q.dtype)
        kc = kc.transpose(1, 2)  # b kv t d
        vc = vc.transpose(1, 2)
        far = (q.flatten(2, 4) @ kc.transpose(-1, -2)).view(b, kv, a, r, n, t)
        far = far.masked_fill(
            hidden[:, None, :, None, None], -1e30 if far.dtype == torch.float32 else -6e4
        )
        near = q @ k.transpose(-1, -2)
        p = torch.cat([far, near.to(far.dtype)], -1).float().softmax(-1).to(vc.dtype)
        y = (p[..., :t].flatten(2, 4) @ vc).view(b, kv, a, r, n, d) + p[..., t:] @ v.to(vc.dtype)
        return self.o_proj(y.permute(0, 2, 4, 1, 3, 5).reshape(b, a, n, -1))


class DraftLayer(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(c)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps, 0.0)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps, 0.0)
        if c.kind == "dflash2":
            self.attention_conv = Conv(c)
            self.mlp_conv = Conv(c)
        self.conv = c.kind == "dflash2"

    def forward(
        self,
        x: Tensor,
        ctx: Tensor,
        hidden: Tensor,
        tables: tuple[Tensor, Tensor],
        ctx_tables: tuple[Tensor, Tensor],
    ) -> Tensor:
        u = self.input_layernorm(x)
        if self.conv:
            coef = self.attention_conv.coefficients(u)
            y = self.self_attn(self.attention_conv(u, coef, 0), ctx, hidden, tables, ctx_tables)
            x = x + self.attention_conv(y, coef, 1)
            u = self.post_attention_layernorm(x)
            coef = self.mlp_conv.coefficients(u)
            return x + self.mlp_conv(self.mlp(self.mlp_conv(u, coef, 0)), coef, 1)
        x = x + self.self_attn(u, ctx, hidden, tables, ctx_tables)
        return x + self.mlp(self.post_attention_layernorm(x))


class Selector(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(c.vocab_size, c.selector_rank) * 0.3)
        self.successor_codebook = nn.Parameter(torch.randn(c.vocab_size, c.selector_rank) * 0.05)
        self.hidden_projection = nn.Linear(c.hidden_size, c.selector_rank, bias=False)


class Markov(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = nn.Linear(c.markov_rank, c.vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.3)
        nn.init.normal_(self.markov_w2.weight, std=0.05)


class Confidence(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(c.hidden_size + c.markov_rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class Drafter(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.config = c
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps, 0.0)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps, 0.0)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_hidden_layers))
        if c.kind == "dflash2":
            self.candidate_selector = Selector(c)
        if c.kind == "dspark":
            self.markov_head = Markov(c)
            self.confidence_head = Confidence(c)

    @property
    def first_row(self) -> int:
        """The first block row that predicts: DSpark reads the anchor's row too."""
        return 0 if self.config.kind == "dspark" else 1

    def forward(
        self, target_hidden: Tensor, anchor_ids: Tensor, anchors: Tensor, embed: Tensor, n_q: int
    ) -> Tensor:
        """Hidden rows of every block.

        target_hidden [B, T, n_ids * H], anchor_ids and anchors [B, A] (token and position), embed
        [V, H].
        Returns [B, A, n_q, H], after the final norm.
        """
        c = self.config
        b, a = anchors.shape
        t = target_hidden.shape[1]
        ctx = self.hidden_norm(self.fc(target_hidden))
        rows = anchor_ids.new_full((b, a, n_q), c.mask_token_id)
        rows[:, :, 0] = anchor_ids
        x = F.embedding(rows, embed).to(ctx.dtype)
        arange = torch.arange(max(t, n_q), device=x.device)
        tables = rope_tables(anchors[..., None] + arange[:n_q], c.head_dim, c.rope_theta)
        ctx_tables = rope_tables(arange[:t], c.head_dim, c.rope_theta)
        hidden = arange[:t] >= anchors[..., None]
        for layer in self.layers:
            x = layer(x, ctx, hidden, tables, ctx_tables)
        return self.norm(x)

    def scores(self, h: Tensor, base: Tensor, prev: Tensor) -> Tensor:
        """Full-vocabulary scores of the predicting rows, given the token before each.

        h [..., N, H], base logits [..., N, V], prev [..., N]. DFlash2's selector restricts these
        to its top-k.
        """
        if self.config.kind == "dflash2":
            s = self.candidate_selector
            left = F.embedding(prev, s.predecessor_codebook) * s.hidden_projection(h)
            return base + left.to(base.dtype) @ s.successor_codebook.to(base.dtype).t()
        if self.config.kind == "dspark":
            m = self.markov_head
            return base + m.markov_w2(m.markov_w1(prev))
        return base

    def confidence(self, h: Tensor, prev: Tensor) -> Tensor:
        """Logits [...] of being right, from the row's hidden state and the token before it."""
        e = self.markov_head.markov_w1(prev)
        return self.confidence_head.proj(torch.cat([h.float(), e.float()], -1))[..., 0]

    @torch.no_grad()
    def propose(self, h: Tensor, base: Tensor, anchor_ids: Tensor) -> Tensor:
        """Greedy chain: h [..., N, H], base [..., N, V] of the predicting rows -> ids [..., N]."""
        if self.config.kind == "dflash":
            return base.argmax(-1)
        prev, out = anchor_ids, []
        for j in range(h.shape[-2]):
            s = self.scores(h[..., j : j + 1, :], base[..., j : j + 1, :], prev[..., None])[
                ..., 0, :
            ]
            if self.config.kind == "dflash2":
                top = base[..., j, :].topk(self.config.selector_top_k, -1).indices
                prev = top.gather(-1, s.gather(-1, top).argmax(-1, keepdim=True))[..., 0]
            else:
                prev = s.argmax(-1)
            out.append(prev)
        return torch.stack(out, -1)
