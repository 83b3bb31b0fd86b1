"""Our target against llama.cpp: arg max where it is sure, and plain decoding speed.

llama-cpp-python is built once, in an environment of its own, and is no dependency of anything:

    python tools/compare_llama.py prepare FOLDER       # 640 held-out tokens, copies as F32 and Q8_0
    LLAMA_PYTHON tools/compare_llama.py llama FOLDER --threads 2
    BLAS_PYTHON tools/compare_llama.py blas FOLDER --threads 2      # if there is such a build
    python tools/compare_llama.py ours FOLDER --threads 2

BLAS_PYTHON has llama-cpp-python built with CMAKE_ARGS="-DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS".
It multiplies 32 and more rows in float32, by the dequantized weights of the quantized file itself.

llama.cpp rounds activations to 8 bits before it multiplies by quantized weights; on an F32 copy of
the same weights it does not. So both are run: the copy judges the model, the file itself shows what
the rounding does to llama.cpp. Our target reads the file with both kinds of activations. On a CPU
llama.cpp's scale is a half per 32 values for Q8_0 and Q4_0, as in our q8_1, but a float per 256 for
K-quants and IQ4_XS: so the copy as Q8_0 is compared too. The last part prints one JSON object, and
fails if an arg max with planes differs from llama.cpp's, on the F32 copy or on the file by BLAS,
where its margin between the two best tokens exceeds 0.05.
"""

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "torch_dflash/assets/tiny/target.gguf"
FILES, TOKENS, SURE = 4, 160, 0.05  # held-out prompts, tokens of each, margin
SPEED_TOKENS, RUNS, PROMPT = 200, 5, 64


def files(folder: Path) -> dict[str, Path]:
    """What is compared."""
    copies = {name: folder / f"{name}.gguf" for name in ("f32", "q8_0")}
    return {"quantized": MODEL, **copies}


