"""Checks the CUDA kernels on a GPU and writes what held, as one JSON file.

    python tools/gpu_check.py --out results.json

Every stage runs in a process of its own, so that a fault in one leaves the others their device:

    equality      every sample of every operator on CPU and GPU, bit for bit, written tensors too
    independence  a row among 1 .. 40 rows, the others NaN, against that row alone
    rows          a block of rows against the same rows one step at a time
    graphs        capture, three replays, replays with other contents of the arguments
    determinism   twenty runs of every sample
    session       the model of --model on the GPU: plain and speculative tokens, and the CPU's
    tests         pytest over tests/ops on the GPU
    memcheck, racecheck   compute-sanitizer over every sample (needs it on the PATH)
"""

import argparse
import concurrent.futures
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_rows import INDEPENDENT, block_against_single_rows

import torch_dflash.testing.samples  # noqa: F401
from torch_dflash.testing import OPERATORS, Operator
from torch_dflash.testing.samples.act import equal_planes

ROOT = Path(__file__).parents[1]
STAGES = ("session", "equality", "independence", "rows", "graphs", "determinism", "sanitize")
LONGEST = ["tests", "memcheck", "racecheck"]
Json = dict[str, Any]


def on_gpu() -> list[Operator]:
    """Operators that have a kernel for the device."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [op for op in OPERATORS.values() if has(f"dflash::{op.name}", DEVICE.type.upper())]


def tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors among (nested) arguments or results, on the CPU."""
    found: list[torch.Tensor] = []
    for v in values:
        if isinstance(v, torch.Tensor):
            found.append(v.detach().cpu())
        elif isinstance(v, (tuple, list)):
            found += tensors(*v)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; any NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = (x.masked_fill(nan, 0).reshape(-1) for x in (a, b))
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b)


