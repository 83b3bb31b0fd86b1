"""Measures the shipped files on the 32 held-out files: dequantized GGUFs, in float32.

    python tools/train/evaluate.py --gguf ASSETS --heldout OUT/heldout \
        --tokenizer tools/train/vocabulary/tokenizer.json \
        --report report.json [--hf TRAIN_OUT/target]

Greedy speculation is lossless, so the loop is replayed on the target's own continuation: from each
anchor the proposal is compared with the tokens that follow, and the loop hops from bonus token to
bonus token.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from drafter import KINDS, Drafter, DrafterConfig
from from_gguf import drafter_state, target_state
from generate import Sampler, distinct
from model import Target, TargetConfig
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).resolve().parent


@torch.no_grad()
def bits_per_byte(target: Target, files: list[list[int]], sizes: list[int], end: int) -> float:
    """Windows of 1024 tokens without overlap; each file starts after <|endoftext|>."""
    nats = 0.0
    for ids in files:
        x = torch.tensor([end, *ids], device=target.model.embed_tokens.weight.device)
        for i in range(0, len(x) - 1, 1024):
            row = x[i : i + 1025][None]
            nats += target.loss(row[:, :-1], row[:, 1:]).item() * (row.shape[1] - 1)
    return nats / math.log(2) / sum(sizes)


@torch.no_grad()
def accepted(
    drafter: Drafter, embed: Tensor, captured: Tensor, ids: Tensor, first: int, last: int
) -> Tensor:
    """Accepted tokens per anchor in [first, last) of one row. captured [T, 3H], ids [T]."""
    c = drafter.config
    anchors = torch.arange(first, last, device=ids.device)[None]
    tokens = ids[anchors]
    h = drafter(captured[None], tokens, anchors, embed, c.block_size)[:, :, drafter.first_row :]
    out = drafter.propose(h, F.linear(h, embed), tokens)[0]
    truth = ids[anchors[0][:, None] + 1 + torch.arange(out.shape[1], device=ids.device)]
    return (out == truth).int().cumprod(-1).sum(-1)


def replay(runs: Tensor, first: int, stop: int) -> list[int]:
    """Accepted counts along the loop from `first` to `stop`; runs[i] is anchor first + i."""
    out, p = [], first
    while p < stop:
        n = int(runs[p - first])
        out.append(n)
        p += n + 1
    return out


def speculate(
    target: Target,
    drafters: dict[str, Drafter],
    prompts: Tensor,
    new: int,
    temperature: float,
    end: int,
) -> dict[str, Any]:
    """Continues every prompt by `new` tokens and replays each drafter's loop over them."""
    batch, p = prompts.shape
    torch.manual_seed(0)
    ids = Sampler(target, batch, p + new + 9, batch, exact=True).run(
        prompts, torch.full((batch,), temperature, device=prompts.device)
    )
    with torch.no_grad():
        _, taken, _ = target.hidden(ids, (0, 2, 4), stop=4)
    captured = torch.cat(taken, -1)
    own = ids[:, p : p + new].cpu()
    report: dict[str, Any] = {
        "new_tokens": new,
        "temperature": temperature,
        "distinct_4grams": round(distinct(own), 4),
    }
    embed = target.model.embed_tokens.weight
    for kind, d in drafters.items():
        most = d.config.block_size - d.first_row
        counts, early, rows = [], [], []
        for row, cap in zip(ids, captured, strict=True):
            stops = (row[p : p + new] == end).nonzero()[:, 0]
            stop = p + (int(stops[0]) if len(stops) else new) - 1
            if stop <= p:
                continue
            runs = accepted(d, embed, cap, row, p, stop)
            steps = replay(runs, p, stop)
            rows.append(sum(s + 1 for s in steps) / len(steps))
            counts += steps
            early += replay(runs, p, min(stop, p + 64))
        report[kind] = {
            "steps": len(counts),
            "offered_per_step": most,
            "emitted_per_step": round(1 + sum(counts) / len(counts), 3),
            "emitted_per_step_first_64": round(1 + sum(early) / len(early), 3),
            "worst_file": round(min(rows), 3),
            "acceptance_rate": round(sum(counts) / len(counts) / most, 4),
            "accepted_at_position": [
                round(sum(n > i for n in counts) / len(counts), 4) for i in range(most)
            ],
        }
    return report


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--gguf", type=Path, required=True)
    p.add_argument("--heldout", type=Path, required=True)
    p.add_argument("--tokenizer", type=Path, required=True)
    p.add_argument("--report", type=Path, required=True)
    p.add_argument("--hf", type=Path, help="the target before quantization, for its bits per byte")
    p.add_argument("--prompt", type=int, default=256)
    p.add_argument("--new", type=int, nargs="+", default=[256])
    a = p.parse_args()
    tok = Tokenizer.from_file(str(a.tokenizer))
    end = tok.token_to_id("<|endoftext|>")
    names = [r["file"] for r in json.loads((HERE / "held_out.json").read_text())]
    texts = [(a.heldout / n).read_text() for n in names]
    files = [tok.encode(t).ids for t in texts]
    sizes = [len(t.encode()) for t in texts]
    target = Target(TargetConfig())
    target.load_state_dict(target_state(a.gguf / "target.gguf"), strict=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = target.to(device).eval().requires_grad_(False)
    drafters = {}
    for kind in KINDS:
        d = Drafter(DrafterConfig.tiny(kind))
        d.load_state_dict(
            {
                k: v.reshape(d.state_dict()[k].shape)
                for k, v in drafter_state(a.gguf / f"{kind}.gguf").items()
            }
        )
        drafters[kind] = d.to(device).eval().requires_grad_(False)
    report: dict[str, Any] = {
        "files": len(names),
        "bytes": sum(sizes),
        "tokens": sum(map(len, files)),
    }
    prompts = torch.tensor([f[: a.prompt] for f in files], device=device)
    report["held_out_text_distinct_4grams"] = round(
        sum(distinct(torch.tensor([f[:256]])) for f in files) / len(files), 4
    )

    def save() -> None:
        a.report.write_text(json.dumps(report, indent=1) + "\n")

    for new in a.new:
        for t in (0.0, 0.7):
            report[f"{'greedy' if t == 0 else 'sampled'}_{new}"] = speculate(
                target, drafters, prompts, new, t, end
            )
            save()
    report["bits_per_byte_quantized"] = round(bits_per_byte(target, files, sizes, end), 4)
    save()
    if a.hf is not None:
        from parity import load_target

        report["bits_per_byte_trained"] = round(
            bits_per_byte(load_target(a.hf).to(device), files, sizes, end), 4
        )
        save()
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