def prepare(folder: Path) -> None:
    """Write the token ids of the first held-out prompts, and the weights as F32 and as Q8_0."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.held_out import embedded, prompts
    from torch_dflash.gguf import GGUFFile, QuantTensor
    from torch_dflash.gguf.writer import typed_metadata, write_gguf
    from torch_dflash.requantization import requantize

    _, tokenizer = embedded()
    ids = [tokenizer.encode(p, add_special=True)[:TOKENS] for p in prompts()[:FILES]]
    (folder / "tokens.json").write_text(json.dumps(ids))
    with GGUFFile.open(MODEL) as file:
        dense = {n: file.tensor(n).to_dense().float() for n in file.tensors}
        shaped = ((n, t.reshape(file.tensors[n].shape)) for n, t in dense.items())
        write_gguf(
            folder / "f32.gguf",
            file.architecture,
            typed_metadata(file),
            [(n, QuantTensor.from_tensor(t.contiguous())) for n, t in shaped],
        )
    requantize(folder / "f32.gguf", folder / "q8_0.gguf", "q8_0")


def options(threads: int) -> dict[str, Any]:
    """Of every llama.cpp context."""
    return {"n_ctx": 1024, "n_threads": threads, "n_threads_batch": threads, "verbose": False}


def teacher_forced(name: str, path: Path, ids: list[list[int]], threads: int) -> dict[str, Any]:
    """Logits of llama.cpp, each text as one batch."""
    from llama_cpp import Llama

    exact = {"type_k": 0, "type_v": 0, "flash_attn": False}
    model = Llama(str(path), logits_all=True, **exact, **options(threads))
    out = {}
    for n, text in enumerate(ids):
        model.reset()
        model.eval(text)
        out[f"{name}_{n}"] = np.array(model.scores[: len(text)], dtype=np.float32)
    return out


def blas(folder: Path, threads: int) -> None:
    """Teacher-forced logits on the quantized file, of a llama.cpp that multiplies in float32."""
    from llama_cpp import llama_cpp

    base = Path(llama_cpp._base_path)
    ggml = ctypes.CDLL(str(next(base.glob("libggml.so*"))))
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    if not ggml.ggml_backend_reg_by_name(b"BLAS"):
        raise SystemExit(f"{base}: llama.cpp must be built with -DGGML_BLAS=ON, got one without")
    default = llama_cpp.llama_model_default_params

    def readable() -> Any:
        parameters = default()
        parameters.use_extra_bufts = False  # weights repacked for the CPU are none BLAS can read
        return parameters

    llama_cpp.llama_model_default_params = readable
    ids = json.loads((folder / "tokens.json").read_text())
    np.savez_compressed(folder / "blas.npz", **teacher_forced("blas", MODEL, ids, threads))


def llama(folder: Path, threads: int) -> None:
    """Teacher-forced logits of llama.cpp on the files, and its speed on the quantized one."""
    from llama_cpp import Llama

    ids = json.loads((folder / "tokens.json").read_text())
    out = {}
    for name, path in files(folder).items():
        out |= teacher_forced(name, path, ids, threads)
    model = Llama(str(MODEL), **options(threads))
    best = 0.0
    for _ in range(RUNS):
        model.reset()
        model.eval(ids[0][:PROMPT])
        began = time.perf_counter()
        for token in (ids[1] * 4)[:SPEED_TOKENS]:
            model.eval([token])
        best = max(best, SPEED_TOKENS / (time.perf_counter() - began))
    np.savez_compressed(folder / "llama.npz", speed=np.array(best), **out)


def ours(folder: Path, threads: int) -> int:
    """Compare, and print the figures."""
    import torch

    from torch_dflash.load import load_target
    from torch_dflash.models import Decoder
    from torch_dflash.testing.compare import nmse

    torch.set_num_threads(threads)
    stored = np.load(folder / "llama.npz")
    ids = json.loads((folder / "tokens.json").read_text())
    facts: dict[str, object] = {"threads": threads, "tokens": sum(map(len, ids))}

    def logits(target: Decoder) -> torch.Tensor:
        rows = []
        for text in ids:
            target.reset()
            for chunk in torch.tensor(text).split(target.max_rows):
                rows.append(target.verify(chunk).logits)
                target.commit(chunk.shape[0])
        return torch.cat(rows)

    def compared(here: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
        best = theirs.topk(2).values
        sure = best[:, 0] - best[:, 1] > SURE
        same = here.argmax(-1) == theirs.argmax(-1)
        return {
            "sure": int(sure.sum()),
            "equal_where_sure": int((sure & same).sum()),
            "largest_logit_difference": round(float((here - theirs).abs().max()), 4),
            "nmse": float(f"{nmse(here, theirs):.2g}"),
        }

    with torch.inference_mode():
        llama = {
            name: torch.cat([torch.from_numpy(stored[f"{name}_{n}"]) for n in range(len(ids))])
            for name in files(folder)
        }
        target = load_target(MODEL)
        planes = logits(target)
        on_f32 = compared(planes, llama["f32"])
        facts |= {"planes, f32": on_f32, "planes, quantized": compared(planes, llama["quantized"])}
        wrong = on_f32["sure"] - on_f32["equal_where_sure"]
        if (folder / "blas.npz").exists():
            floats = np.load(folder / "blas.npz")
            theirs = [torch.from_numpy(floats[f"blas_{n}"]) for n in range(len(ids))]
            by_blas = facts["planes, quantized by BLAS"] = compared(planes, torch.cat(theirs))
            wrong += by_blas["sure"] - by_blas["equal_where_sure"]
        q8 = logits(load_target(MODEL, activations="q8_1"))
        facts["q8_1, quantized"] = compared(q8, llama["quantized"])
        facts["q8_1, f32"] = compared(q8, llama["f32"])
        facts["llama.cpp quantized, f32"] = compared(llama["quantized"], llama["f32"])
        for kind in ("planes", "q8_1"):
            copy = load_target(folder / "q8_0.gguf", activations=kind)
            facts[f"{kind}, q8_0"] = compared(logits(copy), llama["q8_0"])
        speed = 0.0
        for _ in range(RUNS):  # the same loop as llama.cpp's: one row a step, no sampling
            target.reset()
            target.prefill(torch.tensor(ids[0][:PROMPT]))
            began = time.perf_counter()
            for token in torch.tensor((ids[1] * 4)[:SPEED_TOKENS]).split(1):
                target.verify(token)
                target.commit(1)
            speed = max(speed, SPEED_TOKENS / (time.perf_counter() - began))
    llama_speed = float(stored["speed"])
    facts |= {
        "ours_tok_s": round(speed, 1),
        "llama_cpp_tok_s": round(llama_speed, 1),
        "ratio": round(speed / llama_speed, 3),
    }
    print(json.dumps(facts))
    return 1 if wrong else 0


def main() -> int:
    """Run one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("prepare", "llama", "blas", "ours"))
    parser.add_argument("folder", type=Path, help="for the files between the parts")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.part == "prepare":
        prepare(args.folder)
        return 0
    if args.part in ("llama", "blas"):
        (llama if args.part == "llama" else blas)(args.folder, args.threads)
        return 0
    return ours(args.folder, args.threads)


if __name__ == "__main__":
    sys.exit(main())
