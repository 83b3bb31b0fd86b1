"""A target and a drafter of given shapes with random weights, made where they run; their bytes."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_dflash.drafters.config import DrafterConfig
from torch_dflash.drafters.dflash2 import DFlash2
from torch_dflash.drafters.tensors import tensor_table
from torch_dflash.gguf import QuantTensor
from torch_dflash.gguf.types import TYPES
from torch_dflash.models.build import build_target
from torch_dflash.models.config import Qwen35Config
from torch_dflash.models.decoder import Decoder
from torch_dflash.models.tensors import target_table
from torch_dflash.nn import QuantGLU, QuantLinear
from torch_dflash.testing.tiny import random_quant

__all__ = [
    "DFlash2",
    "Decoder",
    "Floor",
    "append_floor",
    "drafter",
    "drafter_floor",
    "q4_k_m",
    "target",
    "target_floor",
    "weight_bytes",
]

F32, Q8_0, Q4_K, Q5_K, Q6_K = 0, 8, 12, 13, 14
KV_DTYPE = torch.float16


def _more_bits(index: int, count: int) -> bool:
    """Layers to which llama-quantize gives more bits: the first and last eighth, every third."""
    eighth = count // 8
    return index < eighth or index >= 7 * eighth or (index - eighth) % 3 == 2


def q4_k_m(config: Qwen35Config, name: str) -> int:
    """Type of a matrix in a file that llama-quantize makes as Q4_K_M."""
    found = re.match(r"blk\.(\d+)\.(\w+)", name)
    if found is None:
        return Q6_K if name == "output.weight" else Q4_K
    index, part = int(found[1]), found[2]
    if part in ("ssm_alpha", "ssm_beta"):
        return Q8_0
    if part == "attn_qkv":
        return Q5_K
    if part == "ffn_down":
        return Q6_K if _more_bits(index, config.num_layers) else Q4_K
    if part == "attn_v":
        full = [i for i, kind in enumerate(config.layer_kinds) if kind == "full"]
        return Q6_K if _more_bits(full.index(index), len(full)) else Q4_K
    return Q4_K


class _Random:
    """Tensors of a target, each made when it is asked for: the largest is in memory twice."""

    def __init__(self, config: Qwen35Config, generator: torch.Generator) -> None:
        self.config, self.generator = config, generator
        self.tensors = dict(target_table(config).items())

    def tensor(self, name: str) -> QuantTensor:
        shape, g = self.tensors[name], self.generator
        if len(shape) == 2 and not name.endswith("ssm_conv1d.weight"):
            rows, columns = shape
            kind = q4_k_m(self.config, name)
            return random_quant(rows, columns, kind, g, columns**-0.5)
        if name.endswith("norm.weight"):
            values = torch.rand(shape, generator=g, device=g.device) + 0.5
        else:
            values = torch.randn(shape, generator=g, device=g.device) * 0.5
        if name.endswith("ssm_a"):  # -exp(A_log)
            values = -values.abs() - 0.05
        return QuantTensor.from_tensor(values)


def target(config: Qwen35Config, context: int, device: torch.device) -> Decoder:
    """A target with random weights of a Q4_K_M file's types that has seen ``context`` tokens.

    What a prompt would have left is random as well: K and V, convolution windows, states.
    """
    g = torch.Generator(device).manual_seed(0)
    model = build_target(config, _Random(config, g), kv_dtype=KV_DTYPE).to(device)
    model.graphs.enabled = False  # a clock of ours records the passes
    state = model.state
    state.kv.reserve(context + 2 * model.max_rows)
    assert state.recurrent is not None
    for tensor in (*state.kv.k, *state.kv.v, *state.recurrent.conv):
        tensor.normal_(generator=g)
    for tensor in state.recurrent.state:
        tensor.normal_(0, 0.1, generator=g)
    state.length = context
    return model


def drafter(config: DrafterConfig, of: Decoder, device: torch.device) -> DFlash2:
    """A drafter with random Q8_0 weights and as much context as its target."""
    g = torch.Generator(device).manual_seed(1)
    tensors = {}
    for name, shape in tensor_table(config).required.items():
        if len(shape) == 2 and "codebook" not in name:
            tensors[name] = random_quant(*shape, Q8_0, g, shape[1] ** -0.5)
            continue
        values = torch.rand(shape, generator=g, device=device) + 0.5
        if len(shape) > 1:
            values = torch.randn(shape, generator=g, device=device) * 0.2
        tensors[name] = QuantTensor.from_tensor(values.to(torch.bfloat16))
    model = DFlash2(config, tensors, of.vocabulary, KV_DTYPE).to(device)
    model.graphs.enabled = False  # a clock of ours records the passes
    rows = torch.randn(of.length, config.target_hidden_columns, generator=g, device=device)
    for chunk in rows.split(config.block_size):
        model.commit(chunk)
    return model


@dataclass(frozen=True)
class Floor:
    """Bytes that a step must read, by what they are."""

    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def _matrices(modules: Iterable[nn.Module]) -> Iterator[QuantLinear | QuantGLU]:
    for module in modules:
        yield from (m for m in module.modules() if isinstance(m, (QuantLinear, QuantGLU)))


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all matrices as a GGUF file holds them, however they are repacked."""
    return sum(
        rows * TYPES[t].row_bytes(m.columns)
        for m in _matrices(modules)
        for t, rows in zip(m.types, m.rows, strict=True)
    )


def _bytes(tensors: Iterable[Tensor], rows: int | None = None) -> int:
    """Bytes of the tensors, or of ``rows`` entries of their second dimension."""
    total = 0
    for t in tensors:
        share = 1.0 if rows is None else rows / t.shape[1]
        total += int(t.numel() * t.element_size() * share)
    return total


def target_floor(model: Decoder, rows: int) -> Floor:
    """Of one verification with everything of the last one accepted."""
    kv, recurrent = model.state.kv, model.state.recurrent
    assert recurrent is not None
    journals = (*recurrent.journal_k, *recurrent.journal_u, *recurrent.journal_decay)
    per_row = sum(math.prod(j.shape[3:]) * j.element_size() for j in journals)
    return Floor(
        {
            "weights": weight_bytes([*model.layers, model.vocabulary.head]),
            "states": _bytes(s[:1] for s in recurrent.state),
            "journals": rows * per_row,
            "keys and values": _bytes((*kv.k, *kv.v), model.length + rows),
        }
    )


def append_floor(model: DFlash2) -> Floor:
    """Of committing rows: the fusion of the captured layers, K and V of every layer."""
    total = weight_bytes([model.fc] if model.fc is not None else [])
    for layer in model.layers:
        qkv = layer.attention.qkv
        total += sum(
            rows * TYPES[t].row_bytes(qkv.columns)
            for t, rows in zip(qkv.types[1:], qkv.rows[1:], strict=True)
        )
    return Floor({"weights": total})


def drafter_floor(model: DFlash2, of: Decoder, rows: int) -> Floor:
    """Of one block: the drafter's layers and the target's head; rows of codebooks are nothing."""
    cache = model.cache
    window = min(layer.window or model.length for layer in model.config.layers)
    keys = min(model.length, window) + rows
    parts = [*model.layers, model.hidden_projection, of.vocabulary.head]
    return Floor(
        {"weights": weight_bytes(parts), "keys and values": _bytes((*cache.k, *cache.v), keys)}
    )
