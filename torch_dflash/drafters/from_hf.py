"""Resolves a drafter's config from a Hugging Face ``config.json`` and the tensors beside it."""

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from ..fields import Fields, short
from .attention import LayerAttention, attention_from_hf, layer_types
from .config import DrafterConfig, Kind
from .layer_ids import check_layer_ids, default_layer_ids, layer_ids_from_hf
from .resolve import Overrides, Resolver
from .rope_keys import rope_from_hf
from .tensors import Shapes, detect_kind

__all__ = ["config_from_hf"]

_KEYS: Final = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "head_dim": ("head_dim",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "attention_bias": ("attention_bias",),
    "attention_sinks": ("attention_sink_bias", "add_swa_attention_sink_bias"),
    "hidden_act": ("hidden_act", "hidden_activation"),
    "vocab_size": ("vocab_size",),
    "draft_vocab_size": ("draft_vocab_size",),
    "mask_token_id": ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"),
    "block_size": ("block_size", "draft_block_size", "dspark_block_size"),
    "conv_kernel_size": ("conv_kernel_size",),
    "conv_group_size": ("conv_group_size",),
    "selector_rank": ("selector_rank",),
    "selector_top_k": ("selector_top_k",),
    "markov_rank": ("markov_rank", "dspark_markov_rank"),
    "markov_head_type": ("markov_head_type", "dspark_markov_head_type"),
    "confidence": ("enable_confidence_head", "use_confidence_head"),
    "confidence_with_markov": ("confidence_head_with_markov",),
    "value_scale": ("attention_value_scale",),
    "output_multiplier": ("output_multiplier", "logit_scale"),
    "input_embedding_scale": ("input_embedding_scale",),
    "logit_scale": ("logit_scale",),
    "context_length": ("max_position_embeddings",),
}

# in dflash_config, of no meaning for a drafter that runs
_TRAINING: Final = re.compile(
    r"num_anchors|shift_label|confidence_head_alpha|loss_.*|projector_type|target_layers|"
    r"has_embed_tokens|has_lm_head|mask_token|num_target_layers|target_hidden_size|"
    r"rms_norm_eps|sample_from_anchor|dspark_bonus_anchor|final_logit_softcapping"
)

# architecture or model type -> what it is
_REFUSED: Final = (
    (r"(?i).*lilicorr.*", "LiLiCorr"),
    (r"(?i).*domino.*", "Domino"),
    (r"(?i).*xpress.*", "XPress"),
    (r"(?i).*laguna.*", "Laguna DFlash"),
    (r"(?i)deepseek_?v4.*", "DeepSeek-V4 DSpark"),
    (r"(?i)gemma.*", "a Gemma drafter"),
    (r"(?i).*eagle.*", "EAGLE"),
)


def config_from_hf(
    config: Mapping[str, Any],
    shapes: Shapes | None = None,
    *,
    where: str = "config.json",
    tensors_in: str | None = None,
    overrides: Overrides | None = None,
) -> DrafterConfig:
    """Resolve and check a drafter's config.

    A value is looked for in ``dflash_config``, then ``dspark_config``, then at the top level;
    null counts as absent. In a speculators file the transformer's part is read from
    ``transformer_layer_config``. Where tensors and keys state the same thing, they must agree.

    Args:
        config: content of ``config.json``.
        shapes: logical name -> row-major shape; None resolves from the config alone.
        where: the file, for messages.
        tensors_in: file or folder of the tensors, for messages; by default ``where``.
        overrides: what the caller knows better.

    Raises:
        CheckpointError: a key is missing, wrong or contradicts a tensor; a tensor is unknown,
            missing or of the wrong shape; or this is another kind of drafter.
    """
    overrides = overrides or Overrides()
    fields = _scopes(config, where)
    _refuse(fields)
    kind = _kind(fields, shapes, tensors_in or where)
    r = Resolver(fields, _KEYS, shapes or {}, kind, overrides)
    v = r.values
    r.backbone()
    v["rms_norm_eps"] = fields.require(float, "rms_norm_eps", default=1e-6, low=0)
    r.vocabulary()
    speculators = bool(fields.found("transformer_layer_config", "speculators_model_type"))
    _block(r, kind, speculators)
    _context(r)
    r.context_length()
    types = layer_types(fields, v["num_layers"]) or []
    v["rope"] = overrides.rope or rope_from_hf(fields, v["head_dim"], types)
    if overrides.rope:
        fields.sources["rope.theta"] = "override"
    neox = fields.optional(bool, "rope_is_neox", "rope_is_neox_style", "is_neox_style")
    v["rope_is_neox"] = neox is not False
    v["layers"] = _layers(r, speculators)
    r.number("value_scale", 1.0)
    _scales(r, kind)
    if kind == "dflash2":
        r.selector(default_top_k=None)
    if kind == "dspark":
        r.markov()
    _unknown_keys(fields)
    return r.build(tensors_in or where)


