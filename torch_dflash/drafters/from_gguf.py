"""Resolves a drafter's config from GGUF metadata: upstream's ``dflash`` and the older layouts."""

import re
from collections.abc import Mapping
from typing import Any, Final

from ..fields import Fields, short
from .attention import LayerAttention, attention_from_gguf
from .config import DrafterConfig, Kind
from .layer_ids import check_layer_ids, default_layer_ids, layer_ids_from_gguf
from .resolve import Overrides, Resolver
from .rope_keys import rope_from_gguf
from .tensors import Shapes, detect_kind

__all__ = ["config_from_gguf", "drafter_arch", "is_drafter_arch"]

_DEFAULT_TOP_K: Final = 16

# field -> keys behind "<arch>."; keys in full where a colon leads
_KEYS: Final = {
    "num_layers": ("block_count",),
    "hidden_size": ("embedding_length",),
    "intermediate_size": ("feed_forward_length",),
    "head_dim": ("attention.key_length",),
    "num_heads": ("attention.head_count",),
    "num_kv_heads": ("attention.head_count_kv",),
    "attention_bias": (),
    "attention_sinks": (),
    "hidden_act": ("hidden_activation",),
    "vocab_size": ("vocab_size", "dflash.dspark.vocab_size"),
    "draft_vocab_size": (),
    "mask_token_id": ("dflash.mask_token_id", "mask_token_id", ":tokenizer.ggml.mask_token_id"),
    "block_size": ("block_size", "dflash.block_size"),
    "conv_kernel_size": ("conv_kernel_size", "dflash.dflash2.conv_kernel_size"),
    "conv_group_size": ("conv_group_size", "dflash.dflash2.conv_group_size"),
    "selector_rank": ("selector_rank", "dflash.dflash2.selector_rank"),
    "selector_top_k": ("selector_top_k", "dflash.dflash2.selector_top_k"),
    "markov_rank": ("markov_rank", "dflash.dspark.markov_rank"),
    "markov_head_type": ("markov_head_type",),
    "confidence": ("has_confidence_head", "confidence_head"),
    "confidence_with_markov": ("confidence_head_with_markov",),
    "value_scale": ("attention.value_scale",),
    "output_multiplier": ("logit_scale", "output_multiplier"),
    "input_embedding_scale": ("embedding_scale", "input_embedding_scale"),
    "logit_scale": ("logit_scale", "output_multiplier"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "context_length": ("context_length",),
}

# read elsewhere, or of no meaning for a drafter
_KNOWN: Final = re.compile(
    r"rope\.dimension_sections|rope\.scaling\.(?:finetuned|yarn_log_multiplier)|"
    r"dflash\.dspark\.confidence_dim|dflash\.n_target_(?:layers|features)|dflash\.domino\..*"
)


def is_drafter_arch(arch: str) -> bool:
    """Whether a GGUF of this ``general.architecture`` holds a drafter we read."""
    return arch in ("dflash", "dflash-draft") or arch.endswith("-dflash-draft")


def drafter_arch(fields: Fields) -> str:
    """``general.architecture`` of a drafter.

    Raises:
        CheckpointError: it is missing, or that of something else.
    """
    arch = fields.require(str, "arch", "general.architecture")
    if not is_drafter_arch(arch):
        fields.fail(
            f"general.architecture must be dflash, dflash-draft or *-dflash-draft, got {arch!r}",
            "this is not a drafter; give it as the target",
        )
    return arch


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Shapes,
    *,
    where: str = "GGUF",
    overrides: Overrides | None = None,
) -> DrafterConfig:
    """Resolve and check a drafter's config.

    Args:
        metadata: key -> value; the architecture is the prefix of the keys.
        shapes: logical name -> row-major shape.
        where: the file, for messages.
        overrides: what the caller knows better.

    Raises:
        CheckpointError: a key is missing, wrong or contradicts a tensor; a tensor is unknown,
            missing or of the wrong shape; or this is another kind of drafter.
    """
    overrides = overrides or Overrides()
    fields = Fields(where, [("", metadata)])
    arch = drafter_arch(fields)
    fields.sources.clear()
    _refuse(fields, arch)
    keys = {field: _full(arch, names) for field, names in _KEYS.items()}
    shapes = _flat_confidence(shapes)
    kind = detect_kind(shapes, where)
    fields.sources["kind"] = "tensors"
    _keep_promises(fields, arch, kind, shapes)
    r = Resolver(fields, keys, shapes, kind, overrides)
    v = r.values
    r.backbone()
    _head_checks(r, arch)
    eps = f"{arch}.attention.layer_norm_rms_epsilon"
    v["rms_norm_eps"] = fields.require(float, "rms_norm_eps", eps, low=0)
    _vocabulary(r, metadata)
    r.block_size()
    v["sample_from_anchor"] = _anchor(r, arch, kind)
    _context(r, arch)
    r.context_length()
    v["rope"] = overrides.rope or rope_from_gguf(fields, arch, v["head_dim"])
    if overrides.rope:
        fields.sources["rope.theta"] = "override"
    v["rope_is_neox"] = True  # every converter reorders the rows of the other layout
    v["layers"] = _layers(r, arch, kind)
    _scales(r, arch, kind)
    if kind == "dflash2":
        r.selector(_DEFAULT_TOP_K)
    if kind == "dspark":
        r.markov()
    _unknown_keys(fields, arch, metadata)
    return r.build(where)


