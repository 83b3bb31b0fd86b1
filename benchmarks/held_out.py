"""The 32 held-out prompts, and what each embedded drafter is worth on them.

``python -m benchmarks.held_out`` prints a table; every speculative run is compared with the plain
one, token by token.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.stats import GenerationStats
from torch_dflash.gguf import GGUFFile
from torch_dflash.gguf.tokenizer import Tokenizer, tokenizer_from_gguf
from torch_dflash.load import ASSETS, DRAFTERS, load_drafter, load_target
from torch_dflash.models import Decoder

PROMPTS = Path(__file__).parents[1] / "tools/train/prompts.json"


@dataclass
class Acceptance:
    """Sums over prompts at full block.

    Attributes:
        identical: whether every speculative text was the plain one.
        steps, emitted, offered, accepted: of all runs.
        offered_at, accepted_at: by position in the block.
    """

    identical: bool = True
    steps: int = 0
    emitted: int = 0
    offered: int = 0
    accepted: int = 0
    offered_at: list[int] = field(default_factory=lambda: [0] * 16)
    accepted_at: list[int] = field(default_factory=lambda: [0] * 16)

    def add(self, stats: GenerationStats, identical: bool) -> None:
        """Take in one run."""
        self.identical &= identical
        self.steps += stats.steps
        self.emitted += sum(stats.emitted_lengths)
        self.offered += stats.offered
        self.accepted += stats.accepted
        for i, n in stats.offered_at.items():
            self.offered_at[i] += n
            self.accepted_at[i] += stats.accepted_at[i]

    @property
    def length(self) -> float:
        """Tokens per step."""
        return self.emitted / self.steps

    def to_dict(self) -> dict[str, Any]:
        """Rounded numbers for JSON."""
        pairs = zip(self.accepted_at, self.offered_at, strict=True)
        return {
            "identical": self.identical,
            "acceptance_length": round(self.length, 3),
            "acceptance_rate": round(self.accepted / self.offered, 4),
            "acceptance_at": [round(a / n, 3) for a, n in pairs if n],
        }


def prompts() -> list[str]:
    """The held-out prompts, fixed before training."""
    return [p["prompt"] for p in json.loads(PROMPTS.read_text(encoding="utf-8"))]


def embedded() -> tuple[Decoder, Tokenizer]:
    """The embedded target and its tokenizer."""
    with GGUFFile.open(ASSETS / "target.gguf") as file:
        return load_target(), tokenizer_from_gguf(file)


def measure(new_tokens: int, count: int = 32, show: bool = False) -> dict[str, Acceptance]:
    """Run every prompt plainly and with each drafter at full block.

    Args:
        new_tokens: per prompt.
        count: how many prompts.
        show: a progress bar on standard error.
    """
    target, tokenizer = embedded()
    encoded = [tokenizer.encode(p, add_special=True) for p in prompts()[:count]]
    console = Console(stderr=True)
    results = {kind: Acceptance() for kind in DRAFTERS}
    drafters = {kind: load_drafter(kind, target) for kind in DRAFTERS}
    for prompt in track(encoded, "held-out prompts", console=console, disable=not show):
        plain = Session(target).generate(prompt, new_tokens)
        for kind, drafter in drafters.items():
            out = Session(target, drafter).generate(prompt, new_tokens)
            results[kind].add(out.stats, out.tokens == plain.tokens)
    return results


def main() -> int:
    """Print a line of JSON per drafter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    results = measure(args.new_tokens, show=True)
    for kind, result in results.items():
        print(json.dumps({"drafter": kind, **result.to_dict()}))
    return 0 if all(r.identical for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
