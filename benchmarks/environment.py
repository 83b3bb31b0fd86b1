"""Provenance: the device, its clocks, versions, the commit."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["clocks", "commit", "environment"]

ROOT = Path(__file__).parents[1]
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")


def _smi(*fields: str) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return {"nvidia-smi": f"none: {error}"}
    return dict(zip(fields, map(str.strip, done.stdout.strip().split(",")), strict=False))


def clocks() -> dict[str, str]:
    """Clocks, temperature and power at this moment."""
    return _smi(*_CLOCKS)


def commit() -> str:
    """Commit of the sources, ``-dirty`` with changes; ``unknown`` outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures were taken with."""
    found: dict[str, Any] = {
        "device": "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        # no folders: where things lay says nothing
        "command": [Path(argument).name for argument in sys.argv],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "driver": _smi("driver_version").get("driver_version"),
        }
    return found
