"""Checks the training modules against the reference cases and the published implementations.

    python tools/train/parity.py --fixtures FIXTURES [--out TRAIN_OUT]

Without --out: the modules against FIXTURES/hybrid, dflash and dspark. With --out: the trained
target through transformers' Qwen3_5ForCausalLM and the trained DFlash and DFlash2 through z-lab's
`dflash` package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from drafter import Drafter, DrafterConfig
from model import Target, TargetConfig
from safetensors.torch import load_file


def load_target(folder: Path) -> Target:
    config = json.loads((folder / "config.json").read_text())
    target = Target(TargetConfig.from_hf(config))
    state = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    missing, unexpected = target.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{folder}: state must match, missing {missing}, unexpected {unexpected}")
    return target.eval()


@torch.no_grad()
def hybrid(fixtures: Path) -> None:
    for folder in sorted((fixtures / "hybrid").iterdir()):
        io = load_file(folder / "io.safetensors")
        target = load_target(folder)
        ids = io["ids"].reshape(1, -1)
        n = len(target.config.layer_types)
        h, taken, caches = target.hidden(ids, tuple(range(n)))
        worst = max(
            (t[0] - io[f"layer_out.{i}"].reshape(t[0].shape)).abs().max().item()
            for i, t in enumerate(taken)
        )
        logits = (
            (
                target.lm_head(h)[0]
                - io["logits"].reshape(-1, h.shape[1], target.config.vocab_size)[0]
            )
            .abs()
            .max()
        )
        states = [
            (caches[i][1][0] - io[f"gdn_state.{i}"][-1]).abs().max().item()
            for i in range(n)
            if f"gdn_state.{i}" in io
        ]
        print(
            f"hybrid/{folder.name}: layers {worst:.1e} logits {logits:.1e} states {max(states):.1e}"
        )


SHAPES = {  # what the training module can express: full attention, no scaling, no YaRN
    "dflash": ("d1_full", "d1_mqa", "d2_full", "d2_taps3", "d2_taps1_groupH"),
    "dspark": ("vanilla_anchor",),
}


@torch.no_grad()
def drafters(fixtures: Path) -> None:
    for group, cases in SHAPES.items():
        for case in cases:
            folder = fixtures / group / case
            drafter = load_drafter(folder)
            io = load_file(folder / "io.safetensors")
            embed, head = io["embed_tokens"].float(), io["lm_head"].float()
            past = torch.empty(1, 0, drafter.fc.in_features)
            worst, same, step = 0.0, True, 0
            while f"step{step}.context" in io:
                get = {k.split(".", 1)[1]: v for k, v in io.items() if k.startswith(f"step{step}.")}
                past = torch.cat([past, get["context"].reshape(1, -1, past.shape[-1])], 1)
                anchor = get["anchor"].reshape(1, 1)
                at = torch.tensor([[past.shape[1]]])
                n = get["hidden"].shape[-2]
                h = drafter(past, anchor, at, embed, n)[0, 0]
                worst = max(worst, (h - get["hidden"]).abs().max().item())
                rows = h[drafter.first_row :]
                ids = drafter.propose(rows[None], (rows @ head.t())[None], anchor[0])[0]
                same &= torch.equal(ids, get["draft_ids"].reshape(-1))
                if "confidence" in get:
                    prev = torch.cat([anchor[0], ids[:-1]])
                    conf = drafter.confidence(rows, prev).sigmoid()
                    worst = max(worst, (conf - get["confidence"].reshape(-1)).abs().max().item())
                step += 1
            print(f"{group}/{case}: {step} steps, hidden {worst:.1e}, ids equal {same}")
            if not same or worst > 2e-4:
                raise SystemExit(f"{group}/{case}: must agree with the reference case")


def load_drafter(folder: Path) -> Drafter:
    drafter = Drafter(DrafterConfig.from_hf(json.loads((folder / "config.json").read_text())))
    state = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    drafter.load_state_dict(state)
    return drafter.eval()


@torch.no_grad()
def published(out: Path) -> None:
    """The trained folders through transformers and z-lab's package, on 96 tokens of greedy text."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel  # type: ignore[import-not-found]
    from generate import Sampler
    from transformers import Qwen3_5ForCausalLM

    mine = load_target(out / "target")
    hf, info = Qwen3_5ForCausalLM.from_pretrained(
        out / "target", dtype=torch.float32, output_loading_info=True
    )
    print({k: v for k, v in info.items() if v})
    prompt = torch.tensor([[4092, *range(300, 332)]])
    ids = Sampler(mine, 1, 96).run(prompt, torch.zeros(1))
    result = hf(ids, output_hidden_states=True)
    _, taken, _ = mine.hidden(ids, (0, 2, 4))
    states = torch.cat([result.hidden_states[i + 1] for i in (0, 2, 4)], -1)
    worst = (states - torch.cat(taken, -1)).abs().max().item()
    print(
        f"target: logits {(result.logits - mine(ids)).abs().max():.1e}, captured rows {worst:.1e}"
    )
    embed = mine.model.embed_tokens.weight
    for kind, cls in (("dflash", DFlashDraftModel), ("dflash2", DFlash2DraftModel)):
        theirs, info = cls.from_pretrained(
            out / kind, dtype=torch.float32, output_loading_info=True
        )
        drafter = load_drafter(out / kind)
        same, far, taken_steps = 0, 0.0, (40, 61, 80)
        for p in taken_steps:
            anchor = ids[:, p : p + 1]
            h = drafter(states[:, :p], anchor, torch.tensor([[p]]), embed, 8)[0, 0]
            rows = torch.cat([anchor, torch.full((1, 7), drafter.config.mask_token_id)], 1)
            other = theirs(
                target_hidden=states[:, :p],
                noise_embedding=F.embedding(rows, embed),
                position_ids=torch.arange(p + 8)[None],
            )
            far = max(far, (h - other[0]).abs().max().item())
            base = other[:, 1:] @ embed.t()
            got = (
                base.argmax(-1)
                if kind == "dflash"
                else theirs.propose(other[:, 1:], anchor[:, 0], hf.lm_head, 0.0)[0]
            )
            same += torch.equal(
                got[0], drafter.propose(h[None, 1:], (h[1:] @ embed.t())[None], anchor[0])[0]
            )
        print(
            f"{kind}: loading report {[k for k, v in info.items() if v]}, hidden {far:.1e},"
            f" proposals equal {same} of {len(taken_steps)}"
        )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--fixtures", type=Path, required=True)
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    hybrid(a.fixtures)
    drafters(a.fixtures)
    if a.out:
        published(a.out)


if __name__ == "__main__":
    main()
