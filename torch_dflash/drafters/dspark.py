"""DSpark: a DFlash backbone with a Markov chain over the block and a confidence head."""

from typing import Final

from torch import Tensor

from .. import ops
from ..decoding.sampling import SamplingRows
from ..nn import QuantEmbedding, QuantLinear
from .base import Drafted, register
from .checkpoint_tensors import Tensors
from .dflash import DFlash

__all__ = ["DSpark"]

# markov_head_type -> ops.markov_chain's head_type, and the matrix in front of w2
_HEADS: Final[dict[str | None, tuple[int, str | None]]] = {
    "vanilla": (0, None),
    "gated": (1, "markov_head.gate_proj"),
    "rnn": (2, "markov_head.joint_proj"),
}


@register("dspark")
class DSpark(DFlash):
    """DSpark drafter with a vanilla, gated or recurrent Markov head: the arguments are DFlash's."""

    confidence_weight: Tensor | None
    confidence_bias: Tensor | None

    def _load(self, t: Tensors) -> None:
        self.w1 = QuantEmbedding(t.weight("markov_head.markov_w1.weight"))
        self.w2 = QuantLinear([t.weight("markov_head.markov_w2.weight")])
        self.head_type, name = _HEADS[self.config.markov_head_type]
        self.joint = None
        if name is not None:
            self.joint = QuantLinear([t.weight(f"{name}.weight")], t.bias(f"{name}.bias"))
        weight = t.optional_floats("confidence_head.proj.weight")
        self.register_buffer(
            "confidence_weight", None if weight is None else weight.reshape(-1), persistent=False
        )
        bias = t.optional_floats("confidence_head.proj.bias")
        self.register_buffer("confidence_bias", bias, persistent=False)

    @property
    def _draws_by_operators(self) -> bool:
        return True

    def _drawn(
        self, hidden: Tensor, anchor: Tensor, request: SamplingRows, uniforms: Tensor
    ) -> Drafted:
        """Each token conditions the next through the Markov table."""
        tokens, q, confidence = self._chain(
            hidden, anchor, request.temperature(1), uniforms.view(1, -1)
        )
        return Drafted(tokens, q, confidence=self._scored(confidence))

    def _best(self, hidden: Tensor, anchor: Tensor) -> Drafted:
        tokens, _, confidence = self._chain(hidden, anchor, None, None)
        return Drafted(tokens, confidence=self._scored(confidence))

    def _scored(self, confidence: Tensor) -> Tensor | None:
        return None if self.confidence_weight is None else confidence

    def _chain(
        self, hidden: Tensor, anchor: Tensor, temperature: Tensor | None, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return ops.markov_chain(
            self.head(hidden)[None],
            hidden[None],
            anchor,
            self.w1.packed,
            self.w1.ggml_type,
            self.w2.weight,
            self.w2.types[0],
            self.confidence_weight,
            self.confidence_bias,
            self.config.logit_scale,
            self.d2t,
            temperature,
            uniforms,
            head_type=self.head_type,
            joint=None if self.joint is None else self.joint.weight,
            joint_type=0 if self.joint is None else self.joint.types[0],
            joint_bias=None if self.joint is None else self.joint.bias,
        )
