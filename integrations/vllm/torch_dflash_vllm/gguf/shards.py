"""Which part of a GGUF tensor a tensor-parallel rank holds: whole rows, or whole quants of columns.

Nothing is cut inside a quant. Where a rank's columns do not begin and end with quants, the file
cannot be split that way; :func:`check_parallel` says so before anything is loaded.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import GGUFFile, QuantTensor
from torch_dflash.models import DenseConfig, Qwen35Config
from torch_dflash.models.rows import grouped_v_heads

__all__ = ["GDNShard", "check_parallel", "rows", "take_columns"]

_log = logging.getLogger("vllm.torch_dflash")

Range = tuple[int, int]  # first column, one past the last
_VOCABULARY_PADDING = 64  # rows to which vLLM fills up embedding and head
_MOST_RANKS = 64
MISALIGNED = "TORCH_DFLASH_GGUF_MISALIGNED"


def rows(tensor: QuantTensor, start: int, count: int) -> QuantTensor:
    """Rows ``start .. start + count`` along the first dimension, as a view."""
    sizes = [start, count, tensor.shape[0] - start - count]
    return tensor.split([s for s in sizes if s])[1 if start else 0]


def _aligned(ranges: Iterable[Range], elems: int) -> bool:
    return all(not start % elems and not end % elems for start, end in ranges)


def take_columns(
    tensor: QuantTensor, ranges: Sequence[Range], name: str, dtype: torch.dtype
) -> QuantTensor:
    """Columns of a matrix, side by side.

    Args:
        tensor: ``[rows, columns]``.
        ranges: which columns, in order.
        name: of the tensor, for messages.
        dtype: that the values get where quants would have to be cut and
            ``TORCH_DFLASH_GGUF_MISALIGNED=dequantize`` allows it.

    Raises:
        CheckpointError: a range cuts a quant.
    """
    if list(ranges) == [(0, tensor.columns)]:
        return tensor
    elems, size = tensor.type.elems, tensor.type.bytes
    width = sum(end - start for start, end in ranges)
    if _aligned(ranges, elems):
        quants = tensor.packed.view(tensor.rows, -1, size)
        parts = [quants[:, start // elems : end // elems] for start, end in ranges]
        packed = torch.cat(parts, 1).reshape(tensor.rows, -1)
        return QuantTensor(packed, tensor.ggml_type, (tensor.rows, width))
    if not _may_dequantize():
        raise CheckpointError(
            f"tensor {name!r} must be cut between quants of {elems} columns, got the ranges "
            f"{list(ranges)}"
        )
    _log.warning(
        "torch-dflash: %s (%s): columns %s cut quants of %d: this rank holds them as %s",
        name, tensor.type_name, list(ranges), elems, dtype,
    )  # fmt: skip
    dense = tensor.to_dense()
    return QuantTensor.from_tensor(torch.cat([dense[:, a:b] for a, b in ranges], 1).to(dtype))


def _may_dequantize() -> bool:
    value = os.environ.get(MISALIGNED, "refuse")
    if value not in ("refuse", "dequantize"):
        raise ValueError(f"{MISALIGNED} must be refuse or dequantize, got {value!r}")
    return value == "dequantize"


@dataclass(frozen=True)
class GDNShard:
    """A rank's heads of a Gated DeltaNet layer.

    Files hold V heads in tiled order; vLLM's layer runs them grouped by K head. Rows are whole, so
    they are put in grouped order. Columns of the output projection may share quants between heads:
    they stay tiled, and the layer's output is put in tiled order before them.

    Attributes:
        config: of the target.
        rank, size: of the tensor-parallel group; both head counts are multiples of ``size``.
    """

    config: Qwen35Config
    rank: int
    size: int

    @property
    def k_heads(self) -> int:
        """K heads of the rank."""
        return self.config.num_key_heads // self.size

    @property
    def ratio(self) -> int:
        """V heads per K head."""
        return self.config.num_value_heads // self.config.num_key_heads

    def v_heads(self) -> Tensor:
        """Where the rank's V heads, grouped, lie in the file: int64 ``[v_heads]``."""
        order = grouped_v_heads(self.config.num_key_heads, self.config.num_value_heads)
        return order.chunk(self.size)[self.rank]

    def v_rows(self) -> Tensor:
        """Rows of ``attn_gate`` and of the V part of ``attn_qkv``: int64 ``[v_heads * v_dim]``."""
        dim = self.config.value_head_dim
        return (self.v_heads()[:, None] * dim + torch.arange(dim)).reshape(-1)

    def qkv_rows(self) -> Tensor:
        """Rows of ``attn_qkv`` and channels of the convolution: q, k, then grouped V."""
        c = self.config
        q = torch.arange(c.key_size).chunk(self.size)[self.rank]
        return torch.cat([q, q + c.key_size, self.v_rows() + 2 * c.key_size])

    def out_columns(self) -> list[Range]:
        """Columns of ``ssm_out``, tiled: neighbours joined."""
        c, width = self.config, self.k_heads * self.config.value_head_dim
        stride = c.num_key_heads * c.value_head_dim
        starts = [tile * stride + self.rank * width for tile in range(self.ratio)]
        return [(0, c.value_size)] if self.size == 1 else [(s, s + width) for s in starts]


