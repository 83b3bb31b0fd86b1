"""What a drafter is, as plain numbers: one dataclass for DFlash, DFlash2 and DSpark."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..fields import CheckpointError, describe
from .attention import LayerAttention
from .rope import RopeConfig

__all__ = ["DrafterConfig", "Kind", "TargetShape", "check_against_target"]

Kind = Literal["dflash", "dflash2", "dspark"]
MarkovHead = Literal["vanilla", "gated", "rnn"]
Confidence = Literal["hidden", "hidden+markov"]


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything about a drafter that is not a weight.

    Attributes:
        kind: which drafter.
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: backbone.
        target_hidden_size: width of one captured target layer.
        vocab_size: target vocabulary: rows of embedding, codebooks and Markov table.
        draft_vocab_size: tokens the head scores; less than ``vocab_size`` with a ``d2t`` table.
        rms_norm_eps: of every norm.
        hidden_act: of the FFN; ``silu`` is what runs.
        attention_bias: q, k, v and o have biases.
        rope: rotary embedding of context and block.
        rope_is_neox: whether q and k rows are in NeoX order. Loading a checkpoint puts them so.
        block_size: rows of a full block. See ``max_draft_tokens``.
        mask_token_id: token of every row but the anchor's.
        target_layer_ids: captured layers in the order of the columns of ``fc``; id ``i`` is the
            output of decoder layer ``i`` before the final norm.
        num_target_layers: depth of the target, None if the file does not say.
        context_length: positions it was trained for, None if the file does not say.
        layers: mask of each layer.
        attention_sinks: each head has a sink logit.
        value_scale: factor on V.
        use_aux_hidden_state: False: no ``fc``, the context is the captured hidden state itself.
        sample_from_anchor: DSpark: row 0 (the anchor's) already predicts a token.
        conv_kernel_size, conv_group_size: DFlash2's grouped convolution, else None.
        selector_rank, selector_top_k: DFlash2's candidate selector, else None.
        output_multiplier: factor on the head's logits before the soft cap (DFlash, DFlash2).
        final_logit_softcapping: 0 is off.
        input_embedding_scale: factor on raw embedding rows.
        logit_scale: factor on head and Markov logits (DSpark).
        markov_rank, markov_head_type: DSpark, else None.
        confidence: what the confidence head reads; None: there is none.
        sources: field -> where its value came from: a key, a tensor's shape, or a rule.
        notes: decisions worth knowing, one line each.
    """

    kind: Kind
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    rope: RopeConfig
    rope_is_neox: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    layers: tuple[LayerAttention, ...]
    attention_sinks: bool
    value_scale: float
    use_aux_hidden_state: bool
    sample_from_anchor: bool
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    output_multiplier: float
    final_logit_softcapping: float
    input_embedding_scale: float
    logit_scale: float
    markov_rank: int | None = None
    markov_head_type: MarkovHead | None = None
    confidence: Confidence | None = None
    context_length: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens of a full block: every row but the anchor's, or every row."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def target_hidden_columns(self) -> int:
        """Columns of ``target_hidden``: all captured layers side by side."""
        return len(self.target_layer_ids) * self.target_hidden_size

    def describe(self) -> list[tuple[str, Any, str]]:
        """``(field, value, source)`` of every field, for people; the rope is spread out."""
        return describe(self, self.sources)


class TargetShape(Protocol):
    """What a drafter has to know about its target."""

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""


def check_against_target(config: DrafterConfig, target: TargetShape, where: str) -> None:
    """Check that a drafter was made for a target like this one.

    Args:
        config: of the drafter.
        target: config of the target.
        where: the drafter's file, for messages.

    Raises:
        CheckpointError: hidden size, vocabulary, depth, a layer id or the mask token does not fit;
            the message names all that do not.
    """
    wrong = []
    if config.target_hidden_size != target.hidden_size:
        wrong.append(f"hidden size {config.target_hidden_size}, target has {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        wrong.append(f"vocabulary {config.vocab_size}, target has {target.vocab_size}")
    if config.num_target_layers not in (None, target.num_layers):
        wrong.append(f"target depth {config.num_target_layers}, target has {target.num_layers}")
    if max(config.target_layer_ids) >= target.num_layers - 1:
        # the last layer's output is read before the final norm by some engines, after it by others
        wrong.append(
            f"target_layer_ids {[*config.target_layer_ids]}, the target's {target.num_layers} "
            f"layers allow 0..{target.num_layers - 2}"
        )
    if config.mask_token_id >= target.vocab_size:
        wrong.append(f"mask_token_id {config.mask_token_id}, target has {target.vocab_size} tokens")
    if wrong:
        raise CheckpointError(
            f"{where}: the drafter must match the target, got {'; '.join(wrong)}; "
            "use the drafter that was trained for this target"
        )
