"""Runs operators in a child process under another instruction set (tests)."""

import io
import os
import subprocess
import sys
from typing import Any

import torch

__all__ = ["output_under", "run_and_written", "run_with"]

CHILD = """
import io, sys, torch, torch_dflash
name, args = torch.load(io.BytesIO(sys.stdin.buffer.read()))
out = getattr(torch.ops.dflash, name)(*args)
torch.save((out, args), sys.stdout.buffer)
"""


def run_with(isa: str, name: str, *args: Any) -> Any:
    """The result of ``dflash::name(*args)`` under ``DFLASH_ISA=isa`` in a process of its own."""
    return run_and_written(isa, name, *args)[0]


def run_and_written(isa: str, name: str, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """The same, and the arguments as the operator left them."""
    payload = io.BytesIO()
    torch.save((name, args), payload)
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=payload.getvalue(),
        stdout=subprocess.PIPE,
        env={**os.environ, "DFLASH_ISA": isa},
        check=True,
    )
    return torch.load(io.BytesIO(done.stdout))


def output_under(isa: str, *arguments: str) -> str:
    """What ``python *arguments`` prints under ``DFLASH_ISA=isa``."""
    command = [sys.executable, *arguments]
    env = {**os.environ, "DFLASH_ISA": isa}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
