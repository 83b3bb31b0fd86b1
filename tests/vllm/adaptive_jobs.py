"""What a child process does for adaptive speculation."""

from typing import Any

from generate import build, counters, sample


def rows(engine: dict[str, Any], jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run jobs; their tokens, rows by draft tokens, all counters, and the scheduler's class."""
    llm = build(engine)
    tokens = [[r["tokens"] for r in sample(llm, **job)] for job in jobs]
    by_length = {
        m.labels["draft_tokens"]: m.value
        for m in llm.get_metrics()
        if m.name == "vllm:spec_decode_rows"
    }
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {
        "tokens": tokens,
        "rows": by_length,
        "metrics": counters(llm),
        "scheduler": type(scheduler).__name__,
    }