def _scopes(config: Mapping[str, Any], where: str) -> Fields:
    """Readers in order of precedence; nested transformer configs win over the top level."""
    scopes = []
    names = ("dflash_config", "dspark_config", "transformer_layer_config", "text_config")
    for name in names:
        inner = config.get(name)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            Fields(where, []).fail(f"{name} must be a mapping, got {short(inner)}")
        scopes.append((f"{name}.", inner))
    return Fields(where, [*scopes, ("", config)])


def _refuse(fields: Fields) -> None:
    named = [v for _, v in fields.found("architectures", "model_type", "projector_type")]
    for value in named:
        for name in value if isinstance(value, list) else [value]:
            for pattern, what in _REFUSED:
                if re.match(pattern, str(name)):
                    fields.fail(
                        f"{name!r} is {what}, which is not supported; use a DFlash, DFlash2 or "
                        "dense DSpark drafter"
                    )
    for name, neutral in (
        ("log_snr_conditioning", False),
        ("context_kv_layer_norm", False),
        ("mup_multiplier", 1),
    ):
        for key, value in fields.found(name):
            if value != neutral:
                fields.fail(f"{key} = {short(value)} belongs to a drafter that is not supported")


def _kind(fields: Fields, shapes: Shapes | None, where: str) -> Kind:
    """The kind, by tensors if there are any; a config that promises more than they hold fails."""
    hint = _hint(fields)
    if shapes is None:
        fields.sources["kind"] = "config"
        return hint or "dflash"
    kind = detect_kind(shapes, where)
    fields.sources["kind"] = "tensors"
    if hint not in (None, kind):
        if kind == "dflash":
            fields.fail(
                f"the config describes {hint}, so its tensors must be there, got those of a plain "
                "DFlash drafter; the download is probably incomplete"
            )
        fields.note(f"kind: the config reads like {hint}, the tensors are those of {kind}")
    return kind


def _hint(fields: Fields) -> Kind | None:
    stated = fields.optional(str, "kind", "speculators_model_type")
    if stated is not None:
        if stated not in ("dflash", "dflash2", "dspark"):
            fields.fail(
                f"{fields.sources['kind']} must be dflash, dflash2 or dspark, got {stated!r}"
            )
        return cast(Kind, stated)
    names = fields.found("architectures")
    text = str(names[0][1]).lower() if names else ""
    if "dspark" in text or fields.found("markov_rank", "dspark_markov_rank"):
        return "dspark"
    if "dflash2" in text or fields.found("conv_kernel_size", "selector_rank"):
        return "dflash2"
    return "dflash" if "dflash" in text else None


