"""Random dense models as GGUF files: Qwen3 and Llama types, every layer of several GGML types."""

from collections.abc import Mapping
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Q
from torch import Tensor

from ..gguf import QuantTensor, Typed, write_gguf
from .tiny import random_quant, tokenizer_metadata

__all__ = ["tiny_dense"]

TYPES = {
    "attn_q": Q.Q4_K,
    "attn_k": Q.Q6_K,
    "attn_v": Q.Q5_K,
    "attn_output": Q.Q8_0,
    "ffn_gate": Q.IQ4_XS,
    "ffn_up": Q.Q4_0,
    "ffn_down": Q.Q6_K,
    "token_embd": Q.Q6_K,
    "output": Q.Q8_0,
}


def tiny_dense(
    path: Path,
    arch: str,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 256,
    ffn: int = 512,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 500,
    tied: bool = False,
    bias: bool = False,
    fused: bool = False,
    rope_factors: bool = False,
    types: Mapping[str, Q] | None = None,
    metadata: Mapping[str, Typed] | None = None,
) -> Path:
    """Write a random ``qwen3`` or ``llama`` target.

    Args:
        path: to write.
        arch: which.
        seed: of the weights.
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: sizes; 500 is filled up to 512.
        tied: the head is the embedding.
        bias: q, k and v have biases, Llama's output projection too.
        fused: q, k and v (and their biases) are one tensor, all of q's type.
        rope_factors: with one divisor per frequency.
        types: short tensor name -> type, over :data:`TYPES`.
        metadata: further or other keys.
    """
    g = torch.Generator().manual_seed(seed)
    kinds = {**TYPES, **(types or {})}
    if fused:
        kinds |= dict.fromkeys(("attn_k", "attn_v"), kinds["attn_q"])
    tensors: dict[str, QuantTensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        kind = kinds[name.split(".")[-1]]
        tensors[f"{name}.weight"] = random_quant(rows, columns, kind, g, gain * columns**-0.5)

    def vector(name: str, values: Tensor) -> None:
        tensors[name] = QuantTensor.from_tensor(values.float().contiguous())

    def norm(name: str, size: int) -> None:
        vector(f"{name}.weight", torch.rand(size, generator=g).add(0.5))

    q, kv = heads * head_dim, kv_heads * head_dim
    matrix("token_embd", vocab, hidden, 0.1 * hidden**0.5)
    for i in range(layers):
        b = f"blk.{i}."
        for name, rows, columns, gain in (
            ("attn_q", q, hidden, 2.0),
            ("attn_k", kv, hidden, 1.0),
            ("attn_v", kv, hidden, 1.0),
            ("attn_output", hidden, q, 8.0),
            ("ffn_gate", ffn, hidden, 1.0),
            ("ffn_up", ffn, hidden, 1.0),
            ("ffn_down", hidden, ffn, 8.0),
        ):
            matrix(b + name, rows, columns, gain)
        norm(b + "attn_norm", hidden)
        norm(b + "ffn_norm", hidden)
        if arch == "qwen3":
            norm(b + "attn_q_norm", head_dim)
            norm(b + "attn_k_norm", head_dim)
        if bias:
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                vector(f"{b}attn_{name}.bias", torch.randn(rows, generator=g).mul(0.3))
            if arch == "llama":
                vector(f"{b}attn_output.bias", torch.randn(hidden, generator=g).mul(0.3))
        if fused:
            for suffix in ("weight", "bias") if bias else ("weight",):
                parts = [tensors.pop(f"{b}attn_{n}.{suffix}") for n in "qkv"]
                tensors[f"{b}attn_qkv.{suffix}"] = QuantTensor.cat(parts)
    norm("output_norm", hidden)
    if rope_factors:
        vector("rope_freqs.weight", torch.rand(head_dim // 2, generator=g).mul(4).add(1))
    if not tied:
        matrix("output", vocab, hidden, 4.0)
    keys = {
        "block_count": Typed("uint32", layers),
        "context_length": Typed("uint32", 2048),
        "embedding_length": Typed("uint32", hidden),
        "feed_forward_length": Typed("uint32", ffn),
        "attention.head_count": Typed("uint32", heads),
        "attention.head_count_kv": Typed("uint32", kv_heads),
        "attention.key_length": Typed("uint32", head_dim),
        "attention.value_length": Typed("uint32", head_dim),
        "attention.layer_norm_rms_epsilon": Typed("float32", 1e-6),
        "rope.freq_base": Typed("float32", 1e5),
    }
    named = {f"{arch}.{k}": v for k, v in keys.items()}
    write_gguf(
        path,
        arch,
        {**named, **tokenizer_metadata(vocab), **(metadata or {})},
        tensors.items(),
    )
    return path
