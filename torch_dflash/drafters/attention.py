"""Which keys each drafter layer sees: windows and causality."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..fields import Fields

__all__ = ["LayerAttention", "attention_from_gguf", "attention_from_hf", "layer_types"]

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

# Defaults of transformers' Qwen3 config class, which published configs rely on.
_WINDOW: Final = 4096
_MAX_WINDOW_LAYERS: Final = 28


@dataclass(frozen=True)
class LayerAttention:
    """Mask of one layer: row ``q`` sees key ``k`` iff all of this holds.

    Attributes:
        window: ``q - k < window``, and ``k - q < window`` where not causal; None: no limit.
        causal: ``k <= q`` inside the block (the context is always in the past).
    """

    window: int | None
    causal: bool


def layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    """``layer_types`` as transformers would fill them in; None where it would say all full.

    Raises:
        CheckpointError: an unknown type or a list of the wrong length.
    """
    value = fields.raw("layers", "layer_types")
    if value is None:
        first = fields.require(
            int, "max_window_layers", "max_window_layers", default=_MAX_WINDOW_LAYERS, low=0
        )
        fields.sources.pop("max_window_layers")
        if first >= num_layers or not fields.optional(bool, "layers", "use_sliding_window"):
            return None
        fields.note(f"layers: use_sliding_window without layer_types: layers {first}.. slide")
        return [FULL if i < first else SLIDING for i in range(num_layers)]
    types = fields.items(str, "layer_types", value, num_layers)
    for i, name in enumerate(types):
        if name not in (FULL, SLIDING):
            fields.fail(f"layer_types[{i}] must be {FULL!r} or {SLIDING!r}, got {name!r}")
    return types


def attention_from_hf(
    fields: Fields, num_layers: int, speculators: bool
) -> tuple[LayerAttention, ...]:
    """Resolve windows and causality of a Hugging Face config.

    Causality, first that is set: ``is_causal`` (every layer); ``dflash_config.causal`` (every
    layer); in speculators files, sliding layers by ``sliding_window_non_causal`` and full layers
    never; else the legacy rule: layers that ``layer_types`` declares sliding are causal.

    Args:
        fields: the config.
        num_layers: of the drafter.
        speculators: whether this is the speculators layout.

    Raises:
        CheckpointError: a sliding layer without a window, or a value of the wrong kind.
    """
    types = layer_types(fields, num_layers)
    declared = [t == SLIDING for t in types or [FULL] * num_layers]
    sliding = declared
    # use_swa turns every layer into a sliding one, but only if none is declared so
    if fields.optional(bool, "layers", "use_swa") and not any(declared):
        sliding = [True] * num_layers
    window = _hf_window(fields) if any(sliding) else None

    explicit = fields.optional(bool, "causality", "is_causal")
    if explicit is None:
        explicit = fields.optional(bool, "causality", "causal")
    if explicit is not None:
        causal = [explicit] * num_layers
    elif speculators:
        free = fields.optional(bool, "causality", "sliding_window_non_causal")
        causal = [s and free is False for s in sliding]
        fields.sources.setdefault("causality", "default of speculators")
    else:
        causal = declared
        fields.sources["causality"] = "default"
        if any(declared):
            fields.sources["causality"] = "legacy rule (declared sliding layers are causal)"
            fields.note(f"layers: neither is_causal nor causal is set, {_which(causal)} causal")
    _join_sources(fields)
    return _layers(sliding, window, causal)


def _hf_window(fields: Fields) -> int:
    window = fields.optional(int, "window", "swa_window_size", "sliding_window", low=1)
    use = fields.optional(bool, "use", "use_sliding_window")
    fields.sources.pop("use", None)
    if window is None and use:
        fields.note(f"layers: use_sliding_window without sliding_window, window {_WINDOW}")
        fields.sources["window"] = "default"
        window = _WINDOW
    if window is None:
        fields.fail(
            "sliding_window or dflash_config.swa_window_size must be present for sliding layers, "
            "got nothing"
        )
    if use is False:
        fields.note(
            f"layers: use_sliding_window is false but layers are sliding, window {window} is used"
        )
    return window


def attention_from_gguf(
    fields: Fields, arch: str, num_layers: int, selector: bool
) -> tuple[LayerAttention, ...]:
    """Resolve windows and causality of a GGUF drafter.

    ``attention.causal`` decides for every layer, then our own ``attention.causal_pattern``. Files
    without both follow whoever wrote them: a mixed pattern, or any pattern of a
    ``*-dflash-draft`` file without a candidate selector, means the legacy rule (sliding layers
    are causal); anything else is not causal.

    Args:
        fields: the metadata.
        arch: prefix of the keys.
        num_layers: of the drafter.
        selector: whether the file holds a candidate selector.

    Raises:
        CheckpointError: a window without a pattern, or a value of the wrong kind.
    """
    at = f"{arch}.attention."
    window = fields.optional(int, "window", at + "sliding_window", low=0) or None
    pattern = fields.raw("layers", at + "sliding_window_pattern", f"{arch}.layer_sliding")
    if window is not None and pattern is None:
        fields.fail(
            f"{at}sliding_window_pattern must say which layers have the window of {window}, "
            "got nothing"
        )
    sliding = [False] * num_layers
    if pattern is not None:
        sliding = _flags(fields, fields.sources["layers"], pattern, num_layers)
    if any(sliding) and window is None:
        fields.fail(f"{at}sliding_window must be present for sliding layers, got nothing")

    explicit = fields.optional(bool, "causality", at + "causal")
    rows = fields.raw("causality", at + "causal_pattern") if explicit is None else None
    if explicit is not None:
        causal = [explicit] * num_layers
    elif rows is not None:
        causal = _flags(fields, at + "causal_pattern", rows, num_layers)
    else:
        legacy = any(sliding) and (not all(sliding) or (arch != "dflash" and not selector))
        causal = sliding if legacy else [False] * num_layers
        fields.sources["causality"] = (
            "legacy rule (sliding layers are causal)" if legacy else "default: not causal"
        )
        if any(sliding):
            fields.note(f"layers: {at}causal is absent, {_which(causal)} causal; causal= overrides")
    _join_sources(fields)
    return _layers(sliding, window, causal)


def _join_sources(fields: Fields) -> None:
    """One line for ``layers``, which several keys decide."""
    parts = [fields.sources.get("layers", "default: all full")]
    if "window" in fields.sources:
        parts.append(f"window: {fields.sources.pop('window')}")
    parts.append(f"causal: {fields.sources.pop('causality')}")
    fields.sources["layers"] = ", ".join(parts)


def _flags(fields: Fields, key: str, value: object, length: int) -> list[bool]:
    """Booleans, which some writers store as integers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = [bool(v) if type(v) is int and v in (0, 1) else v for v in value]
    return fields.items(bool, key, value, length)


def _layers(
    sliding: list[bool], window: int | None, causal: list[bool]
) -> tuple[LayerAttention, ...]:
    return tuple(
        LayerAttention(window if s else None, c) for s, c in zip(sliding, causal, strict=True)
    )


def _which(causal: list[bool]) -> str:
    rows = [i for i, c in enumerate(causal) if c]
    return "no layer is" if not rows else f"layers {', '.join(map(str, rows))} are"
