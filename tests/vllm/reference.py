"""What the outputs of an engine are compared with: the native runner, and the tie rule."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from torch_dflash import Session, load_target
from torch_dflash.gguf import GGUFFile, Tokenizer, tokenizer_from_gguf
from torch_dflash.load import ASSETS

TEXTS = (
    "def quicksort(xs):\n",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self",
    'def fibonacci(n):\n    """Return the n-th number."""\n',
    "for i in range(10):\n    print(",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)
MANTISSA = {"float32": 23, "bfloat16": 7}


@cache
def tokenizer() -> Tokenizer:
    """Of the embedded target."""
    with GGUFFile.open(ASSETS / "target.gguf") as file:
        return tokenizer_from_gguf(file)


def prompts() -> list[list[int]]:
    """Beginnings of Python, of different lengths."""
    return [tokenizer().encode(text) for text in TEXTS]


def long_prompt(tokens: int, start: int = 0) -> list[int]:
    """As many tokens of real source, from ``start`` on."""
    import torch_dflash.models.decoder as source

    with open(source.__file__) as file:
        ids = tokenizer().encode(file.read())
    return ids[start : start + tokens]


@cache
def _target() -> Any:
    return load_target()


@cache
def _native(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(Session(_target()).generate(prompt, max_new_tokens=count).tokens)


def native(prompt: Sequence[int], count: int = 48) -> list[int]:
    """Greedy tokens of the native runner on the embedded GGUF."""
    return list(_native(tuple(prompt), count))


@cache
def _order(prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    target = _target()
    target.reset()
    probs = target.prefill(torch.tensor(prompt))[0].double().softmax(0)
    sorted_probs, ids = probs.sort(descending=True)
    return ids.tolist(), sorted_probs.cumsum(0).tolist()


def quantile(prompt: Sequence[int], token: int, u: float) -> float:
    """Where a token sampled after a prompt lies among all, the likeliest first.

    Args:
        prompt: token ids.
        token: that was sampled, at temperature 1.
        u: uniform in [0, 1): where in the token's own probability.

    Returns:
        uniform in [0, 1) if tokens have the native runner's probabilities.
    """
    ids, sums = _order(tuple(prompt))
    at = ids.index(token)
    below = sums[at - 1] if at else 0.0
    return below + u * (sums[at] - below)


def check_native(results: Sequence[dict[str, Any]], prompts: Sequence[list[int]]) -> None:
    """Every result is the native runner's, token for token."""
    assert len(results) == len(prompts)
    for result, prompt in zip(results, prompts, strict=True):
        assert result["tokens"] == native(prompt, len(result["tokens"]))


def violations(
    plain: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], dtype: str
) -> list[str]:
    """Where outputs differ although the plain one was not torn between two tokens.

    Args:
        plain: results with ``logits``.
        other: results that must be the same, or leave it where the two best logits are at most
            2 ulp of ``dtype`` apart: sums in another order may round a logit one ulp either way.
        dtype: of the logits.
    """
    found = []
    for i, (a, b) in enumerate(zip(plain, other, strict=True)):
        pairs = zip(a["tokens"], b["tokens"], strict=False)
        at = next((n for n, (x, y) in enumerate(pairs) if x != y), None)
        if at is None:
            if len(a["tokens"]) != len(b["tokens"]):
                found.append(f"prompt {i}: {len(a['tokens'])} and {len(b['tokens'])} tokens")
            continue
        best, second = a["logits"][at]
        ulp = 2.0 ** (math.floor(math.log2(abs(best))) - MANTISSA[dtype])
        if best - second > 2 * ulp:
            found.append(f"prompt {i}: token {at} at a margin of {(best - second) / ulp:.1f} ulp")
    return found
