"""The decoding loop: propose, choose, verify, accept, commit."""

import logging
import operator
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from .. import ops
from ..drafters.base import Drafter
from ..policies.base import Policy, check_limit
from ..policies.fixed import FixedPolicy
from .proposal import Proposal
from .recorders import recording_seconds
from .sampling import GREEDY, SamplingParams, SamplingRows
from .stats import GenerationStats
from .stop import StopChecker
from .target import Target

__all__ = ["Generation", "Session", "StepResult"]

_LOG = logging.getLogger("torch_dflash")
TARGET_STREAM, ACCEPT_STREAM = 0, 2  # of ops.uniform; drafts use 1
# Bytes of target_hidden that may wait for the next draft: a burst of plain steps longer than the
# text that is wanted never costs a commit.
_PENDING_BYTES = 64 << 20
# target or drafter -> key of the stream whose tokens its state holds; and who runs it now
_HOLDERS: "WeakKeyDictionary[Target | Drafter, object]" = WeakKeyDictionary()
_LOCKS: "WeakKeyDictionary[Target | Drafter, threading.RLock]" = WeakKeyDictionary()
_NEW_LOCK = threading.Lock()
# what ran in the process that this one was forked from
_INHERITED: "WeakSet[Target | Drafter]" = WeakSet()


def _lock(part: Target | Drafter) -> threading.RLock:
    """One thread at a time runs a model: each holds one sequence."""
    lock = _LOCKS.get(part)
    if lock is None:
        with _NEW_LOCK:
            lock = _LOCKS.setdefault(part, threading.RLock())
    return lock


def _after_fork_in_child() -> None:
    """Threads stayed in the parent: their locks are free, what they ran is no prefix to extend."""
    global _LOCKS, _NEW_LOCK
    for part, lock in list(_LOCKS.items()):
        _INHERITED.add(part)
        if not lock.acquire(blocking=False):
            _HOLDERS.pop(part, None)
    _LOCKS, _NEW_LOCK = WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass
class StepResult:
    """What one step of the target brought.

    Attributes:
        tokens: new tokens, in order; at least one.
        text: text that they complete, if the session has a decoder.
        offered, accepted: draft tokens verified, and how many of them were accepted.
    """

    tokens: list[int]
    text: str
    offered: int = 0
    accepted: int = 0


