"""HF folders -> quantized GGUF, through llama.cpp's converter and quantizer.

    python tools/train/export.py --llama LLAMA_CPP_TREE --lib libllama.so --trained TRAIN_OUT \
        --out ASSETS [--only target]

The tokenizer is ours, so the converter cannot recognise it by its hash: it is told `qwen35`, whose
pre-tokenizer regex it uses. The quantizer has no importance matrix; every tensor's type is given
by name below.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import runpy
import subprocess
import sys
from pathlib import Path

TYPES = {"F32": 0, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_XS": 23}

# First match wins; names as llama.cpp writes them.
TARGET = (
    (r"^token_embd\.weight$", "Q6_K"),
    (r"attn_qkv\.weight$", "Q5_K"),
    (r"attn_gate\.weight$", "Q4_K"),
    (r"ssm_out\.weight$", "Q8_0"),
    (r"attn_q\.weight$", "Q5_K"),
    (r"attn_k\.weight$", "Q8_0"),
    (r"attn_v\.weight$", "Q6_K"),
    (r"attn_output\.weight$", "Q6_K"),
    (r"ssm_(alpha|beta)\.weight$", "F32"),
    (r"blk\.[024]\.ffn_gate\.weight$", "IQ4_XS"),
    (r"blk\.[135]\.ffn_gate\.weight$", "Q4_K"),
    (r"ffn_up\.weight$", "Q4_K"),
    (r"blk\.[03]\.ffn_down\.weight$", "Q6_K"),
    (r"ffn_down\.weight$", "Q4_K"),
)
DRAFTER = (
    (r"attn_[kv]\.weight$", "Q8_0"),
    (r"^selector_(predecessor|successor)\.weight$", "Q8_0"),
    (r"^markov_w[12]\.weight$", "Q8_0"),
    (r"^conf_proj\.weight$", "F32"),
    (r"^fc\.weight$", "Q5_K"),  # 24 MB for all four files leave no room for Q6_K here
    (
        r"^selector_hidden\.weight$|(attn_q|attn_output|ffn_(gate|up|down)|(attn|ffn)_conv_proj)\.weight$",
        "Q6_K",
    ),
)


class Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("type", ctypes.c_int)]


class Params(ctypes.Structure):
    """llama_model_quantize_params of llama.cpp 0c1e57098."""

    _fields_ = [
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("imatrix", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("tt_overrides", ctypes.POINTER(Override)),
        ("prune_layers", ctypes.c_void_p),
        ("max_buf_size", ctypes.c_size_t),
    ]


def convert(llama: Path, model: Path, out: Path, target: Path | None) -> None:
    """Runs the converter in this interpreter, with the pre-tokenizer named; F32 output."""
    sys.path[:0] = [str(llama), str(llama / "gguf-py")]
    from conversion import base  # type: ignore[import-not-found]

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
    argv = [
        "convert_hf_to_gguf.py",
        str(model),
        "--outfile",
        str(out),
        "--outtype",
        "f32",
        "--model-name",
        f"torch-dflash tiny {model.name}",
    ]
    argv += ["--target-model-dir", str(target)] if target is not None else ["--no-mtp"]
    sys.argv = argv
    runpy.run_path(str(llama / "convert_hf_to_gguf.py"), run_name="__main__")


def quantize(lib_path: Path, source: Path, out: Path, rules: tuple[tuple[str, str], ...]) -> None:
    from gguf import GGUFReader

    names = [t.name for t in GGUFReader(source).tensors if len([s for s in t.shape if s > 1]) >= 2]
    chosen: list[Override] = []
    for name in names:
        kind = next((k for pattern, k in rules if re.search(pattern, name)), None)
        if kind is not None:
            chosen.append(Override(("^" + re.escape(name) + "$").encode(), TYPES[kind]))
    table = (Override * (len(chosen) + 1))(*chosen, Override(None, 0))
    lib = ctypes.CDLL(str(lib_path))
    lib.llama_backend_init()
    lib.llama_model_quantize_default_params.restype = Params
    p = lib.llama_model_quantize_default_params()
    p.nthread, p.ftype, p.pure = 2, 18, True  # 18: mostly Q6_K; the table decides
    p.token_embedding_type = TYPES["Q6_K"]
    p.tt_overrides = ctypes.cast(table, ctypes.POINTER(Override))
    lib.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Params)]
    if lib.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(p)):
        raise RuntimeError(f"{source}: llama_model_quantize failed; its message stands above")
    got = {t.name: t.tensor_type.name for t in GGUFReader(out).tensors}
    for name in names:
        kind = next((k for pattern, k in rules if re.search(pattern, name)), None)
        if kind is not None and got[name] != kind:
            print(f"{out.name}: {name} must be {kind}, got {got[name]}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--llama", type=Path, required=True)
    p.add_argument("--lib", type=Path, required=True)
    p.add_argument("--trained", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", nargs="+", default=["target", "dflash", "dflash2", "dspark"])
    p.add_argument("--convert", help=argparse.SUPPRESS)
    a = p.parse_args()
    f32 = a.trained / "f32"
    f32.mkdir(exist_ok=True)
    a.out.mkdir(parents=True, exist_ok=True)
    if a.convert:
        convert(
            a.llama,
            a.trained / a.convert,
            f32 / f"{a.convert}.gguf",
            None if a.convert == "target" else a.trained / "target",
        )
        return
    for name in a.only:  # the converter runs once per interpreter
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--convert", name], check=True)
        quantize(
            a.lib,
            f32 / f"{name}.gguf",
            a.out / f"{name}.gguf",
            TARGET if name == "target" else DRAFTER,
        )
        print(f"{name}.gguf: {(a.out / f'{name}.gguf').stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
