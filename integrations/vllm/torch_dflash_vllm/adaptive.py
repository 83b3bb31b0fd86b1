"""Feature ``adaptive``: the number of draft tokens of every step by what pays, on hybrids."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any, Final

from .controller import tiers
from .features import Declined, decline, outcomes

__all__ = ["SCHEDULER", "apply", "switch_on"]

_log = logging.getLogger("vllm.torch_dflash")

SCHEDULER: Final = "torch_dflash_vllm.scheduler.AdaptiveScheduler"
_TABLE: Final = "num_speculative_tokens_per_batch_size"
_STATS: Final = [
    "self",
    "spec_decoding_stats",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_invalid_spec_tokens",
    "request_id",
]


def apply() -> str:
    """Check what the scheduler is built on; put its counts among vLLM's metrics."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    from .draft_metrics import NAME, AdaptiveProm

    found = [*inspect.signature(Scheduler.make_spec_decoding_stats).parameters]
    if found != _STATS:
        raise Declined(f"make_spec_decoding_stats must take {_STATS}, takes {found}")
    if "self.dynamic_sd_lookup[" not in inspect.getsource(Scheduler.schedule):
        raise Declined("Scheduler.schedule must ask dynamic_sd_lookup, it does not")
    if "num_draft_tokens_per_pos" not in SpecDecodingStats.__dataclass_fields__:
        raise Declined("SpecDecodingStats must have num_draft_tokens_per_pos, it has not")
    if PrometheusStatLogger._spec_decoding_cls is SpecDecodingProm:
        PrometheusStatLogger._spec_decoding_cls = AdaptiveProm
    return f"draft tokens per step on hybrids, counted in {NAME}"


def switch_on(
    args: Any, spec: Mapping[str, Any], *, hybrid: bool, cpu: bool, graphs: bool
) -> dict[str, Any]:
    """Give an engine the adaptive scheduler, unless something speaks against it.

    Args:
        args: vLLM's ``EngineArgs``; ``scheduler_cls`` is set.
        spec: the planned speculative config.
        hybrid: whether the target has recurrent layers.
        cpu: whether it runs on the CPU.
        graphs: whether vLLM captures a graph for every length.

    Returns:
        what to add to ``spec``.

    Raises:
        ValueError: the scheduler was asked for by name, and cannot work.
    """
    outcome = outcomes().get("adaptive")
    asked = args.scheduler_cls == SCHEDULER
    if not asked and (not hybrid or outcome is None or outcome.state != "on"):
        return {}  # dense models have vLLM's own adaptive verification
    # In the form that vLLM wants: it captures graphs for every length it finds. The batch sizes
    # mean nothing, the scheduler replaces the table.
    table = [[i, i, n] for i, n in enumerate(reversed(tiers(spec["num_speculative_tokens"])), 1)]
    reason = _against(args, spec, table, cpu, graphs)
    if reason is None and (outcome is None or outcome.state != "on"):
        reason = f"feature adaptive is not on: {outcome.detail if outcome else 'not installed'}"
    if reason is None:
        args.scheduler_cls = SCHEDULER
        return {_TABLE: table}
    if asked:
        raise ValueError(f"--scheduler-cls {SCHEDULER}: {reason}")
    decline("adaptive", reason)
    return {}


def _against(
    args: Any, spec: Mapping[str, Any], table: list[list[int]], cpu: bool, graphs: bool
) -> str | None:
    if args.scheduler_cls not in (None, SCHEDULER):
        return f"the scheduler is {args.scheduler_cls}"
    given = spec.get(_TABLE)
    if given and [[*row] for row in given] != table:
        return f"{_TABLE} was given"
    if spec.get("enable_adaptive_verification"):
        return "vLLM's enable_adaptive_verification was given"
    if (args.data_parallel_size or 1) > 1:
        return "engines of one data parallel group must not choose differently"
    if graphs and args.max_num_seqs is not None and args.max_num_seqs < len(table):
        # rows of the table beyond max_num_seqs would get no graph
        return f"graphs for {len(table)} lengths need max_num_seqs >= {len(table)}"
    gdn = outcomes().get("gdn")
    if cpu and (gdn is None or gdn.state != "on"):
        return "feature gdn is not on, and vLLM's own layer needs whole blocks on the CPU"
    return None
