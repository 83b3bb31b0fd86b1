"""What a pass is recorded by: our own graphs on the CPU, CUDA graphs on a GPU."""

import contextlib
import threading
import time
import weakref
from typing import Any, Protocol

import torch

from .. import ops

__all__ = ["RECORDING", "CudaRecorder", "Pool", "Recorder", "recording_seconds"]


class Recorder(Protocol):
    """Records what is called between ``begin`` and ``end``, and runs it again.

    Attributes:
        bytes: intermediate results that the recording keeps to itself.
        runs: whether what is recorded also runs meanwhile.
    """

    bytes: int
    runs: bool

    def begin(self) -> None:
        """Start.

        Raises:
            RuntimeError: somebody else is recording.
        """

    def end(self) -> None:
        """Stop, and keep what was recorded."""

    def abandon(self) -> None:
        """Stop wherever an error or an interrupt came, and keep nothing."""

    def replay(self) -> None:
        """Run it again: on the same tensors, into the same results."""


class CpuRecorder:
    """Operator calls of this thread (``ops.graph_*``), which run while they are recorded."""

    runs = True

    def __init__(self) -> None:
        self.bytes = 0

    def begin(self) -> None:
        """Start."""
        ops.graph_begin()

    def end(self) -> None:
        """Stop, and keep the graph as long as this object lives."""
        self._handle = ops.graph_end()
        weakref.finalize(self, ops.graph_free, self._handle).atexit = False
        self.bytes = ops.graph_bytes(self._handle)

    def abandon(self) -> None:
        """Stop; an interrupt between two bytecodes may have come before the beginning."""
        with contextlib.suppress(RuntimeError):
            ops.graph_free(ops.graph_end())

    def replay(self) -> None:
        """Run the calls again."""
        ops.graph_replay(self._handle)


class Pool:
    """Memory of a GPU that several CUDA graphs use in turn.

    What one of them computes on the way lies where another's results may lie: a result is read
    before any other graph of the pool runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # captures need one that is not the default
        self.handle = torch.cuda.graph_pool_handle()


class CudaRecorder:
    """Everything that is launched on the device between begin and end, as one CUDA graph.

    Nothing runs while it is captured. The first run of a pass must not be a warm-up on the side:
    a step that ran twice would replay the journal of its recurrent states twice.
    """

    runs = False
    bytes = 0  # the pool holds them once for all graphs

    def __init__(self, pool: Pool) -> None:
        self._pool, self._graph = pool, torch.cuda.CUDAGraph()
        self._on_stream: Any = None

    def begin(self) -> None:
        """Start; the work of other threads does not disturb the capture."""
        on_stream = torch.cuda.stream(self._pool.stream)
        on_stream.__enter__()
        self._on_stream = on_stream
        self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")

    def end(self) -> None:
        """Stop, and make the graph."""
        self._graph.capture_end()
        self._leave_stream()

    def abandon(self) -> None:
        """Stop; the graph, whole or not, is dropped with this object."""
        with contextlib.suppress(RuntimeError):
            self._graph.capture_end()
        self._leave_stream()

    def _leave_stream(self) -> None:
        on_stream, self._on_stream = self._on_stream, None
        if on_stream is not None:
            on_stream.__exit__(None, None, None)

    def replay(self) -> None:
        """Run it behind whatever the current stream holds already."""
        self._graph.replay()


class _Recording(threading.local):
    """What this thread records, or was interrupted while it did."""

    recorder: Recorder | None = None
    seconds = 0.0
    _began = 0.0

    def begin(self, recorder: Recorder) -> None:
        """Start; an interrupt between this and :meth:`end` is made good by the next pass."""
        self._began = time.perf_counter()
        self.recorder = recorder
        try:
            recorder.begin()
        except RuntimeError:  # somebody else's recording is on, and is not ours to end
            self.recorder = None
            raise

    def end(self) -> None:
        """Stop, and keep what was recorded."""
        if self.recorder is not None:
            self.recorder.end()
        self.recorder = None
        self.seconds += time.perf_counter() - self._began

    def abandon(self) -> None:
        """Forget a recording that an error or an interrupt left behind, if there is one."""
        if self.recorder is not None:
            self.recorder.abandon()
        self.recorder = None


RECORDING = _Recording()


def recording_seconds() -> float:
    """Time that this thread has spent recording passes: once per shape, so no step's own."""
    return RECORDING.seconds
