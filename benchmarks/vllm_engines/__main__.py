"""Starts engines, each in a process of its own; they are timed one after another.

python -m benchmarks.vllm_engines --out engines.json
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..shapes import QWEN_27B, TINY
from .files import short, write_drafter, write_gguf_target, write_hf_target

CHILD = (
    "import json, os, sys; from benchmarks.vllm_engines.engine import measure; "
    "measure(**json.loads(sys.argv[1])); sys.stdout.flush(); os._exit(0)"
)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--layers", type=int, default=8, help="layers of the targets")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens of the vocabulary")
    parser.add_argument("--drafts", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--formats", nargs="+", default=["bf16", "gguf"])
    parser.add_argument("--timeout", type=int, default=240, help="seconds of all engines")
    parser.add_argument("--folder", type=Path, help="for files, kept; else a temporary one")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the files")
    return parser.parse_args()


class Engine:
    """An engine in a process of its own."""

    def __init__(self, folder: Path, name: str, **call: Any) -> None:
        self.answer, self.log = folder / f"{name}.json", folder / f"{name}.log"
        call |= {"lock": str(folder / "lock"), "answer": str(self.answer)}
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_DFLASH_DISABLE": "adaptive"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD, json.dumps(call)],
                stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **env},
            )  # fmt: skip

    def result(self, deadline: float) -> dict[str, Any]:
        """What it measured until the deadline; its log where it did not get to the end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.process.kill()
        empty = {"complete": False, "core_us": {}, "runs": []}
        found: dict[str, Any] = (
            json.loads(self.answer.read_text()) if self.answer.exists() else empty
        )
        if not found["complete"]:
            found["log"] = self.log.read_text()[-6000:]
        return found


def table(results: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    for name, result in results.items():
        yield f"{name}: " + ("complete" if result["complete"] else "BROKEN OFF")
        for key, us in result["core_us"].items():
            ratio = min(us["on"], us["on again"]) / us["off"]
            yield f"  core, {key}: {us['on']:.1f} us, vLLM's {us['off']:.1f}, ratio {ratio:.2f}"
        for r in result["runs"]:
            draft = "" if r["draft_us"] is None else f", draft {r['draft_us']:.0f} us"
            yield (
                f"  {r['position']}, batch {r['batch']}: verify {r['verify_us']:.0f} us{draft}, "
                f"step {r['ms_per_step']:.2f} ms, {r['tokens_per_s']:.0f} tokens/s"
            )


def main() -> None:
    """Write files, run engines, print and save."""
    args = arguments()
    config = short((TINY if args.tiny else QWEN_27B).target, args.layers, args.vocab)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        targets = {}
        if "bf16" in args.formats:
            targets["bf16"] = write_hf_target(folder / "hf", config)
        if "gguf" in args.formats:
            targets["gguf"] = write_gguf_target(folder / "q4_k_m.gguf", config, device)
        torch.cuda.empty_cache()
        drafters = {n: write_drafter(folder / f"drafter{n}", config, n) for n in args.drafts}
        print(f"files in {time.perf_counter() - start:.0f} s", flush=True)
        engines = {}
        for drafts in args.drafts:
            for kind, target in targets.items():
                if kind == "gguf" and drafts != args.drafts[0]:
                    continue
                engines[f"{kind}, {drafts} drafts"] = Engine(
                    folder, f"{kind}{drafts}",
                    model=str(target), drafter=str(drafters[drafts]), drafts=drafts,
                    batches=args.batches, switched=kind == "bf16", core=kind == "bf16",
                )  # fmt: skip
        deadline = time.monotonic() + args.timeout
        for name, engine in engines.items():
            results[name] = engine.result(deadline)
            args.out.write_text(json.dumps(results, indent=1))
            print("\n".join(table({name: results[name]})), flush=True)
            if "log" in results[name]:
                print(results[name]["log"], flush=True)


if __name__ == "__main__":
    main()
