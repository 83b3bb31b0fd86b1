"""Microseconds and weights per clock of the CPU matmul: python -m benchmarks.cpu_matmul [--hz HZ].

The operator's tests run first; red tests, no number. The least of many repeats is shown: it is what
the code costs when nobody else holds the core.
"""

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torch_dflash import ops
from torch_dflash.testing.samples.quant import random_packed

ROOT = Path(__file__).parents[1]
TYPES = {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "Q8_0": 8, "Q4_0": 2, "IQ4_XS": 23, "F16": 1}


def least(run: Callable[[], object], budget: float) -> float:
    """Seconds of the fastest of as many calls as fit the budget, at least five."""
    best, end, calls = float("inf"), time.perf_counter() + budget, 0
    while calls < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


def clock_rate() -> float:
    """Hertz as /proc/cpuinfo says; a virtual machine may run faster than that."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return float(line.split(":")[1]) * 1e6
    raise SystemExit("no clock rate in /proc/cpuinfo: give --hz")


def main() -> None:
    """Print a line per type, shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hz", type=float, help="clock rate of a core")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=0.2, help="seconds per figure")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--shapes", nargs="+", default=["512x512", "2048x512", "4096x4096"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--untested", action="store_true", help="skip the tests (while tuning)")
    args = parser.parse_args()
    if not args.untested:
        tests = [sys.executable, "-m", "pytest", "-q", "-x", "tests/ops/test_matmul.py"]
        if subprocess.run(tests, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit("the operator's tests fail: no numbers")
    hz = args.hz or clock_rate()
    torch.set_num_threads(args.threads)
    print(
        f"{platform.processor() or platform.machine()}, {hz / 1e9:.2f} GHz, {args.threads} threads"
    )
    print(f"{'type':8}{'rows x columns':16}{'N':>4}{'us':>10}{'weights/clk':>13}{'vs N=1':>8}")
    g = torch.Generator().manual_seed(0)
    for name in args.types:
        for shape in args.shapes:
            rows, columns = map(int, shape.split("x"))
            t = TYPES[name]
            packed = random_packed(t, rows, columns // ops.quant_geometry(t)[0], g)
            weight = ops.repack(packed, t, columns)
            first = 0.0
            for n in args.rows:
                x = torch.randn(n, columns, generator=g)
                x = x if name == "F16" else ops.quant_act(x, 1)
                call = (x, weight, [t], [rows], columns, None)
                run = torch.ops.dflash.qmm.default
                seconds = least(lambda call=call, run=run: run(*call), args.budget)
                first = first or seconds
                rate = rows * columns * n / seconds / hz
                print(
                    f"{name:8}{shape:16}{n:4}{seconds * 1e6:10.1f}{rate:13.1f}"
                    f"{seconds / first:8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