def _cut(config: DenseConfig | Qwen35Config, size: int) -> Iterator[tuple[str, list[Range]]]:
    """Tensors that are cut along columns, and the first cut.

    All others are multiples of its width, so if it lies between quants, they do.
    """
    for i, kind in enumerate(config.layer_kinds):
        yield f"blk.{i}.ffn_down.weight", [(0, config.intermediate_size // size)]
        if kind == "full":
            yield f"blk.{i}.attn_output.weight", [(0, config.q_size // size)]
        elif isinstance(config, Qwen35Config):
            width = config.key_size // size // config.key_head_dim * config.value_head_dim
            yield f"blk.{i}.ssm_out.weight", [(0, width)]


def _counts(config: DenseConfig | Qwen35Config) -> dict[str, int]:
    counts = {
        "attention.head_count": config.num_heads,
        "feed_forward_length": config.intermediate_size,
        "vocabulary, filled up,": -(-config.vocab_size // _VOCABULARY_PADDING)
        * _VOCABULARY_PADDING,
    }
    if isinstance(config, Qwen35Config):
        counts["ssm.group_count"] = config.num_key_heads
        counts["ssm.time_step_rank"] = config.num_value_heads
    return counts


def _indivisible(config: DenseConfig | Qwen35Config, size: int) -> str | None:
    for name, count in _counts(config).items():
        if count % size:
            return f"{name} {count} must be a multiple of tensor_parallel_size, got {size}"
    kv = config.num_kv_heads
    if kv % size and size % kv:
        return (
            f"attention.head_count_kv {kv} must be a multiple or a divisor of "
            f"tensor_parallel_size, got {size}"
        )
    return None


def _misaligned(config: DenseConfig | Qwen35Config, file: GGUFFile, size: int) -> list[str]:
    found: list[str] = []
    if size == 1:
        return found
    for name, ranges in _cut(config, size):
        kind = file.tensor(name, check=False).type
        if not _aligned(ranges, kind.elems):
            width = ranges[0][1]
            found.append(f"{name} ({kind.name}, quants of {kind.elems}) by {width} columns")
    return found


def check_parallel(config: DenseConfig | Qwen35Config, file: GGUFFile, size: int) -> None:
    """Check that a file can be split over ``size`` ranks.

    Args:
        config: of the file.
        file: open.
        size: ranks of the tensor-parallel group.

    Raises:
        CheckpointError: heads, widths or quants do not divide; the message says what does.
    """
    if size == 1:
        return
    problem = _indivisible(config, size)
    step = ""
    if problem is None and not _may_dequantize():
        cut = _misaligned(config, file, size)
        if cut:
            more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
            problem = (
                f"tensor_parallel_size {size} must split every tensor between quants, got "
                f"{cut[0]}{more}"
            )
            step = f", or hold such tensors unquantized: {MISALIGNED}=dequantize"
    if problem is None:
        return
    fits = [
        str(n)
        for n in range(1, _MOST_RANKS + 1)
        if _indivisible(config, n) is None and not _misaligned(config, file, n)
    ]
    raise CheckpointError(f"{file.path}: {problem}; this file splits by {', '.join(fits)}{step}")