def _full(arch: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(n[1:] if n.startswith(":") else f"{arch}.{n}" for n in names)


def _refuse(fields: Fields, arch: str) -> None:
    refused = {
        f"{arch}.decoder_arch": "Laguna DFlash",
        f"{arch}.dflash.context_kv_layer_norm": "Laguna DFlash",
        f"{arch}.log_snr_conditioning": "log-SNR conditioned DFlash",
        f"{arch}.dflash.domino.enabled": "Domino",
        f"{arch}.hyper_connection.count": "DeepSeek-V4 DSpark",
        f"{arch}.attention.q_lora_rank": "DeepSeek-V4 DSpark",
    }
    for key, what in refused.items():
        for _, value in fields.found(key):
            if value not in (False, 0, ""):
                fields.fail(
                    f"{key} = {short(value)} belongs to {what}, which is not supported; use a "
                    "DFlash, DFlash2 or dense DSpark drafter"
                )


def _keep_promises(fields: Fields, arch: str, kind: Kind, shapes: Shapes) -> None:
    """Heads that lucebox's flags announce must be in the file."""
    at = f"{arch}.dflash.dspark"
    confidence = "confidence_head.proj.weight" in shapes
    for key, kept in (
        (f"{at}.enabled", kind == "dspark"),
        (f"{at}.confidence.enabled", confidence),
    ):
        for _, value in fields.found(key):
            if value and not kept:
                fields.fail(f"{key} = {short(value)}, so its tensors must be there, got none")


def _flat_confidence(shapes: Shapes) -> Shapes:
    """Some writers store the one-row confidence projection without its row dimension."""
    name = "confidence_head.proj.weight"
    shape = shapes.get(name)
    return {**shapes, name: (1, *shape)} if shape is not None and len(shape) == 1 else shapes


def _head_checks(r: Resolver, arch: str) -> None:
    f, head_dim = r.fields, r.values["head_dim"]
    value = f.optional(int, "value_length", f"{arch}.attention.value_length")
    if value not in (None, head_dim):
        f.fail(f"{arch}.attention.value_length must equal key_length {head_dim}, got {value}")
    scale = f.optional(float, "scale", f"{arch}.attention.scale")
    if scale and abs(scale - head_dim**-0.5) > 1e-6:  # 0 is "unset" in ggml
        f.fail(
            f"{arch}.attention.scale must be absent or {head_dim**-0.5:.6g}, got {scale}: this "
            "drafter (Gemma 4 DSpark) is not supported"
        )


def _vocabulary(r: Resolver, metadata: Mapping[str, Any]) -> None:
    f = r.fields
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not f.found(*r.keys["vocab_size"]):
        key = "tokenizer.ggml.tokens"
        if isinstance(tokens, str) or not hasattr(tokens, "__len__"):
            f.fail(f"{key} must be a list, got {short(tokens)}")
        f.scopes = (("", {**metadata, r.keys["vocab_size"][0]: len(tokens)}),)
        r.vocabulary()
        f.scopes = (("", metadata),)
        if f.sources.get("vocab_size") == r.keys["vocab_size"][0]:
            f.sources["vocab_size"] = f"length of {key}"
        return
    r.vocabulary()


def _anchor(r: Resolver, arch: str, kind: Kind) -> bool:
    f = r.fields
    anchor = f.optional(bool, "sample_from_anchor", f"{arch}.sample_from_anchor")
    if kind != "dspark" and anchor:
        f.fail(f"{arch}.sample_from_anchor must be false or absent for {kind}, got true")
    if anchor is None:
        f.sources["sample_from_anchor"] = f"default of {kind}"
        anchor = kind == "dspark"
    if not anchor and r.values["block_size"] < 2:
        f.fail(f"{f.sources['block_size']} must be at least 2 without sample_from_anchor, got 1")
    return anchor


def _context(r: Resolver, arch: str) -> None:
    f, v, hidden = r.fields, r.values, r.values["hidden_size"]
    inputs = r.dim("fc.weight", 1)
    if inputs is None:
        f.fail("tensor 'fc.weight' must be there, got a file without it")
    v["use_aux_hidden_state"] = True
    depth = r.overrides.num_target_layers
    f.sources["num_target_layers"] = "not in the file" if depth is None else "target"
    v["num_target_layers"] = depth
    ids = layer_ids_from_gguf(f, arch)
    if ids is None:
        if inputs % hidden:
            f.fail(f"fc.weight must have a multiple of {hidden} columns, got {inputs}")
        if depth is None:
            f.missing(
                (f"{arch}.target_layers", f"{arch}.dflash.target_layer_ids"),
                "pass the target: the default ids need its depth",
            )
        ids = default_layer_ids(depth, inputs // hidden)
        f.sources["target_layer_ids"] = f"default rule for {depth} layers"
        f.note(f"target_layer_ids: the file does not say, {[*ids]} by the default rule")
    # no key states the target's width, so fc decides
    width = inputs // len(ids) if ids and inputs % len(ids) == 0 else hidden
    if width != hidden:
        f.note(f"target_hidden_size: {width} by the shape of fc.weight, the drafter has {hidden}")
    f.sources["target_hidden_size"] = "shape of fc.weight"
    check_layer_ids(f, ids, depth, inputs, width)
    for key, stated in f.found(f"{arch}.dflash.n_target_features"):
        if stated != inputs:
            f.note(f"{key} = {short(stated)}, but fc.weight has {inputs} columns, which counts")
    v["target_hidden_size"], v["target_layer_ids"] = width, ids


def _layers(r: Resolver, arch: str, kind: Kind) -> tuple[LayerAttention, ...]:
    layers = attention_from_gguf(r.fields, arch, r.values["num_layers"], kind == "dflash2")
    if r.overrides.causal is None:
        return layers
    r.fields.sources["layers"] += ", causal: override"
    return tuple(LayerAttention(layer.window, r.overrides.causal) for layer in layers)


def _scales(r: Resolver, arch: str, kind: Kind) -> None:
    f, v = r.fields, r.values
    used = "logit_scale" if kind == "dspark" else "output_multiplier"
    if arch.startswith("gemma") and not f.found(*r.keys["input_embedding_scale"]):
        # Gemma scales its embeddings, and lucebox's files have no key for it
        root = v["target_hidden_size"] ** 0.5
        f.scopes = (*f.scopes, ("", {r.keys["input_embedding_scale"][0]: root}))
        f.note(f"input_embedding_scale: {root:.6g} by the rule for Gemma targets")
    for field in ("value_scale", "input_embedding_scale", used):
        hits = f.found(*r.keys[field])
        if hits and hits[0][1] == 0:  # 0 is "unset" in ggml
            v[field], f.sources[field] = 1.0, f"{hits[0][0]} = 0, unset"
        else:
            r.number(field, 1.0)
    v["output_multiplier" if kind == "dspark" else "logit_scale"] = 1.0
    cap = f.require(
        float, "final_logit_softcapping", *r.keys["final_logit_softcapping"], default=0.0, low=0
    )
    if cap and kind == "dspark":
        f.fail(
            f"{f.sources['final_logit_softcapping']} must be absent for DSpark, which does not "
            f"define it, got {cap}"
        )
    v["final_logit_softcapping"] = cap


def _unknown_keys(fields: Fields, arch: str, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or key in fields.used or _KNOWN.fullmatch(name):
            continue
        fields.note(f"{key} = {short(value)} is not a key we know: ignored")
