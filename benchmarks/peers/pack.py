"""Puts peers into a folder that `benchmarks.run --peers` reads.

    python -m benchmarks.peers.pack OUT [--vllm WHEEL] [--fla WHEEL] [--llama LLAMA_CPP]

vLLM's library shrinks from 93 to 3 MB: of its device code only what is measured stays, for one
architecture (needs the package zstandard). What is packed belongs to its authors: never commit it.
"""

import argparse
import importlib
import lzma
import re
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .build_llama import build

VLLM_LIBRARY = "vllm/_C_stable_libtorch.abi3.so"
VLLM_CONV = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
# Marlin for bfloat16 rows and 4-bit codes: vLLM's ids of the two types are in the name.
_MARLIN = rb"MarlinILl1125899906909960ELl1125899907892224E"
_KERNELS = _MARLIN + rb"|gdn_decode_post_conv|fused_add_rms_norm"
_FLA = ("fla/utils/*.py", "fla/ops/gated_delta_rule/fused_recurrent.py", "fla/ops/utils/op.py",
        "fla/ops/utils/softplus.py")  # fmt: skip
_CONV_IMPORTS = {
    "from vllm.triton_utils": "import triton\nfrom triton import language as tl",
    "from vllm.platforms": (
        "from types import SimpleNamespace\n"
        "current_platform = SimpleNamespace("
        "is_arch_support_pdl=lambda: True, is_cpu=lambda: False)"
    ),
    "from vllm.v1": "NULL_BLOCK_ID, PAD_SLOT_ID = 0, -1",
}
_FATBIN = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes that follow
_MAGIC = _FATBIN.pack(0xBA55ED50, 1, 16, 0)[:8]
_ENTRY = struct.Struct("<HHIQI")  # kind, version, header bytes, payload bytes, compressed bytes
_CUBIN, _ARCH_AT = 2, 28  # kind of machine code; where an entry says for which architecture


def entries(library: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Device programs of a library.

    Returns:
        ``(kind, arch, payload offset, payload bytes, compressed bytes)`` of each; kind 2 is machine
        code.
    """
    at = library.find(_MAGIC)
    while at >= 0:
        end = at + _FATBIN.size + _FATBIN.unpack_from(library, at)[3]
        at += _FATBIN.size
        while at < end:
            kind, _, header, size, compressed = _ENTRY.unpack_from(library, at)
            arch = struct.unpack_from("<I", library, at + _ARCH_AT)[0]
            yield kind, arch, at + header, size, compressed
            at += header + size
        at = library.find(_MAGIC, end)


def only(library: bytes, arch: int, kernels: bytes) -> bytes:
    """The library with all device code zeroed but that of ``arch`` which names one of ``kernels``.

    Args:
        library: a shared object with compressed device code.
        arch: such as 90.
        kernels: pattern of their names.
    """
    zstd = importlib.import_module("zstandard").ZstdDecompressor()
    out = bytearray(library)
    for kind, of, at, size, compressed in entries(library):
        wanted = kind == _CUBIN and of == arch
        if wanted and compressed:
            code = zstd.decompressobj().decompress(library[at : at + compressed])
            wanted = re.search(kernels, code) is not None
        if not wanted:
            out[at : at + size] = bytes(size)
    return bytes(out)


def pack_vllm(wheel: Path, out: Path, arch: int) -> None:
    """vLLM's compiled kernels, and its Triton convolution without the rest of vLLM."""
    with zipfile.ZipFile(wheel) as file:
        library, conv = file.read(VLLM_LIBRARY), file.read(VLLM_CONV).decode()
    with tempfile.NamedTemporaryFile(suffix=".so") as small:
        Path(small.name).write_bytes(only(library, arch, _KERNELS))
        subprocess.run(["strip", "--strip-unneeded", small.name], check=True)
        (out / "vllm_kernels.so.xz").write_bytes(lzma.compress(Path(small.name).read_bytes()))
    for line, instead in _CONV_IMPORTS.items():
        conv = re.sub(f"^{re.escape(line)}.*$", instead, conv, flags=re.MULTILINE)
    (out / "vllm_causal_conv1d.py").write_text(conv)


def pack_fla(wheel: Path, out: Path) -> None:
    """fla-core's recurrent kernel, in packages that import nothing else."""
    with zipfile.ZipFile(wheel) as file:
        version = re.search(r"fla_core-([^-]+)-", wheel.name)
        for name in file.namelist():
            if any(Path(name).match(pattern) for pattern in _FLA):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes(file.read(name))
    for package in ("fla/ops", "fla/ops/gated_delta_rule", "fla/ops/utils"):
        (out / package / "__init__.py").write_text("")
    number = version[1] if version else "unknown"
    (out / "fla/__init__.py").write_text(f'__version__ = "{number}"\n')


def main() -> None:
    """Pack what was given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--vllm", type=Path, help="vLLM wheel for CUDA")
    parser.add_argument("--fla", type=Path, help="fla-core wheel")
    parser.add_argument("--llama", type=Path, help="llama.cpp source folder; needs nvcc")
    parser.add_argument("--arch", type=int, default=90)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.vllm is not None:
        pack_vllm(args.vllm, args.out, args.arch)
    if args.fla is not None:
        pack_fla(args.fla, args.out)
    if args.llama is not None:
        build(args.llama, args.out, f"sm_{args.arch}")
    for path in sorted(args.out.iterdir()):
        print(f"{path.stat().st_size:>10} {path.name}")


if __name__ == "__main__":
    main()
