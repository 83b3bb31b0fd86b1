"""What a child process does: builds one engine, runs jobs, returns tokens and counters."""

from collections.abc import Mapping, Sequence
from typing import Any

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "logprobs_mode": "raw_logits",
    "seed": 0,
}


def build(engine: Mapping[str, Any]) -> Any:
    """An engine in this process."""
    from vllm import LLM

    return LLM(**{**DEFAULTS, **engine})


def scheduler(llm: Any) -> Any:
    """The scheduler of an engine that lives in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


class Cycle:
    """In the place of vLLM's table of draft lengths by batch size: another length every step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths, self.steps = lengths, 0

    def __getitem__(self, batch_size: int) -> int:
        self.steps += 1
        return self.lengths[self.steps % len(self.lengths)]


def sample(
    llm: Any, prompts: Sequence[list[int] | str], cycle: list[int] | None = None, **params: Any
) -> list[dict[str, Any]]:
    """Run prompts together.

    Args:
        llm: the engine.
        prompts: token ids or text.
        cycle: draft lengths, one a step; None: as the engine has it.
        params: of ``SamplingParams``; greedy and 48 tokens unless they say otherwise. ``choice``
            is short for a grammar of these strings.

    Returns:
        per prompt and choice: ``tokens``, ``text``, ``finish``, ``stop``, ``cached``, and with
        ``logprobs`` the two largest ``logits`` at every position and the ``margins`` between them.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if choice := params.pop("choice", None):
        params["structured_outputs"] = StructuredOutputsParams(choice=choice)
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 48, **params})
    inputs = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    if cycle is not None:
        before = scheduler(llm).dynamic_sd_lookup
        scheduler(llm).dynamic_sd_lookup = Cycle(cycle)
    results = []
    for request in llm.generate(inputs, settings, use_tqdm=False):
        for choice in request.outputs:
            logits = [
                sorted((p.logprob for p in position.values()), reverse=True)[:2]
                for position in choice.logprobs or []
            ]
            results.append(
                {
                    "tokens": list(choice.token_ids),
                    "text": choice.text,
                    "finish": choice.finish_reason,
                    "stop": choice.stop_reason,
                    "cached": request.num_cached_tokens,
                    "logits": logits,
                    "margins": [best - second for best, second in logits],
                }
            )
    if cycle is not None:
        scheduler(llm).dynamic_sd_lookup = before
    return results


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters of this engine by name, labels summed."""
    out: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            out[metric.name] = out.get(metric.name, 0) + metric.value
    return out


def features() -> dict[str, list[str]]:
    """State and detail of every feature of the plugin in this process."""
    from torch_dflash_vllm.features import outcomes

    return {name: [o.state, o.detail] for name, o in outcomes().items()}


def generate(engine: dict[str, Any], jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run jobs one after another.

    Args:
        engine: arguments of ``LLM`` that differ from :data:`DEFAULTS`.
        jobs: each ``{"prompts": ..., **arguments of sample}``.

    Returns:
        ``jobs``: results of :func:`sample` in order; ``metrics``: counters at the end;
        ``features``: see :func:`features`.
    """
    llm = build(engine)
    results = [sample(llm, **job) for job in jobs]
    return {"jobs": results, "metrics": counters(llm), "features": features()}


def named(engine: dict[str, Any], jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """As :func:`generate`, jobs by name; ``metrics`` is what the counters grew by in each."""
    llm = build(engine)
    results, metrics, before = {}, {}, counters(llm)
    for name, job in jobs.items():
        results[name] = sample(llm, **job)
        after = counters(llm)
        metrics[name] = {k: v - before.get(k, 0) for k, v in after.items()}
        before = after
    return {"jobs": results, "metrics": metrics, "features": features()}
