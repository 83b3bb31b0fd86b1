"""Feature ``gdn``: the Gated DeltaNet layer of Qwen3.5-type models runs on torch.ops.dflash."""

import dataclasses
import inspect
from typing import Any, Final

from .features import Declined

__all__ = ["apply"]

NAME: Final = "QwenGatedDeltaNetAttention"
# What the layer overrides or calls: method -> parameters after self.
_METHODS: Final = {
    "forward_cpu": ("hidden_states",),
    "_forward_core": ("mixed_qkv", "b", "a", "core_attn_out"),
    "_forward_core_fused_norm_packed": ("mixed_qkvz", "ba", "core_attn_out"),
    "split_ba": ("ba",),
    "get_state_dtype": (),
}
_METADATA: Final = {
    "num_prefills",
    "num_prefill_tokens",
    "num_decodes",
    "num_decode_tokens",
    "num_actual_tokens",
    "has_initial_state",
    "spec_query_start_loc",
    "non_spec_query_start_loc",
    "spec_state_indices_tensor",
    "non_spec_state_indices_tensor",
    "spec_sequence_masks",
    "spec_token_indx",
    "non_spec_token_indx",
    "num_accepted_tokens",
}


def _check(layer: Any, metadata: Any) -> None:
    for method, wanted in _METHODS.items():
        found = getattr(layer, method, None)
        got = tuple(inspect.signature(found).parameters)[1:] if found else None
        if got != wanted:
            raise Declined(f"{NAME}.{method} must take {wanted}, got {got}")
    missing = _METADATA - {f.name for f in dataclasses.fields(metadata)}
    if missing:
        raise Declined(f"GDNAttentionMetadata must have {', '.join(sorted(missing))}")


def apply() -> str:
    """Register the layer in the place of vLLM's.

    Raises:
        Declined: vLLM's layer or its metadata look different, or another plugin was first.
    """
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    _check(QwenGatedDeltaNetAttention, GDNAttentionMetadata)
    from .gdn_layer import DFlashGDN

    found = op_registry_oot.get(NAME)
    if found is None:
        PluggableLayer.register_oot(name=NAME)(DFlashGDN)
    elif found is not DFlashGDN:
        raise Declined(f"{NAME} is already replaced by {found.__module__}.{found.__qualname__}")
    return f"{NAME}: decode and verify; on CPU prefill too"
