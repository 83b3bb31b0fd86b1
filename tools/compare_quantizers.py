"""Squared errors of our quantizer beside llama.cpp's, without an importance matrix.

    python tools/compare_quantizers.py LIBGGML_BASE.so [--file F32.gguf ...] [--model F32.gguf]
        [-o RESULT.json]

The library is llama.cpp's libggml-base.so, as llama-cpp-python builds it. Beside the values of
torch_dflash/testing/weights.py, the matrices of any files are measured. --model takes the embedded
target as F32 and runs it on held-out text: how far its distributions move (Kullback-Leibler, from
the F32 model's) with the same tensors in the same types by either quantizer. The result in
benchmarks/results is what the tests compare with: they do not need the library.
"""

import argparse
import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.held_out import embedded, prompts  # noqa: E402
from torch_dflash import load_target, ops, requantize  # noqa: E402
from torch_dflash.gguf import (  # noqa: E402
    TYPES,
    GGUFFile,
    QuantTensor,
    typed_metadata,
    write_gguf,
)
from torch_dflash.testing.compare import nmse  # noqa: E402
from torch_dflash.testing.weights import WEIGHTS, weights  # noqa: E402

QUANTIZED = (2, 8, 12, 13, 14, 23)
BLOCK = 8  # rows of a pass over the text


def llama_quantize(library: ctypes.CDLL, x: Tensor, ggml_type: int) -> Tensor:
    """The packed rows that llama.cpp makes of ``x`` float32 [rows, columns]."""
    rows = np.ascontiguousarray(x.numpy())
    out = np.empty((len(rows), TYPES[ggml_type].row_bytes(rows.shape[1])), np.uint8)
    pointer = ctypes.c_void_p
    written = library.ggml_quantize_chunk(
        ctypes.c_int(ggml_type), pointer(rows.ctypes.data), pointer(out.ctypes.data),
        ctypes.c_int64(0), ctypes.c_int64(len(rows)), ctypes.c_int64(rows.shape[1]), None,
    )  # fmt: skip
    assert written == out.size
    return torch.from_numpy(out)


def matrices(path: Path) -> Tensor:
    """Every matrix of a file whose rows are whole superblocks, as rows of 256."""
    with GGUFFile.open(path) as file:
        found = [file.tensor(n).to_dense().float() for n, t in file.tensors.items()
                 if len(t.shape) == 2 and t.shape[1] % 256 == 0]  # fmt: skip
    return torch.cat([t.reshape(-1, 256) for t in found])


def log_probs(path: Path, texts: list[list[int]]) -> Tensor:
    """Of every token's successor, float64 [tokens, vocabulary]."""
    target, rows = load_target(path), []
    for ids in texts:
        target.reset()
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            rows.append(target.verify(torch.tensor(ids[at : at + BLOCK])).logits.clone())
            target.commit(BLOCK)
    return torch.cat(rows).double().log_softmax(-1)


def divergence(library: ctypes.CDLL, model: Path) -> dict[str, dict[str, float]]:
    """Kullback-Leibler divergences from an F32 model, all its matrices in one type."""
    _, tokenizer = embedded()
    texts = [tokenizer.encode(p, add_special=True)[:96] for p in prompts()[:8]]
    exact = log_probs(model, texts)
    found = {}
    with tempfile.TemporaryDirectory() as folder, GGUFFile.open(model) as source:
        ours, theirs = Path(folder, "ours.gguf"), Path(folder, "theirs.gguf")
        for kind in ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"):
            requantize(model, ours, kind, tensor_types=[(r"token_embd|attn_[kv]\.", kind)])
            with GGUFFile.open(ours) as file:
                tensors = {n: file.tensor(n) for n in file.tensors}
                for name, t in tensors.items():
                    if t.type.elems > 1:
                        dense = source.tensor(name).to_dense().float().reshape(t.rows, t.columns)
                        packed = llama_quantize(library, dense, t.ggml_type)
                        tensors[name] = QuantTensor(packed, t.ggml_type, t.shape)
                write_gguf(theirs, file.architecture, typed_metadata(file), tensors.items())
            found[kind] = {}
            for name, path in (("llama.cpp", theirs), ("torch-dflash", ours)):
                moved = exact.exp() * (exact - log_probs(path, texts))
                found[kind][name] = moved.sum(-1).mean().item()
            print("divergence", kind, found[kind])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--file", type=Path, action="append", default=[])
    parser.add_argument("--model", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    library = ctypes.CDLL(str(args.library))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    data = {kind: weights(kind) for kind in WEIGHTS}
    data |= {path.name: matrices(path) for path in args.file}
    figures = {}
    for kind, x in data.items():
        figures[kind] = {}
        for ggml_type in QUANTIZED:
            theirs = ops.dequantize(llama_quantize(library, x, ggml_type), ggml_type)
            mine = ops.dequantize(ops.quantize(x, ggml_type), ggml_type)
            pair = {"llama.cpp": nmse(theirs, x), "torch-dflash": nmse(mine, x)}
            figures[kind][TYPES[ggml_type].name] = pair
            print(kind, TYPES[ggml_type].name, *(f"{name} {v:.4e}" for name, v in pair.items()))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout.strip()  # fmt: skip
    result = {
        "command": "python tools/compare_quantizers.py libggml-base.so "
        + " ".join(f"--file {p.name}" for p in args.file)
        + (f" --model {args.model.name}" if args.model else ""),
        "commit": commit,
        "library": args.library.resolve().name,
        "library_sha256": hashlib.sha256(args.library.read_bytes()).hexdigest(),
        "values": {kind: x.numel() for kind, x in data.items()},
        "nmse": figures,
        "divergence": divergence(library, args.model) if args.model else {},
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
