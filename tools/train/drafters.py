"""Trains the three drafters on the target's own text, in one process.

The target first writes the text (greedy and sampled continuations of corpus prefixes, kept in
memory only). Then DFlash trains; DFlash2 and DSpark start from it and share every batch's captured
rows.

    python tools/train/drafters.py --target PIECES --data D.u16.xz --held held.u16 --out OUT
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Clock, Log, Optimiser, load_pieces, load_tokens, save_pieces, schedule
from drafter import KINDS, Drafter, DrafterConfig
from generate import Sampler, distinct, prompts_from
from model import Target, TargetConfig
from target import held_out_loss
from torch import Tensor

PROMPTS = (256, 512, 384, 576, 128, 512)


def write_pool(
    target: Target, corpus: Tensor, batch: int, length: int, rounds: int, limit: float
) -> list[tuple[int, Tensor]]:
    """(prompt length, ids [batch, length] int16) per round; 60 % greedy, 40 % at 0.7."""
    starts = (corpus[:-length] == target.config.vocab_size - 4).nonzero()[:, 0] + 1
    sampler = Sampler(target, batch, length)
    t0, pool = time.monotonic(), []
    for i in range(rounds):
        p = min(PROMPTS[i % len(PROMPTS)], length // 2)
        temperature = torch.where(torch.arange(batch, device=corpus.device) < 0.6 * batch, 0.0, 0.7)
        ids = sampler.run(prompts_from(corpus, starts, batch, p), temperature)
        pool.append((p, ids.to(torch.int16)))
        if i == 0:
            own = pool[0][1][:: max(1, batch // 64), p:].cpu()
            print(
                f"distinct 4-grams: greedy {distinct(own[: len(own) // 2]):.3f}"
                f" sampled {distinct(own[-16:]):.3f}"
            )
        if time.monotonic() - t0 > limit:
            break
    total = sum(x[:, p:].numel() for p, x in pool)
    print(
        f"pool: {len(pool)} rounds, {total / 1e6:.2f} M own tokens"
        f" in {time.monotonic() - t0:.1f} s",
        flush=True,
    )
    return pool


class Batches:
    """The pool with the target's captured rows beside it, and random anchors."""

    def __init__(
        self, target: Target, pool: list[tuple[int, Tensor]], rows: int, anchors: int
    ) -> None:
        self.target, self.pool, self.rows, self.anchors = target, pool, rows, anchors
        self.device = pool[0][1].device
        self.ids_of = DrafterConfig().target_layer_ids
        self.captured: list[Tensor] = []
        for _, ids in pool:  # every row once: cheaper than a forward pass per batch
            first = self.capture(ids[:1].long())
            kept = first.new_empty(len(ids), *first.shape[1:])
            for i in range(0, len(ids), 128):
                kept[i : i + 128] = self.capture(ids[i : i + 128].long())
            self.captured.append(kept)

    @torch.no_grad()
    def capture(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> [B, T, 3H], outputs of the drafters' target layers."""
        with torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"
        ):
            _, taken, _ = self.target.hidden(ids, self.ids_of, stop=self.ids_of[-1])
        return torch.cat(taken, -1)

    def places(self, ids: Tensor, prompt: int, count: int) -> Tensor:
        """Anchor positions [B, count] inside the target's own text, whole blocks before its end."""
        draw = torch.rand(len(ids), ids.shape[1] - 9 - prompt, device=self.device)
        return draw.argsort(-1)[:, :count] + prompt

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """captured [B, T, 3H], ids [B, T], anchors [B, A]."""
        i = int(torch.randint(len(self.pool), (1,)))
        prompt, ids = self.pool[i]
        rows = torch.randint(len(ids), (self.rows,), device=self.device)
        ids = ids[rows].long()
        return self.captured[i][rows], ids, self.places(ids, prompt, self.anchors)


def token_entropy(z: Tensor, label: Tensor) -> Tensor:
    """Cross entropy per row: z [R, V] in any float type, label [R]."""
    return F.cross_entropy(z.float(), label, reduction="none")


