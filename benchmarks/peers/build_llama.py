"""Compiles llama.cpp's kernels into one small library, from a llama.cpp source tree.

    python -m benchmarks.peers.build_llama LLAMA_CPP OUT [--arch sm_90]

Needs nvcc, no GPU. Only kernels and their launches are compiled, against the sources as they are;
`ggml/src/ggml-cuda` must be in the tree.
"""

import argparse
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent / "llama_cpp"
LIBRARY = "libllama_peer.so"
TYPES = {
    "Q4_0": 2, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ3_S": 21, "IQ4_XS": 23,
}  # fmt: skip
# Each file up to the line that begins so: what follows works on llama.cpp's graphs.
_CUTS = {
    "mmvq": "static void mul_mat_vec_q_switch_type(",
    "gated_delta_net": "static void ggml_cuda_op_gated_delta_net_impl(",
    "ssm-conv": "void ggml_cuda_op_ssm_conv(",
}
_CUBLAS = """#pragma once
#include <cuda_runtime.h>
typedef void* cublasHandle_t;
typedef int cublasStatus_t;
enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_TF32_TENSOR_OP_MATH = 3 };
inline const char* cublasGetStatusString(cublasStatus_t) { return "built without cuBLAS"; }
inline int cublasCreate(void**) { return 1; }
inline int cublasSetMathMode(void*, int) { return 1; }
inline int cublasSetStream(void*, cudaStream_t) { return 1; }
inline int cublasSetWorkspace(void*, void*, size_t) { return 1; }
"""  # its headers are included everywhere, its functions are called by no kernel


def cut(source: str, marker: str, name: str) -> str:
    """The part of a file before the line that begins with ``marker``.

    Raises:
        SystemExit: no line does: another version of llama.cpp.
    """
    found = re.search("^" + re.escape(marker), source, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{name}: a line must begin with {marker!r}, got none; another llama.cpp?")
    return source[: found.start()]


def build(tree: Path, out: Path, arch: str = "sm_90", jobs: int = 1) -> Path:
    """Compile and link.

    Args:
        tree: of llama.cpp.
        out: folder for the library.
        arch: of the GPU.
        jobs: compilers at a time.

    Returns:
        the library.
    """
    ggml = tree / "ggml"
    kernels = ggml / "src/ggml-cuda"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "cublas_v2.h").write_text(_CUBLAS)
        for name, marker in _CUTS.items():
            text = cut((kernels / f"{name}.cu").read_text(), marker, f"{name}.cu")
            (work / f"{name}_kernels.cu").write_text(text)
        include = [work, HERE, ggml / "include", ggml / "src", kernels]
        flags = ["-std=c++17", "-O3", "--use_fast_math", "-extended-lambda", f"-arch={arch}", "-w",
                 "-Xcompiler=-fPIC", *(f"-I{i}" for i in include)]  # fmt: skip
        jobs_: list[list[str]] = [[str(HERE / "shared.cu"), "-o", str(work / "shared.o")]]
        for name, value in TYPES.items():
            define = [f"-DTYPE=GGML_TYPE_{name}", f"-DENTRY=llama_matmul_{value}"]
            jobs_.append([*define, str(HERE / "matmul.cu"), "-o", str(work / f"{value}.o")])
        with ThreadPoolExecutor(jobs) as pool:
            compile_ = ["nvcc", *flags, "-c"]
            list(pool.map(lambda job: subprocess.run([*compile_, *job], check=True), jobs_))
        (work / "exports").write_text("{ global: llama_*; local: *; };\n")
        out.mkdir(parents=True, exist_ok=True)
        library = out / LIBRARY
        # every type's file brings the same two helper functions of mmvq.cu
        link = ["nvcc", "-shared", f"-arch={arch}", *map(str, sorted(work.glob("*.o"))),
                "-Xlinker", "--allow-multiple-definition",
                "-Xlinker", f"--version-script={work / 'exports'}", "-Xlinker", "-z,defs",
                "-Xlinker", "--strip-all", "-o", str(library)]  # fmt: skip
        subprocess.run(link, check=True)
    return library


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tree", type=Path, help="llama.cpp source folder")
    parser.add_argument("out", type=Path, help="folder for the library")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    args = parser.parse_args()
    print(build(args.tree, args.out, args.arch, args.jobs))
