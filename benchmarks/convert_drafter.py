"""How long a drafter of 27B dimensions takes to convert, and how much memory.

    python -m benchmarks.convert_drafter FOLDER [--outtypes bf16 q8_0] [--keep]

Writes a random DFlash2 checkpoint of z-lab/Qwen3.8-27B-DFlash2's dimensions (1.92 G values, 3.8 GB)
into FOLDER, converts it to each type, each in a process of its own, and prints one JSON object.
Memory is that of the process beyond the files it has mapped (``RssAnon``), at its highest.
"""

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from torch_dflash.testing.published import DFLASH2_27B

CONFIG = {**DFLASH2_27B, "max_position_embeddings": 262144}


def write_checkpoint(folder: Path) -> None:
    """Random bfloat16 weights, one piece of a million in memory at a time."""
    from torch_dflash.drafters.from_hf import config_from_hf
    from torch_dflash.drafters.tensors import tensor_table
    from torch_dflash.gguf import DeferredTensor
    from torch_dflash.safetensors_file import write_safetensors

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1))
    noise = noise.mul(0.02).to(torch.bfloat16)

    def deferred(shape: tuple[int, ...]) -> DeferredTensor:
        rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
        step = max(1, len(noise) // columns)

        def pieces():
            for at in range(0, rows, step):
                n = min(step, rows - at)
                yield noise[: n * columns].view(n, columns).view(torch.uint8)

        return DeferredTensor(30, shape, pieces)

    table = tensor_table(config_from_hf(CONFIG))
    write_safetensors(
        folder / "model.safetensors", {n: deferred(s) for n, s in table.required.items()}
    )


def convert(source: Path, path: Path, outtype: str) -> None:
    """Convert in this process, and print what it took."""
    from torch_dflash import convert_drafter

    torch.set_num_threads(2)
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], _anonymous())

    base = _anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        convert_drafter(source, path, outtype=outtype)
    finally:
        done.set()
        watcher.join()
    seconds = time.perf_counter() - began
    facts = {
        "seconds": round(seconds, 1),
        "peak_mb": round(peak[0] / 1024),
        "of_which_before": round(base / 1024),
        "file_mb": round(path.stat().st_size / 2**20),
    }
    print(json.dumps(facts))


def _anonymous() -> int:
    """kB that belong to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    return 0


def main() -> int:
    """Write, convert, print, clean up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--outtypes", nargs="+", default=["bf16", "q8_0"])
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    source, path = args.folder / "hf", args.folder / "x.gguf"
    if args.one:
        convert(source, path, args.one)
        return 0
    if not (source / "model.safetensors").exists():
        write_checkpoint(source)
    report = {}
    for outtype in args.outtypes:
        command = [sys.executable, "-m", "benchmarks.convert_drafter", args.folder]
        done = subprocess.run([*command, "--one", outtype], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        report[outtype] = json.loads(done.stdout)
        path.unlink()
    print(json.dumps(report, indent=2))
    if not args.keep:
        shutil.rmtree(source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
