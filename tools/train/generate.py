"""Batched sampling from the target: static caches, one CUDA graph per step on a GPU."""

from __future__ import annotations

import torch
from model import Target, rope_tables
from torch import Tensor


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One row: q, k, v [B, H, d]; log_decay, beta [B, H]; state [B, H, dk, dv]."""
    g = log_decay.exp()[..., None]
    from_k = (k[..., None] * state).sum(-2)  # what the old state answers to k and to q
    from_q = (q[..., None] * state).sum(-2)
    write = (v - g * from_k) * beta[..., None]
    out = g * from_q + (q * k).sum(-1, keepdim=True) * write
    return out, g[..., None] * state + k[..., None] * write[..., None, :]


class Sampler:
    """Generates `batch` rows of `length` tokens each from prompts of equal length."""

    def __init__(
        self, target: Target, batch: int, length: int, micro: int = 1024, exact: bool = False
    ) -> None:
        c = target.config
        self.target, self.batch, self.length, self.micro = target, batch, length, min(micro, batch)
        self.device = target.model.embed_tokens.weight.device
        cuda = self.device.type == "cuda" and not exact
        self.fast = cuda  # bf16, one graph per step; `exact` keeps float32
        self.autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=cuda)
        self.dtype = torch.bfloat16 if cuda else torch.float32
        d = self.device
        conv = (
            2 * c.linear_num_key_heads * c.linear_key_head_dim
            + c.linear_num_value_heads * c.linear_value_head_dim
        )
        self.caches: list[tuple[Tensor, Tensor]] = []
        for kind in c.layer_types:
            if kind == "linear_attention":
                window = torch.zeros(
                    batch, c.linear_conv_kernel_dim - 1, conv, device=d, dtype=self.dtype
                )
                heads = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
                self.caches.append((window, torch.zeros(batch, *heads, device=d)))
            else:
                kv = (batch, c.num_key_value_heads, length, c.head_dim)
                self.caches.append(
                    (
                        torch.zeros(kv, device=d, dtype=self.dtype),
                        torch.zeros(kv, device=d, dtype=self.dtype),
                    )
                )
        self.ids = torch.zeros(batch, length, dtype=torch.long, device=d)
        self.pos = torch.zeros(1, dtype=torch.long, device=d)
        self.temperature = torch.zeros(batch, 1, device=d)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.delta = torch.compile(delta_step, dynamic=False) if cuda else delta_step

    def _pick(self, logits: Tensor) -> Tensor:
        """Greedy where the temperature is 0, else a Gumbel-max sample. logits [B, V] float32."""
        t = self.temperature
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        return (logits + t * noise).argmax(-1)

    def _step(self) -> None:
        """Reads ids[:, pos], writes ids[:, pos + 1], advances pos."""
        target, c = self.target, self.target.config
        tok = self.ids.index_select(1, self.pos)
        x = target.model.embed_tokens(tok).to(self.dtype)
        cos, sin = rope_tables(self.pos, c.rotary_dim, c.rope_theta)
        dark = torch.arange(self.length, device=self.device) > self.pos
        for layer, (a, b) in zip(target.model.layers, self.caches, strict=True):
            u = layer.input_layernorm(x)
            if layer.kind == "linear_attention":
                q, k, v, log_decay, beta, window = layer.linear_attn.inputs(u, a)
                a.copy_(window)
                with torch.autocast(self.device.type, enabled=False):
                    out, state = self.delta(
                        q[:, :, 0], k[:, :, 0], v[:, :, 0], log_decay[..., 0], beta[..., 0], b
                    )
                b.copy_(state)
                out = out[:, :, None]
                y = layer.linear_attn.finish(u, out)
            else:
                q, k, v, gate = layer.self_attn.project(u, cos, sin)
                a.index_copy_(2, self.pos, k.to(a.dtype))
                b.index_copy_(2, self.pos, v.to(b.dtype))
                n = c.num_key_value_heads
                q = q.to(a.dtype).view(
                    self.batch, n, -1, c.head_dim
                )  # query heads of one KV head as rows
                s = (q @ a.transpose(-1, -2)).float() * c.head_dim**-0.5
                p = s.masked_fill(dark, float("-inf")).softmax(-1).to(b.dtype)
                y = layer.self_attn.finish((p @ b).view(self.batch, -1, 1, c.head_dim), gate)
            x = x + y
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = target.lm_head(target.model.norm(x))[:, 0].float()
        self.pos += 1
        self.ids.index_copy_(1, self.pos, self._pick(logits)[:, None])

    @torch.no_grad()
    def run(self, prompts: Tensor, temperature: Tensor) -> Tensor:
        """prompts [batch, P], temperature [batch] -> ids [batch, length], valid until run again."""
        p = prompts.shape[1]
        self.ids[:, :p] = prompts
        self.temperature.copy_(temperature[:, None])
        with self.autocast:
            for i in range(0, self.batch, self.micro):
                rows = slice(i, i + self.micro)
                h, _, caches = self.target.hidden(prompts[rows])
                for (a, b), (ca, cb) in zip(self.caches, caches, strict=True):
                    if a.ndim == 4:
                        a[rows, :, :p] = ca.to(a.dtype)
                        b[rows, :, :p] = cb.to(b.dtype)
                    else:
                        a[rows] = ca.to(a.dtype)
                        b[rows] = cb
                logits = self.target.lm_head(h[:, -1]).float()
                t, self.temperature = self.temperature, self.temperature[rows]
                self.ids[rows, p] = self._pick(logits)
                self.temperature = t
            if self.fast and self.graph is None:
                saved = [(a.clone(), b.clone()) for a, b in self.caches]
                ids, self.graph = self.ids.clone(), torch.cuda.CUDAGraph()
                self.pos.fill_(p)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    self._step()
                torch.cuda.current_stream().wait_stream(side)
                with torch.cuda.graph(self.graph):
                    self._step()
                self.ids.copy_(ids)
                for (a, b), (sa, sb) in zip(self.caches, saved, strict=True):
                    a.copy_(sa)
                    b.copy_(sb)
            self.pos.fill_(p)
            for _ in range(self.length - 1 - p):
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self._step()
        return self.ids


def prompts_from(ids: Tensor, starts: Tensor, batch: int, length: int) -> Tensor:
    """Half of the rows begin where a file begins, half anywhere. ids [N] on any device."""
    whole = starts[torch.randint(len(starts), (batch,), device=ids.device)]
    anywhere = torch.randint(len(ids) - length, (batch,), device=ids.device)
    at = torch.where(torch.rand(batch, device=ids.device) < 0.5, whole, anywhere).clamp(
        max=len(ids) - length
    )
    return ids[at[:, None] + torch.arange(length, device=ids.device)].long()


def distinct(ids: Tensor, n: int = 4) -> float:
    """Distinct n-grams over all n-grams, within each row, averaged. ids [B, T]."""
    grams = ids.unfold(1, n, 1)
    code = sum(grams[..., i].long() * 4096 ** (n - 1 - i) for i in range(n))
    return sum(len(torch.unique(r)) / len(r) for r in code) / len(code)
