"""Row orders between GGUF files and the layout that attention and Gated DeltaNet run in."""

import torch
from torch import Tensor

from ..drafters.rope import neox_order
from ..gguf import QuantTensor
from .config import DenseConfig, Qwen35Config

__all__ = ["grouped_v_heads", "neox_qk", "split_qkv"]


def split_qkv(
    config: DenseConfig | Qwen35Config, qkv: QuantTensor
) -> tuple[QuantTensor, QuantTensor, QuantTensor]:
    """Cut a fused attention tensor (or its bias) into q (with its gates, if any), k and v.

    Args:
        config: of the target.
        qkv: ``[q + 2 kv, ...]``, of a full attention layer in ``config.fused_qkv``.

    Raises:
        ValueError: the rows do not add up.
    """
    gates = 2 if isinstance(config, Qwen35Config) else 1
    q, k, v = qkv.split([gates * config.q_size, config.kv_size, config.kv_size])
    return q, k, v


def neox_qk(config: DenseConfig, q: QuantTensor, k: QuantTensor) -> tuple[QuantTensor, QuantTensor]:
    """Put rows (or biases) of q and k in NeoX order, whole rows at a time.

    ``llama`` files hold them interleaved, so this undoes what the converter did, exactly. Files
    that are in NeoX order come back as they are.

    Args:
        config: of the target.
        q: ``[heads * head_dim, ...]``.
        k: ``[kv_heads * head_dim, ...]``.
    """
    if config.rope_is_neox:
        return q, k
    dims = config.head_dim, config.rope.rotary_dim
    return (
        q.take_rows(neox_order(config.num_heads, *dims)),
        k.take_rows(neox_order(config.num_kv_heads, *dims)),
    )


def grouped_v_heads(num_key_heads: int, num_value_heads: int) -> Tensor:
    """Where each V head of Hugging Face's grouped order lies in the tiled order of GGUF files.

    Returns:
        int64 ``[num_value_heads]``: grouped head ``i`` is tiled head ``order[i]``.

    >>> grouped_v_heads(3, 6).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    ratio = num_value_heads // num_key_heads
    return torch.arange(num_value_heads, device="cpu").view(ratio, num_key_heads).t().reshape(-1)
