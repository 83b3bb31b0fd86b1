"""Says what is missing before an environment is built: one line, with the next step."""

import platform
import shutil
import sys
from pathlib import Path


def problem() -> str | None:
    """The first thing that would make the build fail, or None."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this file runs before anything is installed
        return f"Python 3.10 or newer is needed, this is {platform.python_version()}; set PYTHON="
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"an x86-64 processor is needed, this is {platform.machine()}"
    if not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
        return "a C++20 compiler is needed, none was found; install g++ 11 or newer"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "avx2 fma"
    if "avx2" not in flags or "fma" not in flags:
        return "a processor with AVX2 and FMA is needed, this one has neither or just one"
    include = (
        Path(sys.base_prefix)
        / "include"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
    )
    if not (include / "Python.h").exists():
        import sysconfig

        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            return "Python's C headers are needed; install python3-dev (or python3-devel)"
    return None


if __name__ == "__main__":
    if found := problem():
        sys.exit(f"torch-dflash cannot be built here: {found}")
