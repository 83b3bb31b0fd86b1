"""`make demo`: completes a held-out prompt with each embedded drafter, and says what it gained."""

import json
import sys
import time

import torch
from rich.console import Console
from rich.progress import track

from torch_dflash.decoding.compare import compare
from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.stop import StopChecker
from torch_dflash.load import ASSETS, DRAFTERS, load_drafter
from torch_dflash.policies import CostPolicy

from .held_out import embedded, prompts

PROMPT, NEW_TOKENS, PAIRS = 2, 192, 5


def main() -> int:
    """Stream one completion, then compare plain and speculative decoding for every drafter."""
    console = Console(stderr=True, highlight=False)
    names = [f"{name}.gguf" for name in ("target", *DRAFTERS)]
    if missing := [name for name in names if not (ASSETS / name).exists()]:
        print(f"demo: {ASSETS} must hold the embedded model, missing: {', '.join(missing)}")
        return 1
    target, tokenizer = embedded()
    text = prompts()[PROMPT]
    prompt = tokenizer.encode(text, add_special=True)
    console.print(
        f"The embedded hybrid completes {len(prompt)} tokens of held-out Python "
        f"({torch.get_num_threads()} threads, DFlash2 drafter):\n"
    )
    print(text, end="")
    session = Session(target, load_drafter("dflash2", target), CostPolicy())
    stop = StopChecker((), (), tokenizer.stream().push)
    for step in session.stream(prompt, NEW_TOKENS, stop=stop):
        print(step.text, end="", flush=True)
        time.sleep(0.002)  # a terminal is read by a person
    print("\n")
    lines = []
    for kind in track(DRAFTERS, "Plain and speculative in turn", console=console):
        drafter = load_drafter(kind, target)
        result = compare(target, drafter, prompt, NEW_TOKENS, pairs=PAIRS, policy=CostPolicy())
        lines.append({"drafter": kind, **result.to_dict()})
    for line in lines:
        line.pop("tokens")
        print(json.dumps(line))
    return 0 if all(line["identical"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
