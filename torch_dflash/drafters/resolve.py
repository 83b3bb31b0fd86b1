"""The part of config resolution that Hugging Face and GGUF files share: keys against tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from ..fields import Fields, shape_text
from .config import Confidence, DrafterConfig, Kind, MarkovHead
from .rope import RopeConfig
from .tensors import Shapes, check_tensors, layer_count

__all__ = ["Overrides", "Resolver"]

Keys = Mapping[str, tuple[str, ...]]

_BLOCK_SIZE: Final = 16  # what the first drafters had
_ACTIVATIONS: Final = {"silu": "silu", "swish": "silu"}


@dataclass(frozen=True)
class Overrides:
    """What a caller knows better than the file; None leaves it to the file.

    Attributes:
        mask_token_id: token of the rows behind the anchor.
        causal: causality of every layer.
        rope: the whole rotary embedding.
        num_target_layers: depth of the target.
        vocab_size: rows of the target's embedding; only used where the file does not say.
        fallback_mask_token_id: what ``mask_embedding.pt`` says; only used where the config does
            not.
    """

    mask_token_id: int | None = None
    causal: bool | None = None
    rope: RopeConfig | None = None
    num_target_layers: int | None = None
    vocab_size: int | None = None
    fallback_mask_token_id: int | None = None


class Resolver:
    """Collects the fields of a :class:`DrafterConfig` from keys and tensor shapes.

    Args:
        fields: reader of the file's keys.
        keys: field -> names of the keys that state it, best first.
        shapes: logical name -> shape; empty if only the config is at hand.
        kind: which drafter.
        overrides: what the caller knows better.
    """

    def __init__(
        self, fields: Fields, keys: Keys, shapes: Shapes, kind: Kind, overrides: Overrides
    ) -> None:
        """Start with nothing resolved; see the class."""
        self.fields = fields
        self.keys = keys
        self.shapes = shapes
        self.overrides = overrides
        self.values: dict[str, Any] = {"kind": kind}

    def dim(self, name: str, axis: int) -> int | None:
        """One dimension of a tensor; None if the file has no such tensor.

        Raises:
            CheckpointError: the tensor has too few dimensions, or one of size 0.
        """
        shape = self.shapes.get(name)
        if shape is None:
            return None
        if len(shape) <= axis or min(shape) < 1:
            self.fields.fail(f"tensor {name!r} must have {axis + 1} dimensions, got {[*shape]}")
        return shape[axis]

    def integer(self, field: str, tensor: str = "", from_tensor: int | None = None) -> int:
        """A positive integer that keys, a tensor or both state."""
        value = self.fields.optional(int, field, *self.keys[field], low=1)
        value = self.fields.agree(field, value, from_tensor, tensor)
        if value is None:
            self.fields.missing(self.keys[field])
        self.values[field] = value
        return value

    def number(self, field: str, default: float) -> float:
        """A factor above 0."""
        value = self.fields.optional(float, field, *self.keys[field])
        if value is not None and value <= 0:
            self.fields.fail(f"{self.fields.sources[field]} must be above 0, got {value}")
        if value is None:
            self.fields.sources[field] = "default"
        self.values[field] = default if value is None else value
        return cast(float, self.values[field])

    def backbone(self) -> None:
        """Dimensions of the transformer."""
        f, v = self.fields, self.values
        layers = layer_count(self.shapes)
        if layers > len(self.shapes):
            f.fail(f"tensors must not skip layers, got layer {layers - 1} among {len(self.shapes)}")
        stated = f.optional(int, "num_layers", *self.keys["num_layers"], low=1)
        if layers and stated not in (None, layers):
            f.note(f"num_layers: {f.sources['num_layers']} says {stated}, the tensors {layers}")
        if layers:
            f.sources["num_layers"] = "tensors"
        if not layers and stated is None:
            f.missing(self.keys["num_layers"])
        v["num_layers"] = layers or stated

        self.integer("hidden_size", "norm.weight", self.dim("norm.weight", 0))
        gate = "layers.0.mlp.gate_proj.weight"
        self.integer("intermediate_size", gate, self.dim(gate, 0))
        norm = "layers.0.self_attn.q_norm.weight"
        head_dim = self.integer("head_dim", norm, self.dim(norm, 0))
        if head_dim % 2:
            f.fail(f"head_dim must be even, got {head_dim}")
        for field, letter in (("num_heads", "q"), ("num_kv_heads", "k")):
            name = f"layers.0.self_attn.{letter}_proj.weight"
            rows = self.dim(name, 0)
            if rows is not None and rows % head_dim:
                f.fail(f"tensor {name!r} must have a multiple of {head_dim} rows, got {rows}")
            self.integer(field, name, None if rows is None else rows // head_dim)
        if v["num_heads"] % v["num_kv_heads"]:
            f.fail(f"{v['num_heads']} heads must share {v['num_kv_heads']} kv heads evenly")
        self._flag("attention_bias", "layers.0.self_attn.q_proj.bias")
        self._flag("attention_sinks", "layers.0.self_attn.attention_sink_bias")
        act = f.require(str, "hidden_act", *self.keys["hidden_act"], default="silu")
        if act not in _ACTIVATIONS:
            f.fail(
                f"{f.sources['hidden_act']} must be silu, got {act!r}: this drafter (Gemma 4 "
                "DSpark has gelu) is not supported"
            )
        v["hidden_act"] = _ACTIVATIONS[act]

    def _flag(self, field: str, tensor: str) -> None:
        """A flag that says tensors are there; the tensors decide, but a promise must be kept."""
        stated = self.fields.optional(bool, field, *self.keys[field])
        if not self.shapes:
            self.values[field] = bool(stated)
            return
        if stated and tensor not in self.shapes:
            self.fields.fail(
                f"{self.fields.sources[field]} is true, so tensor {tensor!r} must be there, "
                "got a file without it"
            )
        self.values[field] = tensor in self.shapes
        if tensor in self.shapes and not stated:
            self.fields.sources[field] = f"tensor {tensor}"

    def vocabulary(self) -> None:
        """Target and draft vocabulary, and the mask token."""
        f, v = self.fields, self.values
        if self.overrides.vocab_size is not None and not f.found(*self.keys["vocab_size"]):
            f.sources["vocab_size"] = "the target's vocabulary"
            v["vocab_size"] = self.overrides.vocab_size
        stated = f.optional(int, "vocab_size", *self.keys["vocab_size"], low=1)
        if stated is None:
            stated = v.get("vocab_size")
        for name in (
            "embed_tokens.weight",
            "candidate_selector.predecessor_codebook",
            "candidate_selector.successor_codebook",
            "markov_head.markov_w1.weight",
        ):
            stated = f.agree("vocab_size", stated, self.dim(name, 0), name)
        if stated is None:
            f.missing(self.keys["vocab_size"], "pass the target, or vocab_size=")
        draft = f.optional(int, "draft_vocab_size", *self.keys["draft_vocab_size"], low=1)
        for name in ("lm_head.weight", "markov_head.markov_w2.weight", "d2t"):
            draft = f.agree("draft_vocab_size", draft, self.dim(name, 0), name)
        if draft is None:
            draft, f.sources["draft_vocab_size"] = stated, "default"
        if draft > stated:
            f.fail(f"draft_vocab_size must be at most vocab_size {stated}, got {draft}")
        v["vocab_size"], v["draft_vocab_size"] = stated, draft

        mask = f.optional(int, "mask_token_id", *self.keys["mask_token_id"])
        if self.overrides.mask_token_id is not None:
            mask, f.sources["mask_token_id"] = self.overrides.mask_token_id, "override"
        if mask is None and self.overrides.fallback_mask_token_id is not None:
            mask = self.overrides.fallback_mask_token_id
            f.sources["mask_token_id"] = "mask_embedding.pt"
        if mask is None:
            text = f.found("mask_token")
            hint = f" (mask_token {text[0][1]!r} names it)" if text else ""
            f.missing(
                self.keys["mask_token_id"],
                f"look the mask token up in the target's tokenizer{hint} and pass mask_token_id=",
            )
        if not 0 <= mask < stated:
            source = f.sources["mask_token_id"]
            given = "the mask_token_id given" if source == "override" else source
            f.fail(f"{given} must be a token of the vocabulary of {stated}, got {mask}")
        v["mask_token_id"] = mask

    def selector(self, default_top_k: int | None) -> None:
        """DFlash2's convolution and candidate selector."""
        f, v = self.fields, self.values
        hidden, block = v["hidden_size"], v["block_size"]
        base = "layers.0.attention_conv.base_kernel"
        taps = self.integer("conv_kernel_size", base, self.dim(base, 1))
        if taps > block:
            f.fail(
                f"{f.sources['conv_kernel_size']} must be at most the block size {block}, "
                f"got {taps}"
            )
        projection = "layers.0.attention_conv.kernel_projection.weight"
        rows, group = self.dim(projection, 0), None
        if rows is not None:
            if rows % (2 * taps) or hidden % (rows // (2 * taps) or 1):
                f.fail(
                    f"tensor {projection!r} must have 2 * {taps} taps * groups rows with groups "
                    f"dividing {hidden}, got {rows}"
                )
            group = hidden // (rows // (2 * taps))
        group = self.integer("conv_group_size", projection, group)
        if hidden % group:
            f.fail(
                f"{f.sources['conv_group_size']} must divide the hidden size {hidden}, got {group}"
            )
        codebook = "candidate_selector.predecessor_codebook"
        self.integer("selector_rank", codebook, self.dim(codebook, 1))
        if default_top_k is not None and not f.found(*self.keys["selector_top_k"]):
            f.note(f"selector_top_k: the file does not say, {default_top_k} is assumed")
            f.sources["selector_top_k"] = "default"
            v["selector_top_k"] = default_top_k
        else:
            self.integer("selector_top_k")
        if v["selector_top_k"] > v["draft_vocab_size"]:
            f.fail(
                f"{f.sources['selector_top_k']} must be at most the vocabulary of "
                f"{v['draft_vocab_size']}, got {v['selector_top_k']}"
            )

    def markov(self) -> None:
        """DSpark's Markov and confidence heads."""
        f, v = self.fields, self.values
        stated = f.optional(int, "markov_rank", *self.keys["markov_rank"], low=1)
        w1 = "markov_head.markov_w1.weight"
        rank = self.dim(w1, 1)
        if rank is not None:
            if stated not in (None, rank):
                f.note(f"markov_rank: {f.sources['markov_rank']} says {stated}, {w1} {rank}")
            f.sources["markov_rank"] = f"shape of {w1}"
        elif stated is None:
            f.missing(self.keys["markov_rank"])
        v["markov_rank"] = rank or stated

        head = f.optional(str, "markov_head_type", *self.keys["markov_head_type"])
        inferred = None
        for name, tensor in (("gated", "gate_proj"), ("rnn", "joint_proj")):
            if f"markov_head.{tensor}.weight" in self.shapes:
                inferred = f.agree("markov_head_type", head, name, f"markov_head.{tensor}.weight")
        if (inferred or head or "vanilla") not in ("vanilla", "gated", "rnn"):
            f.fail(f"{f.sources['markov_head_type']} must be vanilla, gated or rnn, got {head!r}")
        v["markov_head_type"] = cast(MarkovHead, inferred or head or "vanilla")
        v["confidence"] = self._confidence()

    def _confidence(self) -> Confidence | None:
        f, v = self.fields, self.values
        enabled = f.optional(bool, "confidence", *self.keys["confidence"])
        wide = f.optional(bool, "confidence", *self.keys["confidence_with_markov"])
        name = "confidence_head.proj.weight"
        if not self.shapes:
            if not enabled:
                return None
            return "hidden" if wide is False else "hidden+markov"
        shape = self.shapes.get(name)
        if shape is None:
            if enabled:
                f.fail(f"a confidence head is promised, so tensor {name!r} must be there")
            return None
        if enabled is False:
            f.note(f"confidence: the config says there is no head, tensor {name} is used")
        hidden, rank = v["hidden_size"], v["markov_rank"]
        widths: dict[int, Confidence] = {hidden: "hidden", hidden + rank: "hidden+markov"}
        if tuple(shape) not in [(1, w) for w in widths]:
            f.fail(
                f"tensor {name!r} must be [1, {hidden}] or [1, {hidden + rank}], "
                f"got {shape_text(shape)}"
            )
        found = widths[shape[1]]
        if wide is not None and wide != (found == "hidden+markov"):
            f.fail(
                f"{f.sources['confidence']} must agree with tensor {name}, got {wide} and "
                f"{shape_text(shape)}"
            )
        f.sources["confidence"] = f"shape of {name}"
        return found

    def block_size(self) -> None:
        """Rows of a full block."""
        f = self.fields
        size = f.optional(int, "block_size", *self.keys["block_size"], low=1)
        if size is None:
            size, f.sources["block_size"] = _BLOCK_SIZE, "default"
            f.note(f"block_size: the file does not say, {size} is assumed")
        self.values["block_size"] = size

    def context_length(self) -> None:
        """Positions the drafter was trained for, if the file says."""
        field = "context_length"
        self.values[field] = self.fields.optional(int, field, *self.keys[field], low=1)
        self.fields.sources.setdefault(field, "not in the file")

    def build(self, tensors_in: str) -> DrafterConfig:
        """The config, checked against every tensor if there are any."""
        config = DrafterConfig(
            **self.values, sources=dict(self.fields.sources), notes=tuple(self.fields.notes)
        )
        if self.shapes:
            check_tensors(config, self.shapes, tensors_in)
        return config