def call(op: Operator, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Results and arguments after the call."""
    return tensors(getattr(torch.ops.dflash, op.name)(*args), args)


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def samples(op: Operator, device: torch.device) -> Iterator[tuple[Any, ...]]:
    return op.samples(device)


def equality() -> Json:
    """CPU and GPU, sample by sample."""
    report: Json = {}
    cpu = torch.device("cpu")
    report["repack"] = {"samples": 0, "equal": 0}  # its result is private to a device:
    for packed, ggml_type, columns in OPERATORS["repack"].samples(DEVICE):
        weight = torch.ops.dflash.repack(packed, ggml_type, columns)
        back = torch.ops.dflash.unpack(weight, ggml_type, packed.shape[0], columns)
        report["repack"]["samples"] += 1
        report["repack"]["equal"] += torch.equal(back, packed)  # nothing may be lost
    for op in on_gpu():
        if op.name in ("repack", "unpack"):
            continue
        row = {"samples": 0, "equal": 0, "largest_difference": 0.0}
        for ours, theirs in zip(samples(op, DEVICE), samples(op, cpu), strict=True):
            # a weight lies differently on each device: compare what was computed from it
            keep = [i for i, a in enumerate(theirs) if not is_weight(op, i, a)]
            got = tensors(getattr(torch.ops.dflash, op.name)(*ours), [ours[i] for i in keep])
            want = tensors(getattr(torch.ops.dflash, op.name)(*theirs), [theirs[i] for i in keep])
            row["samples"] += 1
            equal = all(same(a, b) or equal_planes(a, b) for a, b in zip(got, want, strict=True))
            row["equal"] += equal
            for a, b in zip(got, want, strict=True) if not equal else ():
                if a.is_floating_point() and a.numel():
                    off = (a.double() - b.double()).abs().nan_to_num(0.0).max().item()
                    row["largest_difference"] = max(row["largest_difference"], off)
        report[op.name] = row
    return report


def is_weight(op: Operator, index: int, value: Any) -> bool:
    """Whether an argument is a repacked weight."""
    layouts = {"qmm": [1], "qmm_glu": [1], "markov_chain": [5, 16]}
    return isinstance(value, torch.Tensor) and index in layouts.get(op.name, [])


def independence() -> Json:
    """Rows 0 and N - 1 among N rows, the others NaN, against the rows alone."""
    report: Json = {}
    for name, run in INDEPENDENT.items():
        failures = []
        for n in range(1, 41):
            for keep in {0, n - 1}:
                among = run(DEVICE, list(range(n)), keep)
                alone = run(DEVICE, [keep], keep)
                if not all(map(same, tensors(among), tensors(alone))):
                    failures.append([n, keep])
        report[name] = {"checked": 79, "failures": failures}
    return report


def rows() -> Json:
    """Blocks of rows against single rows."""
    return {
        name: {"equal": all(map(same, tensors(a), tensors(b)))}
        for name, a, b in block_against_single_rows(DEVICE)
    }


def changed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Other contents of the same shapes: sequences in another order, rows rolled."""

    def other(a: Any) -> Any:
        if not isinstance(a, torch.Tensor) or a.dim() == 0 or a.shape[0] < 2:
            return a.clone() if isinstance(a, torch.Tensor) else a
        if a.dtype == torch.uint8:
            return a.clone()
        starts = (
            a.dtype == torch.int32
            and a.dim() == 1
            and int(a[0]) == 0
            and bool((a[1:] >= a[:-1]).all())
        )
        return a.clone() if starts else a.flip(0) if a.dtype == torch.int32 else a.roll(1, 0)

    return tuple(map(other, args))


def refill(static: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    for to, value in zip(static, values, strict=True):
        if isinstance(to, torch.Tensor):
            to.copy_(value)


def graphs() -> Json:
    """Capture once, replay with the same and with other contents."""
    report: Json = {}
    for op in on_gpu():
        row = {"samples": 0, "equal": 0, "followed": 0}
        function = getattr(torch.ops.dflash, op.name)
        for args in samples(op, DEVICE):
            static = copies(args)
            if not any(a.numel() for a in tensors(static)):
                continue
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # a host sync in here is an error
                out = function(*static)
            good, followed = True, False
            first: list[torch.Tensor] = []
            for round_ in range(6):
                values = args if round_ < 3 else changed(args)
                refill(static, values)
                graph.replay()
                got = tensors(out, static)
                want = call(op, copies(values))
                good = good and all(map(same, got, want))
                first = first or got
                followed = followed or not all(map(same, got, first))
            row["samples"] += 1
            row["equal"] += good
            row["followed"] += followed
        report[op.name] = row
    return report


def determinism() -> Json:
    """The same bits twenty times."""
    report: Json = {}
    for op in on_gpu():
        row = {"samples": 0, "equal": 0}
        for args in samples(op, DEVICE):
            want = call(op, copies(args))
            row["samples"] += 1
            row["equal"] += all(all(map(same, call(op, copies(args)), want)) for _ in range(20))
        report[op.name] = row
    return report


def sanitize() -> Json:
    """Every sample once, for compute-sanitizer to watch; then indices that lead nowhere."""
    count = {"samples": 0, "wrong indices": 0}
    for op in on_gpu():
        for args in samples(op, DEVICE):
            call(op, copies(args))
            count["samples"] += 1
            for i, a in enumerate(args):
                if not isinstance(a, torch.Tensor) or a.dtype not in (torch.int32, torch.int64):
                    continue
                for value in (1 << 30, -7) if a.numel() else ():
                    call(op, (*args[:i], torch.full_like(a, value), *args[i + 1 :]))
                    count["wrong indices"] += 1
    torch.cuda.synchronize()
    return count


def session(tokens: int = 48) -> Json:
    """Plain and speculative greedy tokens on the device, and the CPU's."""
    from torch_dflash.decoding.loop import Session
    from torch_dflash.load import DRAFTERS, load_drafter, load_target

    generator = torch.Generator().manual_seed(0)
    report: Json = {}
    for kind in ("journal", "snapshots"):
        there = load_target(MODEL / "target.gguf", state=kind)
        prompts = [
            torch.randint(0, there.vocab_size, (n,), generator=generator).tolist()
            for n in (7, 33, 70)
        ]
        want = [Session(there).generate(p, tokens).tokens for p in prompts]
        here = load_target(MODEL / "target.gguf", state=kind).to(DEVICE)
        plain = [Session(here).generate(p, tokens).tokens for p in prompts]
        report[f"{kind} plain"] = {"equals_cpu": plain == want}
        for name in DRAFTERS:
            if not (MODEL / f"{name}.gguf").exists():
                continue
            drafter = load_drafter(MODEL / f"{name}.gguf", here).to(DEVICE)
            runs = [Session(here, drafter).generate(p, tokens) for p in prompts]
            report[f"{kind} {name}"] = {
                "equals_plain": [r.tokens for r in runs] == plain,
                "equals_cpu": [r.tokens for r in runs] == want,
                "accepted": sum(r.stats.accepted for r in runs),
                "offered": sum(r.stats.offered for r in runs),
            }
    return report


def pytest_command() -> list[str]:
    missing = sorted(set(OPERATORS) - {op.name for op in on_gpu()})
    wanted = "cuda" + "".join(f" and not {name}" for name in missing)
    return [sys.executable, "-m", "pytest", "-n", "4", "-k", wanted, "--tb=short", "-rf",
            "-p", "no:cacheprovider", "tests/ops"]  # fmt: skip


def sanitizer_command(tool: str, out: Path) -> list[str]:
    own = [sys.executable, __file__, "--stage", "sanitize", "--out", str(out)]
    return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20",
            *own]  # fmt: skip


def run_stage(name: str, command: list[str], timeout: int, out: Path | None) -> Json:
    """One stage in its own process: its JSON, or how it ended."""
    began = time.time()
    env = dict(os.environ)
    if "sanitizer" in command[0]:  # an allocation of its own for every tensor
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, timeout=timeout, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, text = -1, f"over {timeout} s: {error.output!r}"
    except FileNotFoundError as error:
        code, text = -2, str(error)
    result: Json = {"exit": code, "seconds": round(time.time() - began, 1)}
    if out is not None and out.exists():
        result["result"] = json.loads(out.read_text())
    if code != 0 or out is None:
        result["tail"] = text[-3000:]
    if "sanitizer" in command[0]:
        result["summary"] = [ln for ln in text.splitlines() if "SUMMARY" in ln]
    print(f"-- {name}: exit {code}, {result['seconds']} s", flush=True)
    if code != 0:
        print(text[-2500:], flush=True)
    return result


def environment() -> Json:
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    try:
        smi = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
    except FileNotFoundError:
        smi = "no nvidia-smi"
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "name, driver, SM clock, memory clock, largest SM clock": smi,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "operators": [op.name for op in on_gpu()],
    }