def _block(r: Resolver, kind: Kind, speculators: bool) -> None:
    f, v = r.fields, r.values
    r.block_size()
    anchor = f.optional(bool, "sample_from_anchor")
    source = f.sources.get("sample_from_anchor", "")
    bonus = f.optional(bool, "sample_from_anchor", "dspark_bonus_anchor")
    if anchor is not None and bonus is not None and anchor == bonus:
        f.fail(f"{source} must be the opposite of dspark_bonus_anchor, got {anchor} for both")
    if anchor is None and bonus is not None:
        anchor = not bonus
    if kind != "dspark" and anchor:
        f.fail(f"{f.sources['sample_from_anchor']} must be false for {kind}, got true")
    if anchor is None:
        # files of the speculators layout that leave the key out are older than anchor sampling
        anchor = kind == "dspark" and not speculators
        f.sources["sample_from_anchor"] = "default of " + ("speculators" if speculators else kind)
    v["sample_from_anchor"] = anchor
    if not anchor and v["block_size"] < 2:
        f.fail(f"{f.sources['block_size']} must be at least 2 without sample_from_anchor, got 1")


def _context(r: Resolver) -> None:
    f, v, hidden = r.fields, r.values, r.values["hidden_size"]
    width = f.require(int, "target_hidden_size", default=hidden, low=1)
    v["target_hidden_size"] = width
    aux = f.require(bool, "use_aux_hidden_state", default=True)
    v["use_aux_hidden_state"] = aux
    if not aux and "fc.weight" in r.shapes:
        f.fail("use_aux_hidden_state is false, so fc.weight must be absent, got one")
    depth = f.optional(int, "num_target_layers", low=2)
    if r.overrides.num_target_layers is not None:
        f.sources["num_target_layers"] = "target"
        if depth not in (None, r.overrides.num_target_layers):
            f.fail(
                f"num_target_layers must be that of the target, got {depth} where the target "
                f"has {r.overrides.num_target_layers}; use the drafter trained for this target"
            )
        depth = r.overrides.num_target_layers
    v["num_target_layers"] = depth
    ids = layer_ids_from_hf(f)
    inputs = r.dim("fc.weight", 1) if aux else hidden
    if ids is None:
        if depth is None or inputs is None or inputs % width:
            f.missing(
                ("target_layer_ids",),
                "pass the target: the default ids need its depth, and fc.weight a multiple of "
                f"the target's hidden size {width}",
            )
        ids = default_layer_ids(depth, inputs // width)
        f.sources["target_layer_ids"] = f"default rule for {depth} layers"
        f.note(f"target_layer_ids: the file does not say, {[*ids]} by the default rule")
    check_layer_ids(f, ids, depth, len(ids) * width if inputs is None else inputs, width)
    v["target_layer_ids"] = ids


def _layers(r: Resolver, speculators: bool) -> tuple[LayerAttention, ...]:
    layers = attention_from_hf(r.fields, r.values["num_layers"], speculators)
    if r.overrides.causal is None:
        return layers
    r.fields.sources["layers"] += ", causal: override"
    return tuple(LayerAttention(layer.window, r.overrides.causal) for layer in layers)


def _scales(r: Resolver, kind: Kind) -> None:
    f, v = r.fields, r.values
    r.number("input_embedding_scale", 1.0)
    cap = f.require(float, "final_logit_softcapping", default=0.0, low=0)
    v["final_logit_softcapping"] = cap
    if kind == "dspark":
        if cap or f.optional(float, "output_multiplier", "output_multiplier") not in (None, 1.0):
            f.fail(
                "output_multiplier and final_logit_softcapping must be absent for DSpark, which "
                "does not define them; use logit_scale"
            )
        v["output_multiplier"] = 1.0
        r.number("logit_scale", 1.0)
    else:
        r.number("output_multiplier", 1.0)
        v["logit_scale"] = 1.0


def _unknown_keys(fields: Fields) -> None:
    for prefix, mapping in fields.scopes:
        if prefix not in ("dflash_config.", "dspark_config."):
            continue
        for name, value in mapping.items():
            key = prefix + name
            if value is not None and key not in fields.used and not _TRAINING.fullmatch(name):
                fields.note(f"{key} = {short(value)} is not a key we know: ignored")
