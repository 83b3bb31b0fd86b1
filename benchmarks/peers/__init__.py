"""Peers: kernels of others, measured beside ours where a folder has them. None is kept here."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..work import Absent, Peer
from .fla import Fla
from .llama import Llama
from .vllm import Vllm

__all__ = ["PEERS", "open_peers"]

PEERS: dict[str, Callable[[Path], Peer]] = {"vLLM": Vllm, "llama.cpp": Llama, "fla-core": Fla}


class _Missing(Peer):
    """A peer that could not be loaded: absent from everything, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattribute__(self, name: str) -> object:
        if name in ("matmul", "delta", "conv", "norm"):
            reason = self.reason

            def absent(work: object) -> None:
                raise Absent(reason)

            return absent
        return super().__getattribute__(name)


def open_peers(folder: Path | None, device: torch.device) -> tuple[dict[str, Peer], dict[str, str]]:
    """Load what is in the folder.

    Args:
        folder: made by ``peers.pack``; None: nothing is loaded.
        device: they run on CUDA devices only.

    Returns:
        every peer by name, and for the report what each is: its version, or why it is absent.
    """
    peers: dict[str, Peer] = {}
    found: dict[str, str] = {}
    for name, load in PEERS.items():
        try:
            if folder is None:
                raise Absent("no folder of peers was given")
            if device.type != "cuda":
                raise Absent(f"it runs on CUDA devices only, this is a {device.type}")
            peers[name] = load(folder)
            found[name] = peers[name].name
        except Exception as error:  # a peer that fails must not take our figures along
            reason = str(error) if isinstance(error, Absent) else f"{type(error).__name__}: {error}"
            peers[name], found[name] = _Missing(reason), f"absent: {reason}"
    return peers, found
