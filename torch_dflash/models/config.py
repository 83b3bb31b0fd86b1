"""What a native target is, as plain numbers: the hybrid ``qwen35`` and the dense models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..drafters.rope import RopeConfig
from ..fields import describe

__all__ = ["DenseConfig", "LayerKind", "Qwen35Config", "TargetConfig"]

LayerKind = Literal["gdn", "full"]


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What every native target has.

    Attributes:
        arch: ``general.architecture`` of the file.
        hidden_size, intermediate_size: widths.
        num_layers: decoder layers that run; NextN (multi-token prediction) blocks not counted.
        num_heads, num_kv_heads, head_dim: attention.
        vocab_size: tokens, and rows of the embedding.
        context_length: what the model was trained for.
        rms_norm_eps: of every norm.
        rope: rotary embedding.
        tied: the head is the embedding.
        fused_qkv: layers whose attention has one ``attn_qkv`` tensor instead of three.
        sources: field -> where its value came from: a key, a tensor, or a rule.
        notes: decisions worth knowing, one line each.
    """

    arch: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool
    fused_qkv: tuple[int, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def q_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def describe(self) -> list[tuple[str, Any, str]]:
        """``(field, value, source)`` of every field, for people; the rope is spread out."""
        return describe(self, self.sources)


@dataclass(frozen=True, kw_only=True)
class DenseConfig(TargetConfig):
    """A decoder of attention layers only: Qwen3 and Llama types.

    Attributes:
        rope_is_neox: False: rows of q and k lie interleaved in the file (``llama``); see
            :func:`~torch_dflash.models.rows.neox_qk`.
        qk_norm: q and k heads are normalised (``qwen3``).
        attention_bias: q, k and v have biases.
        output_bias: so has the output projection.
        rope_freqs: the file holds one divisor per frequency, part of ``rope`` once it is read.
    """

    rope_is_neox: bool
    qk_norm: bool
    attention_bias: bool = False
    output_bias: bool = False
    rope_freqs: bool = False

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer: all full attention."""
        full: LayerKind = "full"
        return (full,) * self.num_layers


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(TargetConfig):
    """A hybrid of Gated DeltaNet and full attention with an output gate (Qwen3.5, 3.6, 3.8).

    V heads are in the tiled order of GGUF files: V head ``j`` goes with K head
    ``j % num_key_heads``.

    Attributes:
        layer_kinds: ``gdn`` or ``full`` per layer.
        num_nextn_layers: NextN blocks in the file, which are skipped.
        rope_sections: M-RoPE sections; text uses one position for all, so they do not matter here.
        conv_kernel: taps of the causal convolution.
        num_key_heads, key_head_dim: of the Gated DeltaNet.
        num_value_heads, value_head_dim: of the Gated DeltaNet.
    """

    layer_kinds: tuple[LayerKind, ...]
    num_nextn_layers: int
    rope_sections: tuple[int, ...]
    conv_kernel: int
    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int

    @property
    def key_size(self) -> int:
        """Width of all K (or Q) heads of a Gated DeltaNet layer."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of all V heads of a Gated DeltaNet layer."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size
