"""Times every operator and whole steps on a GPU: python -m benchmarks.run --out FILE.json

    python -m benchmarks.run --out h200.json --peers FOLDER --plot h200.png
    python -m benchmarks.run --families qmm --types Q4_K Q6_K --rows 1 8

Part of tools/gpu_check.py runs first; where it fails there are no numbers. Every figure is the
median of replays of a CUDA graph, its weights and states rotated past the L2 cache. Peers are other
projects' kernels, packed by `benchmarks.peers.pack`; one that is absent is reported as absent.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .cases import FAMILIES, MATMUL_TYPES, Context
from .environment import ROOT, clocks, commit, environment
from .peers import open_peers
from .profile import profiles
from .record import table, to_json
from .shapes import QWEN_27B, TINY
from .suite import Outcome, run
from .timing import CudaClock, HostClock

CHECKS = "equality,rows"  # of tools/gpu_check.py: every sample of every operator against the CPU


def check(stages: str, device: torch.device, commit_name: str) -> dict[str, Any]:
    """Run part of tools/gpu_check.py.

    Returns:
        for each stage its seconds.

    Raises:
        SystemExit: something does not hold.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "check.json"
        command = [sys.executable, "tools/gpu_check.py", "--only", stages, "--device", str(device),
                   "--commit", commit_name, "--out", str(out)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        report = json.loads(out.read_text()) if out.exists() else {"stages": {}}
    wrong = unequal(report["stages"])
    if done.returncode or wrong or not report["stages"]:
        print(done.stdout[-4000:])
        raise SystemExit(f"tools/gpu_check.py --only {stages} fails: no numbers {wrong}")
    return {
        name: {"exit": s["exit"], "seconds": s["seconds"]} for name, s in report["stages"].items()
    }


def unequal(stages: dict[str, Any]) -> list[str]:
    """What a stage found that it should not have, although it ran to its end."""
    wrong = []
    for stage, entry in stages.items():
        for name, found in entry.get("result", {}).items():
            if not isinstance(found, dict):  # a count
                continue
            wanted = found.get("samples", True)
            if found.get("equal", wanted) != wanted or found.get("failures"):
                wrong.append(f"{stage}: {name}")
    return wrong


def report(outcome: Outcome, context: Context, checks: Any, peers: dict[str, str],
           before: dict[str, str], seconds: float) -> dict[str, Any]:  # fmt: skip
    """What is written."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("DFLASH_COMMIT") or commit(),
        "environment": environment(context.device),
        "clocks": {"before": before, "after": clocks()},
        "checks": checks,
        "model": context.shapes.name,
        "protocol": {
            "repeats": context.repeats,
            "cold_bytes": context.shapes.cold_bytes,
            "stream": "S: torch.nn.functional.linear in bfloat16, same shape and rows, rotated",
            "floor": "bytes that a step must read over read_gbps, a sum over a large buffer",
            "read_gbps": context.read_gbps,
        },
        "peers": peers,
        "seconds": round(seconds, 1),
        "left_out": outcome.left_out,
        "failed": outcome.failed,
        "records": [r.to_dict() for r in outcome.records],
    }


def profile_steps(context: Context, written: dict[str, Any], say: Callable[[str], None]) -> None:
    """Add the kernels of whole steps; a profiler that is not there costs no figure."""
    written["kernels"] = {}
    try:
        for name, found in profiles(context, say):
            written["kernels"][name] = found
    except Exception as error:
        context.failed["profile"] = f"{type(error).__name__}: {error}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="picture, needs matplotlib")
    parser.add_argument("--peers", type=Path, default=os.environ.get("DFLASH_PEERS"),
                        help="folder of peers (default: DFLASH_PEERS)")  # fmt: skip
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--types", nargs="+", choices=MATMUL_TYPES, default=list(MATMUL_TYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=15, help="timed replays of a figure")
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="begin no case after so many; what is left out is said")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="kernels of whole steps")
    parser.add_argument("--checks", default=CHECKS,
                        help="stages of tools/gpu_check.py (default: %(default)s)")  # fmt: skip
    parser.add_argument("--unchecked", action="store_true", help="no tests first (while tuning)")
    parser.add_argument("--device", default="cuda", help="cpu tries the suite, with tiny shapes")
    args = parser.parse_args(argv)
    if args.peers is not None:
        args.peers = Path(args.peers)
    return args


def main(argv: list[str] | None = None) -> int:
    """Check, measure, write, print."""
    args = arguments(argv)
    began = time.monotonic()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("benchmarks.run: --device must be there, got no CUDA; cpu tries the suite")
    checks: Any = "skipped"
    if not args.unchecked:
        checks = check(args.checks, device, commit())
        print(f"checked: {checks} ({time.monotonic() - began:.1f} s)", flush=True)
    peers, found = open_peers(args.peers, device)
    for name, what in found.items():
        print(f"peer {name}: {what}", flush=True)
    context = Context(
        device=device,
        shapes=QWEN_27B if on_gpu else TINY,
        clock=CudaClock() if on_gpu else HostClock(),
        peers=peers,
        types=args.types,
        rows=sorted(args.rows),
        repeats=args.repeats,
    )
    before = clocks()
    written: dict[str, Any] = {}

    def say(text: str) -> None:
        print(text, flush=True)

    def keep(outcome: Outcome) -> None:
        seconds = time.monotonic() - began
        written.update(report(outcome, context, checks, found, before, seconds))
        if args.out is not None:
            args.out.write_text(to_json(written))

    with torch.inference_mode():
        left = args.seconds - (time.monotonic() - began)
        outcome = run(context, args.families, left, say, keep)
        if args.profile:
            profile_steps(context, written, say)
    keep(outcome)
    print(f"\n{table(outcome.records)}")
    if checks == "skipped":
        print("not checked first: no figures to keep")
    for name, reason in outcome.failed.items():
        print(f"{name}: {reason}")
    if outcome.left_out:
        print(f"left out after {written['seconds']:.0f} s: {', '.join(outcome.left_out)}")
    if args.plot is not None:
        from .plot import plot

        plot(written, args.plot)
    return int(bool(outcome.failed))


if __name__ == "__main__":
    sys.exit(main())
