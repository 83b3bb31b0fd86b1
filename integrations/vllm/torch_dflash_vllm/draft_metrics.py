"""The lengths that adaptive speculation chose, among vLLM's metrics."""

from itertools import pairwise
from typing import Any

from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.spec_decode.metrics import SpecDecodingProm

__all__ = ["NAME", "AdaptiveProm"]

NAME = "vllm:spec_decode_rows"


class AdaptiveProm(SpecDecodingProm):
    """vLLM's counters, and verified rows by their number of draft tokens (0: plain decoding)."""

    def __init__(
        self,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        is_diffusion: bool = False,
    ) -> None:
        super().__init__(speculative_config, labelnames, per_engine_labelvalues, is_diffusion)
        self._rows: list[Any] = []
        if speculative_config is None or is_diffusion:
            return
        counter = self._counter_cls(
            name=NAME,
            documentation="Verified rows by number of draft tokens; 0 is plain decoding.",
            labelnames=[*labelnames, "draft_tokens"],
        )
        self._rows = [
            create_metric_per_engine(
                counter, {i: [*v, str(n)] for i, v in per_engine_labelvalues.items()}
            )
            for n in range(speculative_config.num_speculative_tokens + 1)
        ]

    def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
        """Count a step."""
        super().observe(spec_decoding_stats, engine_idx)
        if not self._rows:
            return
        most = len(self._rows) - 1
        reached = spec_decoding_stats.num_draft_tokens_per_pos  # rows with more than i tokens
        plain = reached[most] if len(reached) > most else 0
        at_least = [*reached[:most], 0]
        counts = [plain, *(a - b for a, b in pairwise(at_least))]
        for counter, count in zip(self._rows, counts, strict=True):
            counter[engine_idx].inc(count)
