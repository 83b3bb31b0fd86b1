"""Where a rope is written: Hugging Face ``rope_parameters`` and GGUF ``rope.*`` keys."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..fields import Fields, short
from .rope import RopeConfig, RopeType, magnitude

__all__ = ["rope_from_gguf", "rope_from_hf"]

# Names that mean plain rope for text: a drafter sees the temporal position only.
_DEFAULT_NAMES = ("default", "none", "mrope")
_KNOWN = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
}


def rope_from_hf(fields: Fields, head_dim: int, layer_types: Sequence[str] = ()) -> RopeConfig:
    """Resolve ``rope_parameters``, flat or keyed by layer type, or ``rope_scaling`` and theta.

    Args:
        fields: the config; sources are recorded under ``rope.*``.
        head_dim: dimensions of a head.
        layer_types: the layer types in use; where the parameters are keyed by layer type, all of
            them must have the same, because a drafter has one rope.

    Raises:
        CheckpointError: no theta, an unknown rope type, or a value out of range.
    """
    key, params = _hf_parameters(fields, layer_types)
    inner = Fields(fields.where, [(f"{key}.", params)])
    outer = Fields(fields.where, [(f"{key}.", params), *fields.scopes])
    for name in params:
        if name not in _KNOWN:
            fields.note(
                f"{key}.{name} = {short(params[name])} is not a rope parameter we know: ignored"
            )

    theta = outer.optional(float, "rope.theta", "rope_theta")
    if theta is None:
        fields.missing(
            ("rope_parameters.rope_theta", "rope_theta"),
            "a guess would cost acceptance silently: copy it from the original config",
        )
    kind = _rope_type(inner, inner.optional(str, "rope.type", "rope_type", "type"))
    part = outer.optional(float, "rope.rotary_dim", "partial_rotary_factor", low=0, high=1)
    scaled: dict[str, Any] = {}
    if kind != "default":
        scaled = _hf_scaling(kind, key, inner, outer)
    for reader in (outer, inner):
        fields.sources.update(reader.sources)
        fields.used |= reader.used
        for line in reader.notes:
            fields.note(line)
    rotary_dim = head_dim if part is None else int(head_dim * part)
    return _build(fields, key, theta=theta, rotary_dim=rotary_dim, type=kind, **scaled)


def _hf_scaling(kind: RopeType, key: str, inner: Fields, outer: Fields) -> dict[str, Any]:
    def number(name: str) -> float | None:
        return inner.optional(float, f"rope.{name}", name)

    factor = number("factor")
    if kind == "linear":
        if factor is None:
            inner.fail(f"{key}.factor must be present for rope type 'linear', got nothing")
        return {"factor": factor}
    field = "rope.original_max_position_embeddings"
    # transformers fills the original length in with the model's own when it is absent
    names = "original_max_position_embeddings", "max_position_embeddings"
    original = outer.optional(int, field, names[0], low=1)
    longest = Fields(outer.where, outer.scopes).optional(int, field, names[1], low=1)
    if original is None:
        original, outer.sources[field] = longest, names[1]
    if factor is None:
        if longest is None or original is None:
            inner.fail(f"{key}.factor must be present for rope type 'yarn', got nothing")
        factor = longest / original
        outer.sources["rope.factor"] = " / ".join(reversed(names))
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": number("beta_fast") or 32.0,  # transformers: 0 means the default as well
        "beta_slow": number("beta_slow") or 1.0,
        "attention_factor": number("attention_factor"),
        "mscale": number("mscale"),
        "mscale_all_dim": number("mscale_all_dim"),
        "truncate": inner.require(bool, "rope.truncate", "truncate", default=True),
    }


def _hf_parameters(fields: Fields, layer_types: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    hits = fields.found("rope_parameters", "rope_scaling")
    if not hits:
        return "rope_scaling", {}
    key, params = hits[0]
    for other, ignored in hits[1:]:
        fields.note(f"rope: {key} wins over {other} = {short(ignored)}")
    if not isinstance(params, Mapping):
        fields.fail(f"{key} must be a mapping, got {short(params)}")
    keyed = {k: v for k, v in params.items() if isinstance(v, Mapping)}
    if not keyed:
        return key, params
    used = sorted(set(layer_types)) or sorted(keyed)
    for name in used:
        if name not in keyed:
            fields.fail(f"{key} must have an entry for layer type {name!r}, got {sorted(keyed)}")
    first = keyed[used[0]]
    for name in used[1:]:
        if keyed[name] != first:
            fields.fail(
                f"{key} must be the same for every layer type, got {short(first)} for {used[0]!r} "
                f"and {short(keyed[name])} for {name!r}"
            )
    return f"{key}.{used[0]}", first


def rope_from_gguf(
    fields: Fields, arch: str, head_dim: int, default_theta: float | None = None
) -> RopeConfig:
    """Resolve ``<arch>.rope.*``.

    The magnitude follows what llama.cpp computes: ``(0.1 ln f + 1) * attn_factor``. A file without
    ``attn_factor`` but with a ``yarn_attn_factor`` other than 1 states the Hugging Face
    ``attention_factor`` (llama.cpp ignores it). Betas are honoured when present.

    Args:
        fields: the metadata; sources are recorded under ``rope.*``.
        arch: prefix of the keys.
        head_dim: dimensions of a head; all rotate unless ``rope.dimension_count`` says less.
        default_theta: for architectures whose files may leave the base out; None: an error.

    Raises:
        CheckpointError: no base, an unknown scaling type, or a value out of range.
    """
    at = f"{arch}.rope."

    def number(name: str, *keys: str) -> float | None:
        return fields.optional(float, f"rope.{name}", *(at + k for k in keys or (name,)))

    theta = number("theta", "freq_base")
    if theta is None and default_theta is None:
        fields.missing((at + "freq_base",), "pass rope= with the base of the original checkpoint")
    if theta is None:
        fields.sources["rope.theta"] = f"default of {arch}"
    rotary = fields.optional(int, "rope.rotary_dim", at + "dimension_count", low=2, high=head_dim)
    kind_key = at + "scaling.type"
    text = fields.optional(str, "rope.type", kind_key)
    factor = number("factor", "scaling.factor", "scale_linear") or None  # 0 is "unset" in ggml
    # ggml's default type is linear, which only matters once there is a factor
    kind = _rope_type(fields, text if text is not None or factor is None else "linear")
    yarn: dict[str, Any] = {}
    if kind == "yarn":
        yarn = _gguf_yarn(fields, arch, factor)
    if kind == "default" and factor not in (None, 1.0):
        fields.fail(f"{at}scaling.factor must be absent or 1 for {kind_key} {text!r}, got {factor}")
    return _build(
        fields,
        f"{arch}.rope",
        theta=theta if theta is not None else default_theta,
        rotary_dim=head_dim if rotary is None else rotary,
        type=kind,
        factor=factor or 1.0,
        **yarn,
    )


def _gguf_yarn(fields: Fields, arch: str, factor: float | None) -> dict[str, Any]:
    at = f"{arch}.rope.scaling."

    def number(name: str, *keys: str) -> float | None:
        return fields.optional(float, f"rope.{name}", *(at + k for k in keys))

    if factor is None:
        fields.fail(f"{at}factor must be present for scaling type 'yarn', got nothing")
    field = "rope.original_max_position_embeddings"
    original = fields.optional(int, field, at + "original_context_length", low=1)
    if original is None:
        original = fields.optional(int, field, f"{arch}.context_length", low=1)
    extrapolation = number("ext_factor", "yarn_ext_factor")
    if extrapolation not in (None, 1.0, -1.0):  # -1 is llama.cpp's "take the default"
        fields.fail(f"{at}yarn_ext_factor must be absent or 1, got {extrapolation}")
    scale = number("attention_factor", "attn_factor")
    explicit = None
    if scale:
        explicit = magnitude(factor) * scale
    elif (plain := number("attention_factor", "yarn_attn_factor")) not in (None, 0.0, 1.0):
        explicit = plain
    return {
        "original_max_position_embeddings": original,
        "beta_fast": number("beta_fast", "yarn_beta_fast") or 32.0,
        "beta_slow": number("beta_slow", "yarn_beta_slow") or 1.0,
        "attention_factor": explicit,
        "truncate": fields.require(bool, "rope.truncate", at + "truncate", default=True),
    }


def _rope_type(fields: Fields, text: str | None) -> RopeType:
    kind = (text or "default").lower()
    if kind in _DEFAULT_NAMES:
        return "default"
    if kind not in ("linear", "yarn"):
        fields.fail(f"{fields.sources['rope.type']} must be default, linear or yarn, got {text!r}")
    return cast(RopeType, kind)


def _build(fields: Fields, key: str, **values: Any) -> RopeConfig:
    try:
        return RopeConfig(**values)
    except ValueError as e:
        fields.fail(f"{key}: {str(e).removeprefix('RopeConfig: ')}")