def print_table(report: Json) -> None:
    stages = report["stages"]

    def cell(stage: str, op: str) -> str:
        r = stages.get(stage, {}).get("result", {}).get(op)
        if not isinstance(r, dict):
            return "-"
        if "failures" in r:
            return f"{r['checked'] - len(r['failures'])}/{r['checked']}"
        more = f" (off {r['largest_difference']:.1e})" if r.get("largest_difference") else ""
        return f"{r['equal']}/{r['samples']}{more}"

    columns = ("equality", "independence", "graphs", "determinism")
    print(f"{'operator':20}" + "".join(f"{c:>22}" for c in columns))
    for op in report["environment"]["operators"]:
        print(f"{op:20}" + "".join(f"{cell(c, op):>22}" for c in columns))
    for name in ("rows", "session"):
        for case, r in stages.get(name, {}).get("result", {}).items():
            print(f"{name}: {case}: {r}")
    for name in LONGEST:
        s = stages.get(name, {})
        last = s.get("summary") or s.get("tail", "").strip().splitlines()[-1:]
        print(f"{name}: exit {s.get('exit')}: {' '.join(last)}")


def main() -> int:
    """Run the stages asked for, side by side."""
    only = args.only.split(",") if args.only else [*LONGEST, *STAGES[:-1]]
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, tuple[list[str], int, Path | None]] = {}
        for name in only:
            out = Path(folder) / f"{name}.json"
            if name in ("memcheck", "racecheck"):
                jobs[name] = (sanitizer_command(name, out), args.timeout, out)
            elif name == "tests":
                jobs[name] = (pytest_command(), args.timeout, None)
            else:
                own = [sys.executable, __file__, "--stage", name, "--out", str(out),
                       "--device", str(DEVICE), "--model", str(MODEL)]  # fmt: skip
                jobs[name] = (own, args.timeout, out)
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            futures = {n: pool.submit(run_stage, n, *job) for n, job in jobs.items()}
            stages = {n: f.result() for n, f in futures.items()}
    report = {"commit": args.commit, "environment": environment(), "stages": stages}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    return int(any(s["exit"] != 0 for s in stages.values()))


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
parser.add_argument("--device", default="cuda", help="cpu tries the script without a GPU")
parser.add_argument("--model", type=Path, default=ROOT / "torch_dflash/assets/tiny")
parser.add_argument("--stage", choices=STAGES, help="run one stage in this process")
parser.add_argument("--only", help="stages to run, comma-separated")
parser.add_argument("--jobs", type=int, default=4, help="stages at a time")
parser.add_argument("--timeout", type=int, default=200, help="seconds for one stage")
parser.add_argument("--commit", default="", help="recorded in the result")

if __name__ == "__main__":
    args = parser.parse_args()
    DEVICE, MODEL = torch.device(args.device), args.model.resolve()
    if args.stage is None:
        sys.exit(main())
    stage: Callable[[], Json] = globals()[args.stage]
    try:
        args.out.write_text(json.dumps(stage()))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