def block_loss(
    drafter: Drafter, embed: Tensor, batch: tuple[Tensor, Tensor, Tensor], decay: float
) -> tuple[Tensor, Tensor]:
    """Loss, and the share of right rows per draft position [N] given the true tokens before."""
    captured, ids, anchors = batch
    c = drafter.config
    n = c.block_size - drafter.first_row
    rows = anchors[..., None] + torch.arange(n + 1, device=ids.device)
    tokens = ids.gather(1, rows.flatten(1)).view(rows.shape)  # anchor, then the N tokens to predict
    prev, label = tokens[..., :-1], tokens[..., 1:]
    h = drafter(captured, tokens[..., 0], anchors, embed, c.block_size)[:, :, drafter.first_row :]
    base = F.linear(h, embed)
    weight = torch.exp(-torch.arange(n, device=ids.device) / decay)
    weight = (weight / weight.sum()).expand(label.shape)

    def entropy(z: Tensor) -> Tensor:
        return (
            (token_entropy(z.flatten(0, -2), label.flatten()).view(label.shape) * weight)
            .sum(-1)
            .mean()
        )

    if c.kind == "dflash":
        return entropy(base), (base.argmax(-1) == label).float().mean((0, 1))
    z = drafter.scores(h, base, prev)
    right = z.argmax(-1) == label
    loss = entropy(z) + (0.3 if c.kind == "dflash2" else 0.1) * entropy(base)
    if c.kind == "dspark":
        conf = drafter.confidence(h.detach(), prev)
        loss = loss + 0.2 * F.binary_cross_entropy_with_logits(conf, right.float())
    return loss, right.float().mean((0, 1))


