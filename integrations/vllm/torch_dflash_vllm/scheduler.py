"""vLLM's schedulers with the number of draft tokens chosen step by step."""

import logging
import time
from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .controller import Controller

__all__ = ["AdaptiveAsyncScheduler", "AdaptiveScheduler", "AdaptiveSyncScheduler"]

_log = logging.getLogger("vllm.torch_dflash")
_STARTED: Final = "_torch_dflash_started"  # on a SchedulerOutput: when it was made


class _Adaptive:
    """Mixed into a scheduler: swaps vLLM's table of lengths by batch size for a controller.

    Decisions are made here, in one process, so every rank runs the same number of rows.
    """

    dynamic_sd_lookup: Any
    num_spec_tokens: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self._controller: Controller | None = None
        self._ended = 0.0  # of the last step
        self._batch = 0  # rows of the step whose output is taken in
        if self.dynamic_sd_lookup is None:
            _log.warning(
                "torch-dflash: adaptive speculation is off, since vLLM switched "
                "num_speculative_tokens_per_batch_size off or it was not given"
            )
            return
        # the table as it was given: expanded, it ends at max_num_seqs
        table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        lengths = sorted({0, *(min(int(row[2]), self.num_spec_tokens) for row in table)})
        self._controller = self.dynamic_sd_lookup = Controller(lengths)
        _log.info(
            "torch-dflash: adaptive speculation chooses among %s draft tokens for every step; "
            "TORCH_DFLASH_DISABLE=adaptive switches it off",
            ", ".join(map(str, lengths)),
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The next step, with the time it was asked for."""
        started = time.perf_counter()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        setattr(output, _STARTED, started)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what a step gave, and how long it took."""
        self._batch = len(scheduler_output.num_scheduled_tokens)
        result = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        ended = time.perf_counter()
        if self._controller is not None and self._batch:
            self._learn(scheduler_output, ended)
        self._ended = ended
        return result

    def _learn(self, output: Any, ended: float) -> None:
        controller = self._controller
        assert controller is not None
        drafts = output.scheduled_spec_decode_tokens
        scheduled = output.num_scheduled_tokens
        lengths = {len(drafts.get(request, ())) for request in scheduled}
        plain = sum(request not in drafts for request in scheduled)
        decoding = all(n == 1 + len(drafts.get(r, ())) for r, n in scheduled.items())
        if decoding and plain:
            controller.observe_plain(plain)
        # Regular: one length for all, verified and then drafted again. With steps in flight the
        # time is that since the step before ended.
        if decoding and lengths == {output.num_spec_tokens_to_schedule}:
            started = max(getattr(output, _STARTED, ended), self._ended)
            controller.time(self._batch, output.num_spec_tokens_to_schedule, ended - started)
        if line := controller.line():
            _log.info("torch-dflash: %s", line)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """vLLM's counters; called for every row that verified draft tokens."""
        controller = self._controller
        if controller is not None:
            invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
            controller.observe(self._batch, num_draft_tokens - invalid, num_accepted_tokens)
        stats = super().make_spec_decoding_stats(  # type: ignore[misc]
            spec_decoding_stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_invalid_spec_tokens=num_invalid_spec_tokens,
            request_id=request_id,
        )
        per_position = getattr(stats, "num_draft_tokens_per_pos", None)
        if controller is not None and per_position is not None:
            # Rows without draft tokens travel behind the last position to draft_metrics, which
            # runs in the process that has the metrics.
            if len(per_position) == self.num_spec_tokens:
                per_position.append(0)
            per_position[-1] += controller.take_plain()
        return stats


class AdaptiveSyncScheduler(_Adaptive, Scheduler):
    """For engines that schedule a step when the one before has ended."""


class AdaptiveAsyncScheduler(_Adaptive, AsyncScheduler):
    """For engines that schedule ahead."""


class AdaptiveScheduler:
    """What ``--scheduler-cls`` names: makes the one that the engine's config asks for."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """A scheduler with the arguments of vLLM's."""
        ahead = vllm_config.scheduler_config.async_scheduling
        kind = AdaptiveAsyncScheduler if ahead else AdaptiveSyncScheduler
        return kind(vllm_config, *args, **kwargs)
