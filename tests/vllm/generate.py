"""What a child process does: builds one engine, runs jobs, returns tokens and counters."""

from collections.abc import Mapping, Sequence
from typing import Any

DEFAULTS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}


def build(engine: Mapping[str, Any]) -> Any:
    """An engine in this process."""
    from vllm import LLM

    return LLM(**{**DEFAULTS, **engine})


def sample(llm: Any, prompts: Sequence[list[int] | str], **params: Any) -> list[dict[str, Any]]:
    """Run prompts together.

    Args:
        llm: the engine.
        prompts: token ids or text.
        params: of ``SamplingParams``; greedy and 48 tokens unless they say otherwise.

    Returns:
        per prompt and choice: ``tokens``, ``text``, ``finish``, ``stop``, ``cached``, and with
        ``logprobs`` the ``margins`` between the two most likely tokens at every position.
    """
    from vllm import SamplingParams

    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 48, **params})
    inputs = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    results = []
    for request in llm.generate(inputs, settings, use_tqdm=False):
        for choice in request.outputs:
            margins = []
            for position in choice.logprobs or []:
                top = sorted((p.logprob for p in position.values()), reverse=True)
                margins.append(top[0] - top[1])
            results.append(
                {
                    "tokens": list(choice.token_ids),
                    "text": choice.text,
                    "finish": choice.finish_reason,
                    "stop": choice.stop_reason,
                    "cached": request.num_cached_tokens,
                    "margins": margins,
                }
            )
    return results


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters of this engine by name, labels summed."""
    out: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            out[metric.name] = out.get(metric.name, 0) + metric.value
    return out


def generate(engine: dict[str, Any], jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run jobs one after another.

    Args:
        engine: arguments of ``LLM`` that differ from :data:`DEFAULTS`.
        jobs: each ``{"prompts": ..., **SamplingParams}``.

    Returns:
        ``jobs``: results of :func:`sample` in order; ``metrics``: counters at the end;
        ``features``: state of every feature of the plugin in this process.
    """
    llm = build(engine)
    results = [sample(llm, **job) for job in jobs]
    from torch_dflash_vllm.features import outcomes

    features = {name: [o.state, o.detail] for name, o in outcomes().items()}
    return {"jobs": results, "metrics": counters(llm), "features": features}