@dataclass
class Generation:
    """A finished generation.

    Attributes:
        tokens: new tokens, a stop token included.
        text: their text, without the stop.
        finish_reason: ``length``, ``stop_token`` or ``stop_string``.
        stats: counts and times.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    stats: GenerationStats = field(default_factory=GenerationStats)


class Session:
    """One sequence on a target with an optional drafter; a prompt that extends it is not run again.

    The output does not depend on the drafter or the policy: greedy tokens are those of plain greedy
    decoding, sampled ones have the target's distribution.

    Args:
        target: the model whose text is wanted.
        drafter: proposes tokens; None decodes one token a step.
        policy: how many draft tokens to verify; default: as many as the drafter offers.

    Raises:
        ValueError: the policy's limit is more than the drafter's block holds.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, policy: Policy | None = None
    ) -> None:
        self.target, self.drafter = target, drafter
        self.policy = policy or FixedPolicy()
        if drafter is not None:
            check_limit(self.policy.limit, drafter.config, "the policy's draft_tokens")
        self._committed: list[int] = []
        self._pending: list[Tensor] = []  # target_hidden rows the drafter has not seen yet
        self._sampling: SamplingRows | None = None
        self._key = object()
        self.reset()

    def reset(self) -> None:
        """Forget the sequence, and take target and drafter from other sessions."""
        with self._alone():
            self.target.capture(self.drafter.config.target_layer_ids if self.drafter else [])
            self.target.reset()
            if self.drafter is not None:
                self.drafter.reset()
            self._committed, self._pending, self._pending_bytes = [], [], 0
            self._take()

    def _parts(self) -> "tuple[Target | Drafter, ...]":
        return (self.target,) if self.drafter is None else (self.target, self.drafter)

    def _take(self) -> None:
        """From here on the state belongs to a new stream; older ones cannot go on."""
        self._key = object()
        for part in self._parts():
            _HOLDERS[part] = self._key

    def _holds_state(self, key: object) -> bool:
        """Whether target and drafter still hold the tokens of the stream with this key."""
        mine = all(_HOLDERS.get(part) is key for part in self._parts())
        return mine and self.target.length == len(self._committed)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from target and drafter, in this order."""
        if any(part in _INHERITED for part in self._parts()) and torch.get_num_threads() > 1:
            # our operators have threads of their own; torch's copies and fills wait for dead ones
            raise RuntimeError(
                "Session: in a forked child of the process that ran this model torch must have 1 "
                f"thread, got {torch.get_num_threads()}, which would hang; call "
                "torch.set_num_threads(1) in the child, or spawn it and load the model there"
            )
        with _lock(self.target), _lock(self.target if self.drafter is None else self.drafter):
            yield

    @contextmanager
    def _running(self, key: object | None = None) -> Iterator[None]:
        """Run the models; what an error or an interrupt leaves behind is no prefix to extend.

        Args:
            key: of the stream that goes on; None begins one.
        """
        with self._alone():
            if key is not None and not self._holds_state(key):
                raise RuntimeError(
                    "generate: the target or the drafter was used by another session or stream in "
                    "the meantime; each holds one sequence at a time"
                )
            try:
                with torch.inference_mode():
                    yield
            except BaseException:
                self._committed = []
                raise

    def _prefill(self, prompt: list[int]) -> Tensor:
        """Bring the state to the end of the prompt; a hybrid's state can only be extended."""
        known = len(self._committed)
        extends = 0 < known < len(prompt) and prompt[:known] == self._committed
        if extends and self._holds_state(self._key):
            self._take()
        else:
            self.reset()
            known = 0
        self._flush()
        sink = self.drafter.commit if self.drafter is not None else None
        device = self.target.vocabulary.embed.packed.device
        tokens = torch.tensor(prompt[known:], dtype=torch.int64, device=device)
        logits = self.target.prefill(tokens, sink)
        self._committed = prompt
        return logits

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop: StopChecker | None = None,
    ) -> Generation:
        """Generate until a stop or ``max_new_tokens``.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: at least 1.
            sampling: how tokens are chosen.
            stop: watches for the end.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, no tokens wanted, or a
                ``stop`` that ended another generation.
            TypeError: a prompt of anything but integers.
            RuntimeError: another session or stream took the target or the drafter in the meantime.
        """
        result = Generation()
        for step in self.stream(prompt, max_new_tokens, sampling, stop, result):
            result.tokens += step.tokens
            result.text += step.text
        return result

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop: StopChecker | None = None,
        result: Generation | None = None,
    ) -> Iterator[StepResult]:
        """Generate step by step; the arguments are those of :meth:`generate`.

        Args:
            result: its ``stats`` and ``finish_reason`` are filled in, tokens and text are not.

        Yields:
            what every step of the target brought.
        """
        prompt = [operator.index(token) for token in prompt]
        stop = stop if stop is not None else StopChecker()
        self._check(prompt, max_new_tokens, stop)
        result = result if result is not None else Generation()
        stats = result.stats
        stats.prompt_tokens = len(prompt)
        with self._running():
            began = time.perf_counter()
            logits = self._prefill(prompt)
            anchor = self._choose(logits, len(prompt), sampling)
            stats.prefill_seconds = time.perf_counter() - began
            newest = int(anchor)
            emitted, text = self._emit([newest], stop)
            left, key = max_new_tokens - 1, self._key
        stats.new_tokens = 1
        self._finish(result, stop, left)
        yield StepResult(emitted, text + (stop.flush() if left == 0 else ""))
        while left and stop.reason is None:
            with self._running(key):
                began, recorded = time.perf_counter(), recording_seconds()
                following, tokens, offered, accepted = self._step(anchor, left, sampling)
                emitted, text = self._emit(tokens[:left], stop)
                self._commit(newest, emitted)
                anchor, newest = following, emitted[-1]
                seconds = time.perf_counter() - began - (recording_seconds() - recorded)
            left -= len(emitted)
            stats.new_tokens += len(emitted)
            stats.decode_seconds += seconds
            stats.record(offered, accepted, len(emitted), seconds)
            self.policy.observe(offered, accepted, seconds)
            self._finish(result, stop, left)
            if left == 0:
                text += stop.flush()
            yield StepResult(emitted, text, offered, accepted)

    def _check(self, prompt: list[int], max_new_tokens: int, stop: StopChecker) -> None:
        if not prompt:
            raise ValueError("generate: prompt must have at least one token, got none")
        if operator.index(max_new_tokens) < 1:
            raise ValueError(f"generate: max_new_tokens must be >= 1, got {max_new_tokens}")
        if stop.reason is not None:
            raise ValueError(
                f"generate: stop must be new, got one that ended with {stop.reason}; "
                "make a StopChecker for every generation"
            )
        size = self.target.vocabulary.embed.rows
        if not (min(prompt) >= 0 and max(prompt) < size):
            bad = next(t for t in prompt if not 0 <= t < size)
            raise ValueError(f"generate: prompt token {bad} is outside the vocabulary of {size}")
        trained = getattr(getattr(self.target, "config", None), "context_length", None)
        if trained is not None and len(prompt) + max_new_tokens > trained:
            _LOG.warning(
                "%d prompt tokens and up to %d new ones go beyond the %d that the target was "
                "trained for; what comes after may be nonsense",
                len(prompt),
                max_new_tokens,
                trained,
            )

    @staticmethod
    def _finish(result: Generation, stop: StopChecker, left: int) -> None:
        result.finish_reason = stop.reason or ("length" if left == 0 else "")

    @staticmethod
    def _emit(tokens: list[int], stop: StopChecker) -> tuple[list[int], str]:
        """The tokens up to the first stop, and their text."""
        text = ""
        for n, token in enumerate(tokens, 1):
            text += stop.push(token)
            if stop.reason is not None:
                return tokens[:n], text
        return tokens, text

    def _step(
        self, anchor: Tensor, left: int, sampling: SamplingParams
    ) -> tuple[Tensor, list[int], int, int]:
        """One verification: (next anchor, new tokens, draft tokens offered, and accepted)."""
        proposal = self._propose(anchor, left, sampling)
        if proposal is None:
            self._verified = self.target.verify(anchor)
            position = self.target.length + 1
            token = self._choose(self._verified.logits, position, sampling)
            return token, [int(token)], 0, 0
        draft = proposal.tokens
        offered = draft.shape[1]
        self._verified = self.target.verify(torch.cat([anchor, draft[0]]))
        accepted, bonus = self._accept(proposal, self._verified.logits, sampling)
        # All that the host reads, at once: on a GPU it waits here, and nowhere else in the step.
        n, *tokens = torch.cat([accepted, draft[0], bonus]).tolist()
        return bonus, [*tokens[:n], tokens[-1]], offered, n

    def _propose(self, anchor: Tensor, left: int, sampling: SamplingParams) -> Proposal | None:
        if self.drafter is None:
            return None
        most = min(self.drafter.config.max_draft_tokens, left, self.target.max_rows - 1)
        wanted = self.policy.draft_tokens(most)
        if wanted == 0:
            return None
        self._flush()
        proposal = self.drafter.propose(anchor, wanted, sampling)
        keep = self.policy.select(proposal, wanted)
        return proposal.head(keep) if keep else None

    def _choose(self, logits: Tensor, position: int, sampling: SamplingParams) -> Tensor:
        """The next token of one row, at its absolute position."""
        if sampling.greedy:
            return ops.head_topk(logits, 1, 1.0, 0.0)[1].view(1)
        request = self._request(sampling)
        uniform = self._uniform(position, 1, request, TARGET_STREAM)
        return ops.categorical(request.probs(logits), uniform)

    def _request(self, sampling: SamplingParams) -> SamplingRows:
        device = self.target.vocabulary.embed.packed.device
        if self._sampling is None or self._sampling.device != device:
            self._sampling = SamplingRows(self.target.max_rows, device)
        return self._sampling.hold(sampling)

    def _uniform(self, first: int, count: int, request: SamplingRows, stream: int) -> Tensor:
        positions = torch.arange(first, first + count, device=request.device)
        return request.uniform(positions, stream)

    def _accept(
        self, proposal: Proposal, logits: Tensor, sampling: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        if sampling.greedy:
            ids = ops.head_topk(logits, 1, 1.0, 0.0)[1].view(1, -1)
            return ops.accept_greedy(proposal.tokens, proposal.offered, ids)
        count, first = proposal.tokens.shape[1], self.target.length + 1
        request = self._request(sampling)
        return ops.accept(
            proposal.tokens,
            proposal.offered,
            request.probs(logits)[None],
            proposal.q_ids,
            proposal.q,
            self._uniform(first, count, request, ACCEPT_STREAM)[None],
            self._uniform(first, count + 1, request, TARGET_STREAM)[None],
        )

    def _flush(self) -> None:
        """Hand the drafter its context; a burst of plain steps is handed over at once."""
        if self._pending and self.drafter is not None:
            rows = self._pending
            self.drafter.commit(rows[0] if len(rows) == 1 else torch.cat(rows))
            self._pending, self._pending_bytes = [], 0

    def _commit(self, anchor: int, emitted: list[int]) -> None:
        """The anchor and all emitted tokens but the last are now in the state."""
        rows = len(emitted)
        self.target.commit(rows)
        if self.drafter is not None:
            hidden = self._verified.target_hidden[:rows]
            self._pending.append(hidden)
            self._pending_bytes += hidden.nbytes
            if self._pending_bytes >= _PENDING_BYTES:
                self._flush()
        self._committed += [anchor, *emitted[:-1]]
