"""Resolves a native target's config from GGUF metadata and tensor shapes."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

from ..drafters.from_gguf import is_drafter_arch
from ..drafters.rope_keys import rope_from_gguf
from ..dtypes import PLAIN, check_types
from ..fields import CheckpointError, Fields, short
from ..gguf import GGUFFile
from .config import DenseConfig, LayerKind, Qwen35Config
from .tensors import check_target_tensors

__all__ = ["read_target_config", "target_config_from_gguf"]

_log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]

_REFUSED: Final = {
    "qwen35moe": "it is a mixture of experts, which comes with its own issue",
    "qwen3moe": "it is a mixture of experts, which comes with its own issue",
    "qwen3next": "Qwen3-Next is not supported",
    "qwen4exp": "Qwen3.8-Flash-Next (hyper-connections) is not supported",
}
_KNOWN_ARCHS: Final = "qwen35, qwen3, llama"

# keys that change the arithmetic in a way no native target implements: key -> neutral values
_FOREIGN: Final[Mapping[str, tuple[Any, ...]]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "hidden_activation": ("silu",),
}
_IGNORED: Final = re.compile(
    r"rope\.scaling\.(?:finetuned|yarn_log_multiplier)|expert_used_count|tensor_data_layout|"
    r"rope\.dimension_sections"
)


def read_target_config(file: GGUFFile) -> DenseConfig | Qwen35Config:
    """Resolve the config of an open file, check every tensor's name, shape and type, log notes.

    Raises:
        CheckpointError: an architecture that is not supported, or keys and tensors that do not
            fit; the message names what is wrong.
    """
    shapes = {name: info.shape for name, info in file.tensors.items()}
    where = str(file.path)
    config = target_config_from_gguf(file.metadata, shapes, where=where)
    nextn = tuple(f"blk.{i}." for i in range(config.num_layers, config.num_layers + 16))
    tensors = {
        name: file.tensor(name, check=False) for name in shapes if not name.startswith(nextn)
    }
    check_types(where, tensors)
    for name, tensor in tensors.items():
        if name.endswith("ssm_conv1d.weight") and tensor.type_name not in PLAIN:
            raise CheckpointError(
                f"{where}: tensor {name!r} must be F32, F16 or BF16, got {tensor.type_name}"
            )
    if isinstance(config, DenseConfig) and config.rope_freqs:
        factors = file.tensor("rope_freqs.weight").to_dense()
        config = replace(config, rope=config.rope.with_freq_factors(factors))
    for note in config.notes:
        _log.warning("%s: %s", where, note)
    return config


def target_config_from_gguf(
    metadata: Mapping[str, Any], shapes: Shapes, *, where: str = "GGUF"
) -> DenseConfig | Qwen35Config:
    """Resolve and check a target's config.

    Args:
        metadata: key -> value; the architecture is the prefix of the keys.
        shapes: GGUF name -> row-major shape.
        where: the file, for messages.

    Raises:
        CheckpointError: an architecture that is not supported; a key is missing, wrong or
            contradicts a tensor; a tensor is unknown, missing or of the wrong shape.
    """
    fields = Fields(where, [("", metadata)])
    arch = fields.require(str, "arch", "general.architecture")
    if arch in _REFUSED:
        fields.fail(
            f"general.architecture must be one of {_KNOWN_ARCHS}, got {arch!r}: {_REFUSED[arch]}"
        )
    if is_drafter_arch(arch):
        fields.fail(f"general.architecture {arch!r} is a drafter's", "give it as the drafter")
    if arch not in ("qwen35", "qwen3", "llama"):
        fields.fail(f"general.architecture must be one of {_KNOWN_ARCHS}, got {arch!r}")
    for name, neutral in _FOREIGN.items():
        for key, value in fields.found(f"{arch}.{name}"):
            if value not in neutral:
                fields.fail(
                    f"{key} must be absent, got {short(value)}: this model needs what the "
                    f"{arch} target does not implement"
                )
    common = _common(fields, arch, metadata, shapes)
    own = (
        _qwen35(fields, arch, common) if arch == "qwen35" else _dense(fields, arch, common, shapes)
    )
    for key, value in metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name != key and key not in fields.used and not _IGNORED.fullmatch(name):
            fields.note(f"{key} = {short(value)} is not a key we know: ignored")
    common |= own
    kind = Qwen35Config if arch == "qwen35" else DenseConfig
    config = kind(**common, sources=dict(fields.sources), notes=tuple(fields.notes))
    config = _with_fused(config, shapes)
    check_target_tensors(config, shapes, where)
    return config


def _common(f: Fields, arch: str, metadata: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    def integer(field: str, name: str, default: int | None = None) -> int:
        return f.require(int, field, f"{arch}.{name}", default=default, low=1)

    hidden = integer("hidden_size", "embedding_length")
    heads = integer("num_heads", "attention.head_count")
    kv_heads = integer("num_kv_heads", "attention.head_count_kv", default=heads)
    if heads % kv_heads:
        f.fail(
            f"{arch}.attention.head_count {heads} must be a multiple of head_count_kv {kv_heads}"
        )
    head_dim = f.optional(int, "head_dim", f"{arch}.attention.key_length", low=1)
    if head_dim is None:
        if hidden % heads:
            f.missing((f"{arch}.attention.key_length",))
        head_dim = hidden // heads
        f.sources["head_dim"] = "embedding_length / head_count"
    value_dim = f.optional(int, "value_dim", f"{arch}.attention.value_length")
    if value_dim not in (None, head_dim):
        f.fail(f"{arch}.attention.value_length must equal key_length {head_dim}, got {value_dim}")
    f.sources.pop("value_dim", None)
    eps = f"{arch}.attention.layer_norm_rms_epsilon"
    # the base of the first Llamas, whose files may leave it out
    theta = 1e4 if arch == "llama" else None
    tied = "output.weight" not in shapes
    f.sources["tied"] = "no output.weight" if tied else "output.weight"
    return {
        "arch": arch,
        "hidden_size": hidden,
        "intermediate_size": integer("intermediate_size", "feed_forward_length"),
        # bounded by the tensors, so that a damaged count cannot ask for a table of billions
        "num_layers": f.require(
            int, "num_layers", f"{arch}.block_count", low=1, high=max(len(shapes), 1)
        ),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": _vocabulary(f, arch, metadata),
        "context_length": integer("context_length", "context_length"),
        "rms_norm_eps": f.require(float, "rms_norm_eps", eps, low=0),
        "rope": rope_from_gguf(f, arch, head_dim, theta),
        "tied": tied,
    }


def _vocabulary(f: Fields, arch: str, metadata: Mapping[str, Any]) -> int:
    key = "tokenizer.ggml.tokens"
    tokens = metadata.get(key)
    if tokens is None or isinstance(tokens, str) or not hasattr(tokens, "__len__"):
        f.fail(f"{key} must be a list of tokens, got {short(tokens)}")
    count = len(tokens)
    stated = f.optional(int, "vocab_size", f"{arch}.vocab_size")
    if stated not in (None, count):
        f.fail(f"{arch}.vocab_size must be the length of {key}, got {stated} and {count}")
    f.sources["vocab_size"] = f"length of {key}"
    return count


def _dense(f: Fields, arch: str, common: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    head_dim, rotary = common["head_dim"], common["rope"].rotary_dim
    if rotary != head_dim:
        f.fail(f"{arch}.rope.dimension_count must be the head dimension {head_dim}, got {rotary}")
    f.sources |= dict.fromkeys(("rope_is_neox", "qk_norm"), "architecture")
    f.sources |= dict.fromkeys(("attention_bias", "output_bias", "rope_freqs"), "tensors")
    return {
        "rope_is_neox": arch != "llama",
        "qk_norm": arch == "qwen3",
        "attention_bias": "blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes,
        "output_bias": "blk.0.attn_output.bias" in shapes,
        "rope_freqs": "rope_freqs.weight" in shapes,
    }


def _qwen35(f: Fields, arch: str, common: dict[str, Any]) -> dict[str, Any]:
    def integer(field: str, name: str) -> int:
        return f.require(int, field, f"{arch}.{name}", low=1)

    blocks = common["num_layers"]
    nextn = f.require(
        int, "num_nextn_layers", f"{arch}.nextn_predict_layers", default=0, low=0, high=blocks - 1
    )
    layers = common["num_layers"] = blocks - nextn
    if nextn:
        f.note(f"skipping {nextn} NextN layer{'s' * (nextn > 1)} (blk.{layers}..{blocks - 1})")
    key = f"{arch}.rope.dimension_sections"
    sections = f.items(int, key, f.raw("rope_sections", key) or f.missing((key,)))
    rotary = common["rope"].rotary_dim
    if sum(sections) != rotary // 2 or min(sections) < 0:
        f.fail(f"{key} must add up to half of rope.dimension_count {rotary}, got {sections}")
    values = integer("num_value_heads", "ssm.time_step_rank")
    keys = integer("num_key_heads", "ssm.group_count")
    inner = integer("value_head_dim", "ssm.inner_size")
    if values % keys:
        f.fail(f"{arch}.ssm.time_step_rank {values} must be a multiple of group_count {keys}")
    if inner % values:
        f.fail(f"{arch}.ssm.inner_size {inner} must be a multiple of time_step_rank {values}")
    f.sources["value_head_dim"] += " / time_step_rank"
    return {
        "layer_kinds": _layer_kinds(f, arch, layers, blocks),
        "num_nextn_layers": nextn,
        "rope_sections": tuple(sections),
        "conv_kernel": f.require(int, "conv_kernel", f"{arch}.ssm.conv_kernel", low=2),
        "num_key_heads": keys,
        "key_head_dim": integer("key_head_dim", "ssm.state_size"),
        "num_value_heads": values,
        "value_head_dim": inner // values,
    }


def _layer_kinds(f: Fields, arch: str, layers: int, blocks: int) -> tuple[LayerKind, ...]:
    recurrent = f"{arch}.attention.recurrent_layers"
    interval = f"{arch}.full_attention_interval"
    every = f.optional(int, "layer_kinds", interval, low=1)
    flags = f.raw("layer_kinds", recurrent)
    if flags is None and every is None:
        f.missing((recurrent, interval))
    if flags is None:
        full = [(i + 1) % cast(int, every) == 0 for i in range(layers)]
    else:
        full = [not r for r in f.items(bool, recurrent, flags, blocks)[:layers]]
    return tuple("full" if is_full else "gdn" for is_full in full)


def _with_fused(config: DenseConfig | Qwen35Config, shapes: Shapes) -> DenseConfig | Qwen35Config:
    """Full layers that hold one qkv tensor. On a GDN layer the same name is another tensor."""
    fused = tuple(
        i
        for i, kind in enumerate(config.layer_kinds)
        if kind == "full" and f"blk.{i}.attn_qkv.weight" in shapes
    )
    sources = {
        **config.sources,
        "fused_qkv": "tensors",
        "layer_kinds": config.sources.get("layer_kinds", "architecture"),
    }
    return replace(config, fused_qkv=fused, sources=sources)
