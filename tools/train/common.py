"""Shared by the training scripts: optimiser, schedule by time, data, checkpoints in pieces."""

from __future__ import annotations

import json
import lzma
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PIECE = 14 << 20  # bytes of tensors per checkpoint piece


class Clock:
    """Wall-clock budget of a run; `fraction` drives the schedules: slow machines finish too."""

    def __init__(self, budget: float) -> None:
        self.start, self.budget = time.monotonic(), budget

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def fraction(self) -> float:
        return min(1.0, self.elapsed / self.budget)

    def sub(self, seconds: float) -> Clock:
        """A clock for the next phase, starting now."""
        return Clock(seconds)


def schedule(fraction: float, warmup: float = 0.03, hold: float = 0.45) -> float:
    """Factor on the learning rate: linear warm-up, flat, then linear to 2 %."""
    if fraction < warmup:
        return max(0.02, fraction / warmup)
    if fraction < hold:
        return 1.0
    return max(0.02, (1.0 - fraction) / (1.0 - hold))


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon on a stack of matrices [N, r, c], r >= c."""
    x = g.transpose(-1, -2).to(torch.bfloat16 if g.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.transpose(-1, -2).float()


class Optimiser:
    """Muon for hidden matrices, AdamW for embeddings, codebooks, small projections and vectors.

    A step whose gradient is not finite changes nothing and is counted in `bad`.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], lr: float, decay: float = 0.1
    ) -> None:
        self.lr, self.decay = lr, decay
        self.matrices: dict[tuple[int, int], list[nn.Parameter]] = {}
        rest: list[nn.Parameter] = []
        for name, p in named:
            small = (
                "embed" in name or "codebook" in name or "markov" in name or "confidence" in name
            )
            if p.ndim == 2 and min(p.shape) >= 64 and not small:
                self.matrices.setdefault((max(p.shape), min(p.shape)), []).append(p)
            else:
                rest.append(p)
        self.params = [*rest, *(p for ps in self.matrices.values() for p in ps)]
        device = self.params[0].device
        self.moment = {
            s: torch.zeros(len(ps), *s, device=device) for s, ps in self.matrices.items()
        }
        self.adam = torch.optim.AdamW(
            rest, lr=0.4 * lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
        )
        self.bad = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        grads = [p.grad for p in self.params if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads))
        self.norm = norms.norm()
        good = torch.isfinite(self.norm)
        self.bad += ~good
        scale = torch.where(
            good, (1.0 / (self.norm + 1e-6)).clamp(max=1.0), torch.zeros_like(self.norm)
        )
        for g in grads:
            g.copy_(torch.where(good, g * scale, torch.zeros_like(g)))
        for group in self.adam.param_groups:
            group["lr"] = 0.4 * self.lr * factor
        self.adam.step()
        for shape, ps in self.matrices.items():
            tall = [p.grad if tuple(p.shape) == shape else p.grad.t() for p in ps]  # type: ignore[union-attr]
            g = torch.stack(tall)
            m = self.moment[shape].lerp_(g, 0.05)
            update = orthogonal(g.lerp(m, 0.95)) * (0.2 * math.sqrt(shape[0]))
            for p, u in zip(ps, update, strict=True):
                p.mul_(1.0 - self.lr * factor * self.decay)
                p.add_(u if tuple(p.shape) == shape else u.t(), alpha=-self.lr * factor)
        for p in self.params:
            p.grad = None


def load_tokens(paths: list[Path]) -> np.ndarray[Any, Any]:
    """uint16 ids from .u16 or .u16.xz files, in order."""
    parts = []
    for p in paths:
        raw = lzma.decompress(p.read_bytes()) if p.suffix == ".xz" else p.read_bytes()
        parts.append(np.frombuffer(raw, dtype="<u2"))
    return np.concatenate(parts)


def batches(ids: Tensor, batch: int, seq: int, seed: int) -> Iterator[Tensor]:
    """Rows [batch, seq + 1] for ever; each epoch cuts at a new offset and shuffles."""
    g = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(seq, (1,), generator=g))
        count = (len(ids) - offset - 1) // seq
        order = torch.randperm(count, generator=g)
        index = torch.arange(seq + 1, device=ids.device)
        for i in range(0, count - batch + 1, batch):
            at = (offset + order[i : i + batch] * seq).to(ids.device)
            yield ids[at[:, None] + index].long()


def save_pieces(
    state: dict[str, Tensor], out: Path, name: str, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes name.N.safetensors, each below 15 MiB; every file is replaced in one step."""
    out.mkdir(parents=True, exist_ok=True)
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, value in state.items():
        value = value.detach().to("cpu", dtype).contiguous()
        n = value.numel() * value.element_size()
        if size + n > PIECE and pieces[-1]:
            pieces.append({})
            size = 0
        pieces[-1][key] = value
        size += n
    for i, piece in enumerate(pieces):
        part = out.parent / f".{name}.part"
        save_file(piece, part)
        os.replace(part, out / f"{name}.{i}.safetensors")


def load_pieces(folder: Path, name: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for p in sorted(folder.glob(f"{name}.*.safetensors")):
        state.update(load_file(p))
    if not state:
        raise FileNotFoundError(f"{folder}: no pieces named {name}.N.safetensors")
    return state


class Log:
    """Rows of numbers, printed and kept in one JSON file."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []  # type: ignore[var-annotated]

    def add(self, **row: Any) -> None:
        row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        self.rows.append(row)
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.rows))
