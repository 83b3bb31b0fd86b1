"""Forward passes recorded once per shape, then run without Python between their operators."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from .. import ops
from .kv_cache import KVCache, Rows
from .recorders import RECORDING, CpuRecorder, CudaRecorder, Pool, Recorder

__all__ = ["StepGraphs"]

_MOST_BYTES = 64 << 20  # of all intermediate results that recorded passes keep
R = TypeVar("R")


class _OnlyOperators(TorchDispatchMode):
    """A recorded pass consists of our operators; views are fixed, anything else would be lost."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what the graph does not see."""
        schema = func._schema
        views = [r for r in schema.returns if r.alias_info and not r.alias_info.is_write]
        if func.namespace != "dflash" and not views and not schema.name.endswith("empty"):
            raise RuntimeError(f"a recorded pass must consist of our operators, it ran {func}")
        return func(*args, **(kwargs or {}))


class _Pass(Generic[R]):
    """One recorded pass, run once: its inputs and results keep their addresses."""

    def __init__(
        self, recorder: Recorder, data: Tensor, rows: Rows, run: Callable[[Tensor, Rows], R]
    ) -> None:
        self.data, self.rows, self.recorder = data, rows, recorder
        RECORDING.begin(recorder)
        try:
            with _OnlyOperators():  # type: ignore[no-untyped-call]
                self.result = run(data, rows)
            RECORDING.end()
        except Exception:  # an interrupt is made good by the next pass
            RECORDING.abandon()
            raise
        if not recorder.runs:
            recorder.replay()


class StepGraphs:
    """The recorded passes of one model over one KV cache.

    A pass of the same name and number of rows is recorded at its first run and replayed from then
    on: the same operators on the same tensors, so the same bits. On a CPU by ``ops.graph_*``, on a
    GPU as a CUDA graph; the graphs of one model share their memory there. A result is overwritten
    by the next run of any pass. Passes run eagerly where operators are replaced by their
    references, under a dispatch mode, inside somebody else's CUDA graph, and on a CPU when the
    intermediate results of all passes would take more than 64 MiB: those models' steps are long
    enough to hide what a replay saves.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._graphs: dict[tuple[Hashable, int], _Pass[Any] | None] = {}
        self._bytes = 0
        self._pool: Pool | None = None  # of the passes on a GPU
        self._positions: Tensor | None = None  # of the cache that the passes use
        self._others: list[weakref.ref[Tensor]] = []  # that they read

    def __reduce__(self) -> tuple[type["StepGraphs"], tuple[bool]]:
        """A copy, also one in another process, has other tensors: it records its own passes."""
        return StepGraphs, (self.enabled,)

    def clear(self) -> None:
        """Forget all passes: what they read or write has moved."""
        self._graphs.clear()
        self._bytes = 0
        self._pool = None  # the next passes may not join one whose graphs are gone

    def run(
        self,
        name: Hashable,
        data: Tensor,
        cache: KVCache,
        start: int,
        run: Callable[[Tensor, Rows], R],
        tail: Tensor | None = None,
        others: Sequence[Tensor] = (),
    ) -> R:
        """``run(data, rows)`` for rows that stand at ``start ..``.

        Args:
            name: of the pass, and what it depends on besides its inputs.
            data: its input, one row each.
            cache: has room for the rows afterwards.
            start: position of the first row.
            run: of our operators alone; reads ``data``, ``rows`` and what keeps its address.
            tail: rows behind ``data`` that are the same every time.
            others: tensors that the passes read and another module may put elsewhere; where one of
                them is another than before, all passes are recorded again.
        """
        count = data.shape[0] + (0 if tail is None else tail.shape[0])
        key = (name, count)

        def whole() -> Tensor:
            return data if tail is None else torch.cat([data, tail])

        cache.reserve(start + count)
        recordable = self._recordable(data)
        if recordable:
            self._prepare(cache, others)
            if key not in self._graphs:
                with torch.inference_mode(False), torch.no_grad():  # to be written from either mode
                    own = Rows(cache, start, count, own=True)
                    recorded = _Pass(self._recorder(data.device), whole().clone(), own, run)
                    return self._keep(key, recorded).result
        graph = self._graphs[key] if recordable else None
        if graph is None:
            return run(whole(), Rows(cache, start, count))
        (graph.data if tail is None else graph.data[: data.shape[0]]).copy_(data)
        graph.rows.move(start)
        graph.recorder.replay()
        result: R = graph.result
        return result

    def _recordable(self, data: Tensor) -> bool:
        return (
            self.enabled
            and (
                data.device.type == "cpu"
                or (data.device.type == "cuda" and not torch.cuda.is_current_stream_capturing())
            )
            and not ops.REPLACED
            and _get_current_dispatch_mode() is None
        )

    def _recorder(self, device: torch.device) -> Recorder:
        if device.type == "cpu":
            return CpuRecorder()
        if self._pool is None:
            self._pool = Pool(device)
        return CudaRecorder(self._pool)

    def _prepare(self, cache: KVCache, others: Sequence[Tensor]) -> None:
        """Forget what an interrupt left, and passes over other tensors than these."""
        RECORDING.abandon()
        known = self._others
        moved = len(known) != len(others) or any(
            ref() is not t for ref, t in zip(known, others, strict=False)
        )
        if moved or cache.positions is not self._positions:  # another cache, or one that has grown
            self.clear()
            self._positions = cache.positions
            self._others = [weakref.ref(t) for t in others]  # theirs to free

    def _keep(self, key: tuple[Hashable, int], graph: _Pass[R]) -> _Pass[R]:
        """Replay it from now on, if there is room for what it keeps."""
        fits = self._bytes + graph.recorder.bytes <= _MOST_BYTES
        self._graphs[key] = graph if fits else None
        self._bytes += graph.recorder.bytes if fits else 0
        return graph
