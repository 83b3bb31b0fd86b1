"""DFlash2: DFlash with grouped dynamic convolutions and a candidate selector."""

import torch
from torch import Tensor

from .. import ops
from ..decoding.kv_cache import KVCache, Rows
from ..decoding.sampling import SamplingRows
from ..nn import QuantEmbedding, QuantLinear, RMSNorm
from .base import Drafted, register
from .checkpoint_tensors import Tensors
from .config import DrafterConfig
from .dflash import DFlash, Layer

__all__ = ["DFlash2"]

PREPARE, FINISH = 0, 1  # the two sides of a convolution: the sublayer's input, its output


class ConvLayer(Layer):
    """A DFlash layer whose sublayers are wrapped in convolutions along the block."""

    attention_base: Tensor
    mlp_base: Tensor

    def __init__(self, config: DrafterConfig, index: int, t: Tensors) -> None:
        super().__init__(config, index, t)
        self.attention_proj = QuantLinear([t.weight("attention_conv.kernel_projection.weight")])
        self.mlp_proj = QuantLinear([t.weight("mlp_conv.kernel_projection.weight")])
        for name in ("attention", "mlp"):
            base = t.floats(f"{name}_conv.base_kernel")
            self.register_buffer(f"{name}_base", base, persistent=False)
        # The convolution reads the normed row itself, so the norms stay in float32.
        self.attention_norm = RMSNorm(self.attention_norm.weight, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(self.mlp_norm.weight, config.rms_norm_eps)

    def attend(self, y: Tensor | None, residual: Tensor, block: Rows, cache: KVCache) -> Tensor:
        """Add ``y`` to the residual; convolution, attention, convolution."""
        u = self.attention_norm(y, residual)
        coef = self.attention_proj.from_float(u)
        base, cu, mode = self.attention_base, block.cu_seqlens, self.attention.qkv.act_mode
        u = ops.grouped_conv(u, coef, base, PREPARE, cu, mode)
        y = self.attention(u, block.positions, cache, self.index, block)
        return ops.grouped_conv(y, coef, base, FINISH, cu, 0)

    def feed_forward(self, y: Tensor, residual: Tensor, block: Rows) -> Tensor:
        """Add ``y`` to the residual; convolution, FFN, convolution."""
        u = self.mlp_norm(y, residual)
        coef = self.mlp_proj.from_float(u)
        base, cu = self.mlp_base, block.cu_seqlens
        u = ops.grouped_conv(u, coef, base, PREPARE, cu, self.glu.act_mode)
        return ops.grouped_conv(self.down(self.glu(u)), coef, base, FINISH, cu, 0)


@register("dflash2")
class DFlash2(DFlash):
    """DFlash2 drafter: the arguments are DFlash's."""

    zeros: Tensor
    layer_class = ConvLayer

    def _load(self, t: Tensors) -> None:
        selector = t.scope("candidate_selector.")
        self.predecessor = QuantEmbedding(selector.weight("predecessor_codebook"))
        self.successor = QuantEmbedding(selector.weight("successor_codebook"))
        self.hidden_projection = QuantLinear([selector.weight("hidden_projection.weight")])
        zeros = torch.zeros(self.config.block_size, dtype=torch.float32, device="cpu")
        self.register_buffer("zeros", zeros, persistent=False)

    @property
    def _draws_by_operators(self) -> bool:
        return True

    def _drawn(
        self, hidden: Tensor, anchor: Tensor, request: SamplingRows, uniforms: Tensor
    ) -> Drafted:
        """The path through the top-k candidates of each row, drawn candidate by candidate."""
        tokens, q, ids = self._walk(hidden, anchor, request.temperature(1), uniforms.view(1, -1))
        return Drafted(tokens, q, ids[None])

    def _best(self, hidden: Tensor, anchor: Tensor) -> Drafted:
        uniforms = self.zeros[: hidden.shape[0]].view(1, -1)
        return Drafted(self._walk(hidden, anchor, self.zeros[:1], uniforms)[0])

    def _walk(
        self, hidden: Tensor, anchor: Tensor, temperature: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The path, q and the candidates' ids, int64 ``[rows, k]``."""
        c = self.config
        assert c.selector_top_k is not None
        scores, ids = ops.head_topk(
            self.head(hidden), c.selector_top_k, c.output_multiplier, c.final_logit_softcapping
        )
        ids = self._target_ids(ids)
        return *ops.selector_walk(
            ids[None],
            scores[None],
            self.hidden_projection.from_float(hidden)[None],
            anchor,
            self.predecessor.packed,
            self.predecessor.ggml_type,
            self.successor.packed,
            self.successor.ggml_type,
            temperature,
            uniforms,
        ), ids
