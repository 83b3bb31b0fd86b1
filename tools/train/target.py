"""Trains the target. Stops by its own clock, which also drives the learning rate.

python tools/train/target.py --data train.u16.xz --held heldout.u16 --out OUT --budget 440
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import Clock, Log, Optimiser, batches, load_pieces, load_tokens, save_pieces, schedule
from model import Target, TargetConfig
from torch import Tensor


def init_decay(target: Target) -> None:
    """Time constants of a few to a few thousand rows: A in (1, 16), dt in [1e-3, 1e-1]."""
    for name, p in target.named_parameters():
        if name.endswith("dt_bias"):
            dt = torch.exp(torch.empty_like(p).uniform_(-6.9, -2.3))
            p.data.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif name.endswith("A_log"):
            p.data.uniform_(1.0, 16.0).log_()


def compile_layers(target: Target, sample: Tensor, device: str) -> None:
    """Compiles the two layer kinds once each; falls back to eager when the compiler fails."""
    try:
        torch._dynamo.config.cache_size_limit = 64
        for layer in target.model.layers:
            layer.compile(dynamic=False)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            target.loss(sample[:, :-1], sample[:, 1:]).backward()
    except Exception as e:  # the compiler may be missing there: eager is slower and equal
        print(f"compile failed, eager: {type(e).__name__}: {str(e)[:300]}", flush=True)
        for layer in target.model.layers:
            layer._compiled_call_impl = None
    target.zero_grad(set_to_none=True)


@torch.no_grad()
def held_out_loss(target: Target, rows: Tensor, device: str) -> float:
    """Nats per token over rows [N, T + 1]."""
    total = 0.0
    for r in rows.split(32):  # eager: another shape must not start the compiler
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"),
        ):
            total += target.loss(r[:, :-1], r[:, 1:]).item() * len(r)
    return total / len(rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", type=Path, nargs="+", required=True)
    p.add_argument("--held", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--budget", type=float, default=440.0)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--checkpoint", type=float, default=100.0)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    clock = Clock(a.budget)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    ids = torch.from_numpy(load_tokens(a.data).astype("int32")).to(device)
    held = torch.from_numpy(load_tokens([a.held]).astype("int64"))
    held = held[: (len(held) - 1) // a.seq * a.seq + 1].unfold(0, a.seq + 1, a.seq)[:256].to(device)
    print(
        f"{len(ids) / 1e6:.2f} M tokens, {len(held)} held-out rows, read in {clock.elapsed:.0f} s",
        flush=True,
    )
    target = Target(TargetConfig())
    init_decay(target)
    if a.resume:
        target.load_state_dict(load_pieces(a.out, "target"), strict=False)
    target = target.to(device)
    stream = batches(ids, a.batch, a.seq, a.seed)
    if not a.no_compile:
        compile_layers(target, next(stream), device)
    print(f"ready after {clock.elapsed:.0f} s", flush=True)
    opt = Optimiser(target.named_parameters(), a.lr)
    log = Log(a.out / "target_log.json")
    state = {k: v for k, v in target.state_dict().items() if k != "lm_head.weight"}
    step, saved, shown, shown_step = 0, clock.elapsed, clock.elapsed, 0
    window = torch.zeros((), device=device)
    while (f := clock.fraction()) < 1.0:
        batch = next(stream)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = target.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        opt.step(schedule(f))
        window += loss.detach()
        step += 1
        if step % 10 == 0 and device == "cuda":
            torch.cuda.synchronize()  # the clock must see finished work
        if clock.elapsed - shown > (8 if device == "cuda" else 2):
            mean = window.item() / (step - shown_step)
            rate = (step - shown_step) * a.batch * a.seq / (clock.elapsed - shown)
            log.add(
                t=clock.elapsed,
                step=step,
                loss=mean,
                lr=schedule(f) * a.lr,
                norm=opt.norm.item(),
                bad=int(opt.bad.item()),
                tok_s=int(rate),
            )
            if opt.bad.item() > 50:
                raise FloatingPointError(
                    "target: over 50 steps without a finite gradient; the last checkpoint stands"
                )
            window.zero_()
            shown, shown_step = clock.elapsed, step
        if clock.elapsed - saved > a.checkpoint and torch.isfinite(loss):
            log.add(t=clock.elapsed, step=step, held=held_out_loss(target, held, device))
            save_pieces(state, a.out, "target")
            saved = clock.elapsed
    save_pieces(state, a.out, "target")
    log.add(
        t=clock.elapsed,
        step=step,
        held=held_out_loss(target, held, device),
        tokens=step * a.batch * a.seq,
    )


if __name__ == "__main__":
    main()
