"""Compiles every CUDA source for the architectures that were never measured, and reports on it.

    python tools/cuda_resources.py            # 8.0, 10.0 and 12.0
    python tools/cuda_resources.py 9.0a

Needs nvcc, no GPU. Fails if a file does not compile; names the kernels that spill registers.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[1]
FLAGS = [
    *("-std=c++20", "-O3", "-fmad=false", "-DUSE_CUDA", "-c", "-Xptxas=-v"),
    *("-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-Xcompiler=-fvisibility=hidden,-fPIC"),
]
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<spilled>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def compile_one(nvcc: str, source: Path, arch: str) -> tuple[Path, str, int, str]:
    """Source, architecture, exit status and what the compiler said."""
    number = arch.replace(".", "")
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *FLAGS, f"-gencode=arch=compute_{number},code=sm_{number}"]
        command += [f"-I{p}" for p in (ROOT / "csrc", *include_paths())]
        command += [str(source), "-o", str(Path(folder) / "out.o")]
        done = subprocess.run(command, capture_output=True, text=True)
    return source, arch, done.returncode, done.stdout + done.stderr


def main() -> int:
    """The report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archs", nargs="*", default=["8.0", "10.0", "12.0"], metavar="ARCH")
    archs = parser.parse_args().archs
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("cuda_resources: needs nvcc on PATH, got none; install a CUDA toolkit")
    sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    jobs = int(os.environ.get("MAX_JOBS", "2"))
    failed = False
    kernels: dict[str, list[tuple[str, int, int]]] = {a: [] for a in archs}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(compile_one, nvcc, s, a) for a in archs for s in sources]
        for source, arch, status, said in (t.result() for t in tasks):
            if status != 0:
                failed = True
                print(f"{source.name} does not compile for {arch}:\n{said}")
            kernels[arch] += [
                (m["name"], int(m["registers"]), int(m["spilled"])) for m in ENTRY.finditer(said)
            ]
    for arch, found in kernels.items():
        spilling = [k for k in found if k[2] > 0]
        most = max((k[1] for k in found), default=0)
        print(f"sm_{arch.replace('.', '')}: {len(found)} kernels, at most {most} registers, "
              f"{len(spilling)} spill; not measured")  # fmt: skip
        for name, registers, spilled in sorted(spilling, key=lambda k: -k[2]):
            print(f"    {spilled:5d} bytes, {registers} registers  {name}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
