"""Graphs of operator calls on the CPU: recorded once, replayed without Python in between."""

import torch

__all__ = ["graph_begin", "graph_bytes", "graph_end", "graph_free", "graph_replay"]


def graph_begin() -> None:
    """Record every operator that this thread calls on CPU tensors from now on; they run as usual.

    Raises:
        RuntimeError: this thread is recording already.

    Source: ``csrc/cpu/graph.h``. Backends: CPU (on a GPU: CUDA graphs, ``decoding/recorders.py``).
    """
    torch.ops.dflash.graph_begin.default()


def graph_end() -> int:
    """Stop recording.

    The graph keeps every tensor that was an argument or a result.

    Returns:
        handle of the graph.

    Raises:
        RuntimeError: this thread is not recording.

    Source: ``csrc/cpu/graph.h``. Backends: CPU.
    """
    return torch.ops.dflash.graph_end.default()


def graph_replay(handle: int) -> None:
    """Run the recorded operators again: on the same tensors, into the same results.

    Values may have changed, shapes have not. One thread at a time.

    Args:
        handle: from :func:`graph_end`.

    Raises:
        RuntimeError: no such graph, this thread is recording, or what an operator raises.

    Source: ``csrc/cpu/graph.h``. Backends: CPU.
    """
    torch.ops.dflash.graph_replay.default(handle)


def graph_bytes(handle: int) -> int:
    """Bytes of the results that a graph keeps.

    Args:
        handle: from :func:`graph_end`.

    Returns:
        bytes.

    Raises:
        RuntimeError: no such graph.

    Source: ``csrc/cpu/graph.h``. Backends: CPU.
    """
    return torch.ops.dflash.graph_bytes.default(handle)


def graph_free(handle: int) -> None:
    """Forget a graph and the tensors that it keeps.

    Args:
        handle: from :func:`graph_end`.

    Raises:
        RuntimeError: no such graph.

    Source: ``csrc/cpu/graph.h``. Backends: CPU.
    """
    torch.ops.dflash.graph_free.default(handle)
