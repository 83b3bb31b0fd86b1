"""The promise of the stable ABI: the wheel loads under another Python and the oldest torch.

Builds an environment with Python 3.12 and torch 2.11 (its CUDA build: no GPU is needed to load
``_cuda``), installs the wheel without its dependencies' newer versions, and runs a smoke test.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.11.0"
PACKAGES = ["numpy>=2", "gguf==0.19.0", "safetensors", "tokenizers", "jinja2", "rich"]
SMOKE = """
import sys, torch
import torch_dflash
from torch_dflash import _ext, ops
assert sys.version_info[:2] == (3, 12) and torch.__version__.startswith("2.11"), sys.version
x = torch.randn(3, 256)
w = torch.randint(0, 256, (5, 272), dtype=torch.uint8)
w.view(5, 8, 34)[..., 1] = 0x2C
out = ops.qmm(ops.quant_act(x, 1), ops.repack(w, 8, 256), [8], [5], 256)
ref = x.double() @ ops.dequantize(w, 8).double().T
assert (out - ref).abs().max() < 1e-4 * ref.abs().max(), (out, ref)
if torch.version.cuda:
    assert "cuda" in _ext.BACKENDS, f"_cuda did not load: {_ext.BACKENDS}"
print("loaded under Python", sys.version.split()[0], "and torch", torch.__version__, _ext.BACKENDS)
"""


def find_python(version: str) -> str:
    """A Python of this version: on PATH, or one that pyenv keeps."""
    if (path := shutil.which(f"python{version}")) and not subprocess.run(
        [path, "--version"], capture_output=True
    ).returncode:
        return path
    found = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    if not found:
        sys.exit(
            f"test-abi: Python {version} is needed, none was found; install it or put it on PATH"
        )
    return str(found[-1])


def main() -> int:
    """Install and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="folder of the wheel")
    parser.add_argument("--venv", type=Path, default=Path("build/abi"))
    args = parser.parse_args()
    wheels = sorted(args.dist.glob("torch_dflash-*-abi3-*.whl"), key=lambda p: p.stat().st_mtime)
    if not wheels:
        sys.exit(f"test-abi: {args.dist} must hold an abi3 wheel, found none; run `make wheel`")
    size = wheels[-1].stat().st_size / 2**20
    if size > 60:
        sys.exit(f"test-abi: the wheel must be at most 60 MB, got {size:.1f}")
    python = args.venv / "bin/python"
    if not python.exists():
        subprocess.run([find_python("3.12"), "-m", "venv", args.venv], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH, *PACKAGES], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheels[-1]], check=True)
    subprocess.run([python.absolute(), "-c", SMOKE],
                   check=True, cwd=args.venv)  # fmt: skip
    print(f"{wheels[-1].name}: {size:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
