"""Lucebox's layout of a drafter GGUF: other names, raw layer ids, keys one level deeper."""

from collections.abc import Mapping
from typing import Any, Final

from .config import DrafterConfig

__all__ = ["LUCEBOX_ARCH", "lucebox_keys", "lucebox_notes"]

LUCEBOX_ARCH: Final = "qwen35-dflash-draft"

_RENAMED: Final = {
    "block_size": "dflash.block_size",
    "conv_kernel_size": "dflash.dflash2.conv_kernel_size",
    "conv_group_size": "dflash.dflash2.conv_group_size",
    "selector_rank": "dflash.dflash2.selector_rank",
    "selector_top_k": "dflash.dflash2.selector_top_k",
}
_DROPPED: Final = ("target_layers", "rope.dimension_sections")


def lucebox_keys(
    config: DrafterConfig, values: Mapping[str, tuple[str, Any]]
) -> dict[str, tuple[str, Any]]:
    """Keys behind the architecture's prefix, from those of an upstream file.

    Keys that lucebox does not have keep their upstream names; its reader skips them, ours does not.
    """
    c = config
    out = {_RENAMED.get(k, k): v for k, v in values.items() if k not in _DROPPED}
    out |= {
        "vocab_size": ("uint32", c.vocab_size),
        "dflash.n_target_layers": ("uint32", len(c.target_layer_ids)),
        "dflash.n_target_features": ("uint32", c.target_hidden_columns),
        "dflash.target_layer_ids": ("array[int32]", [*c.target_layer_ids]),
        "dflash.mask_token_id": ("uint32", c.mask_token_id),
    }
    if c.kind == "dspark":
        rank = c.markov_rank or 0
        width = c.hidden_size + (rank if c.confidence == "hidden+markov" else 0)
        out |= {
            "dflash.dspark.enabled": ("uint32", 1),
            "dflash.dspark.markov_rank": ("uint32", rank),
            "dflash.dspark.vocab_size": ("uint32", c.vocab_size),
            "dflash.dspark.confidence.enabled": ("uint32", int(c.confidence is not None)),
        }
        if c.confidence is not None:
            out["dflash.dspark.confidence_dim"] = ("uint32", width)
    return out


def lucebox_notes(config: DrafterConfig, tensors: Mapping[str, Any]) -> list[str]:
    """What lucebox's own reader has no place for, one line each."""
    c = config
    found = [
        ("an own embedding", "embed_tokens.weight" in tensors),
        ("an own head", "lm_head.weight" in tensors),
        ("a reduced vocabulary (d2t)", "d2t" in tensors),
        ("attention sinks", c.attention_sinks),
        ("a value scale", c.value_scale != 1),
        ("an embedding scale", c.input_embedding_scale != 1),
        ("a logit scale or soft cap", bool(c.final_logit_softcapping) or _scale(c) != 1),
        (f"a {c.markov_head_type} Markov head", c.markov_head_type in ("gated", "rnn")),
        ("a block whose anchor predicts nothing", c.kind == "dspark" and not c.sample_from_anchor),
    ]
    said = "lucebox has no place for {}; torch-dflash reads it"
    return [said.format(what) for what, is_so in found if is_so]


def _scale(config: DrafterConfig) -> float:
    return config.logit_scale if config.kind == "dspark" else config.output_multiplier
