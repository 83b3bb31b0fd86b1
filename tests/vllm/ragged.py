"""In a child process: plain decoding, then speculation with another draft length every step."""

import traceback
from typing import Any

from generate import build, sample


def ragged(
    engine: dict[str, Any],
    speculation: dict[str, Any],
    prompts: list[list[int]],
    cycle: list[int],
    max_tokens: int,
) -> dict[str, Any]:
    """Outputs of both engines; ``error`` in the place of the second if that one stopped."""
    plain = sample(build(engine), prompts, max_tokens=max_tokens, logprobs=2)
    llm = build({**engine, "speculative_config": speculation})
    try:
        return {
            "plain": plain,
            "full": sample(llm, prompts, max_tokens=max_tokens),
            "ragged": sample(llm, prompts, max_tokens=max_tokens, cycle=cycle),
            "error": None,
        }
    except Exception:
        return {"plain": plain, "full": [], "ragged": [], "error": traceback.format_exc()}