@torch.no_grad()
def emitted(drafter: Drafter, embed: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> float:
    """Mean tokens per step over the batch's anchors: 1 + accepted proposals, greedy."""
    captured, ids, anchors = batch
    c, first = drafter.config, drafter.first_row
    h = drafter(captured, ids.gather(1, anchors), anchors, embed, c.block_size)[:, :, first:]
    out = drafter.propose(h, F.linear(h, embed), ids.gather(1, anchors))
    rows = anchors[..., None] + 1 + torch.arange(out.shape[-1], device=ids.device)
    truth = ids.gather(1, rows.flatten(1)).view(rows.shape)
    return 1.0 + (out == truth).int().cumprod(-1).sum(-1).float().mean().item()


def prepare(drafter: Drafter, data: Batches, embed: Tensor, decay: float) -> None:
    """Compiles a drafter's layers and the loss; eager when the compiler fails."""
    global token_entropy
    eager = token_entropy
    try:
        torch._dynamo.config.cache_size_limit = 64
        if not hasattr(token_entropy, "_torchdynamo_orig_callable"):
            token_entropy = torch.compile(token_entropy, dynamic=False)
        for layer in drafter.layers:
            layer.compile(dynamic=False)
        with torch.autocast(embed.device.type, dtype=torch.bfloat16, enabled=embed.is_cuda):
            block_loss(drafter, embed, data.draw(), decay)[0].backward()
    except Exception as e:
        print(f"compile failed, eager: {type(e).__name__}: {str(e)[:300]}", flush=True)
        token_entropy = eager
        for layer in drafter.layers:
            layer._compiled_call_impl = None
    drafter.zero_grad(set_to_none=True)


def train(
    drafters: dict[str, Drafter],
    embed: Tensor,
    data: Batches,
    test: tuple[Tensor, Tensor, Tensor],
    clock: Clock,
    a: argparse.Namespace,
    log: Log,
    lr: float,
) -> None:
    device = embed.device.type
    opts = {k: Optimiser(d.named_parameters(), lr, 0.05) for k, d in drafters.items()}
    step, shown, since, saved = 0, clock.elapsed, 0, clock.elapsed
    parts: dict[str, list[Tensor]] = {k: [] for k in drafters}
    for k, d in drafters.items():
        d.train()
        if not a.no_compile:
            prepare(d, data, embed, a.decay)
        print(
            f"{k}: {sum(p.numel() for p in d.parameters()) / 1e6:.2f} M parameters,"
            f" ready {clock.elapsed:.0f} s",
            flush=True,
        )
    auto = torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")
    while (f := clock.fraction()) < 1.0:
        batch = data.draw()
        for k, d in drafters.items():
            with auto:
                loss, right = block_loss(d, embed, batch, a.decay)
            loss.backward()
            opts[k].step(schedule(f, 0.05, 0.4))
            parts[k].append(torch.cat([loss.detach()[None], right]))
        step += 1
        if step % 10 == 0 and device == "cuda":
            torch.cuda.synchronize()
        if clock.elapsed - shown > a.every:
            with auto, torch.compiler.set_stance("force_eager"):
                for k, d in drafters.items():
                    mean = torch.stack(parts[k]).mean(0).tolist()
                    log.add(
                        t=clock.elapsed,
                        step=step,
                        kind=k,
                        loss=mean[0],
                        right=[round(x, 3) for x in mean[1:]],
                        emitted=emitted(d, embed, test),
                        bad=int(opts[k].bad.item()),
                        ms=1e3 * (clock.elapsed - shown) / (step - since),
                    )
                    parts[k] = []
                    if opts[k].bad.item() > 50:
                        raise FloatingPointError(f"{k}: over 50 steps without a finite gradient")
            shown, since = clock.elapsed, step
        if clock.elapsed - saved > 60:
            for k, d in drafters.items():
                save_pieces(dict(d.state_dict()), a.out, k)
            saved = clock.elapsed
    for k, d in drafters.items():
        save_pieces(dict(d.state_dict()), a.out, k)
        with auto, torch.compiler.set_stance("force_eager"):
            log.add(t=clock.elapsed, step=step, kind=k, emitted=emitted(d, embed, test), final=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--target", type=Path, required=True, help="folder with target.N.safetensors")
    p.add_argument("--data", type=Path, nargs="+", required=True)
    p.add_argument("--held", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--budget", type=float, default=430.0)
    p.add_argument(
        "--first", type=float, default=0.4, help="share of the training time for DFlash alone"
    )
    p.add_argument("--length", type=int, default=768)
    p.add_argument("--pool-batch", type=int, default=7168)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--rows", type=int, default=64)
    p.add_argument("--anchors", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument(
        "--decay", type=float, default=5.0, help="e-folding of the loss weight over draft positions"
    )
    p.add_argument("--every", type=float, default=10.0)
    p.add_argument("--no-compile", action="store_true")
    p.add_argument(
        "--init", type=Path, help="folder with trained pieces to start from (a second run)"
    )
    a = p.parse_args()
    clock = Clock(a.budget)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(2)
    torch.set_float32_matmul_precision("high")
    target = Target(TargetConfig())
    target.load_state_dict(
        {k: v.float() for k, v in load_pieces(a.target, "target").items()}, strict=False
    )
    target = target.to(device).eval().requires_grad_(False)
    corpus = torch.from_numpy(load_tokens(a.data).astype("int32")).to(device)
    held = torch.from_numpy(load_tokens([a.held]).astype("int32")).to(device)
    print(f"read in {clock.elapsed:.0f} s", flush=True)
    if device == "cuda":
        rows = held[: (len(held) - 1) // 1024 * 1024 + 1].unfold(0, 1025, 1024).long()
        print(
            f"held-out nats per token, bf16: {held_out_loss(target, rows, device):.4f}", flush=True
        )
        torch.set_float32_matmul_precision("highest")
        print(
            f"held-out nats per token, float32: {held_out_loss(target, rows, 'cpu'):.4f}",
            flush=True,
        )
        torch.set_float32_matmul_precision("high")
    pool = write_pool(target, corpus, a.pool_batch, a.length, a.rounds, 0.16 * a.budget)
    prompt = min(128, a.length // 2)
    unseen = Sampler(target, 64, a.length)
    starts = torch.zeros(1, dtype=torch.long, device=device)
    own = unseen.run(prompts_from(held, starts, 64, prompt), torch.zeros(64, device=device)).clone()
    t0 = clock.elapsed
    data = Batches(target, pool, a.rows, a.anchors)
    test = (data.capture(own), own, data.places(own, prompt, 32))
    print(f"captured in {clock.elapsed - t0:.1f} s", flush=True)
    embed = target.model.embed_tokens.weight.data
    log = Log(a.out / "drafters_log.json")

    def new(kind: str, base: Drafter | None) -> Drafter:
        d = Drafter(DrafterConfig.tiny(kind))
        if a.init is not None:
            d.load_state_dict({k: v.float() for k, v in load_pieces(a.init, kind).items()})
        elif base is not None:
            d.load_state_dict(base.state_dict(), strict=False)
        else:  # the shared head expects rows as the target's final norm leaves them
            d.norm.weight.data.copy_(1.0 + target.model.norm.weight)
        return d.to(device)

    left = a.budget - clock.elapsed
    first = new(KINDS[0], None)
    train({KINDS[0]: first}, embed, data, test, Clock(a.first * left), a, log, a.lr)
    both = {k: new(k, first) for k in KINDS[1:]}
    train(both, embed, data, test, Clock(a.budget - clock.elapsed), a, log, 0.7 * a.lr)


if __name__ == "__main__":
    main()
