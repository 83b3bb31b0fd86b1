"""``torch-dflash doctor``: what is installed, built and usable here; where two backends differ."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from typing import Any

__all__ = ["add_parser", "report"]


def add_parser(commands: Any) -> None:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="versions, backends, devices, and what is built",
        description="Say what is installed, built and usable here; with --bisect, which operator "
        "of a target differs from its reference. The exit status is 1 if one does.",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--bisect",
        nargs="?",
        const="",
        metavar="MODEL",
        help="run a target with every operator and with its float64 reference, layer by layer, "
        "and name the first that differs (default: the embedded model)",
    )
    parser.set_defaults(run=run)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def report() -> dict[str, Any]:
    """Facts about this installation, as plain values."""
    import torch

    import torch_dflash

    from .. import _ext
    from ..load import ASSETS, DRAFTERS

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    built = [n for n in ("_C", "_cuda", "_hip") if importlib.util.find_spec(f"torch_dflash.{n}")]
    names = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("dflash::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    # facts about formats and sizes have one kernel for every device
    names = [n for n in names if not has(n, "CompositeExplicitAutograd")]
    keys = {"cpu": "CPU", "cuda": "CUDA"}
    return {
        "torch-dflash": torch_dflash.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {
            p: v for p in ("gguf", "safetensors", "tokenizers", "vllm") if (v := _version(p))
        },
        "libraries": built,
        "backends": {
            b: f"{sum(has(n, keys[b]) for n in names)} of {len(names)} operators"
            for b in _ext.BACKENDS
        },
        "instruction set": _isa(os.environ.get("DFLASH_ISA")),
        "threads": torch.get_num_threads(),
        "devices": devices or ["cpu"],
        "embedded model": [f.name for f in sorted(ASSETS.glob("*.gguf"))]
        or f"missing: {', '.join(('target', *DRAFTERS))}",
    }


def _isa(asked: str | None) -> str:
    """What the kernels run with, or why they do not run."""
    from pathlib import Path

    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    wide = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
    best = "avx512" if all(f in flags for f in wide) else "avx2"
    if asked not in (None, "", "avx2", "avx512"):
        return f"none: DFLASH_ISA must be avx2 or avx512, got {asked}"
    if asked == "avx512" != best:
        return "none: DFLASH_ISA=avx512, and this processor has no AVX-512 VNNI"
    return asked or best


def run(args: argparse.Namespace) -> int:
    """Print the report, or bisect."""
    if args.bisect is not None:
        from .bisect import bisect

        return bisect(args.bisect or None)
    facts = report()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for key, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        print(f"{key:16} {value}")
    return 0
