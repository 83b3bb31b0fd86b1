"""DFlash: a block of mask tokens, denoised in one pass over the target's hidden states."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .. import ops
from ..decoding.graphs import StepGraphs
from ..decoding.kv_cache import KVCache, Rows
from ..decoding.proposal import Proposal
from ..decoding.sampling import SamplingParams, SamplingRows
from ..gguf.tensor import QuantTensor
from ..nn import Module, QuantEmbedding, QuantGLU, QuantLinear, RMSNorm, Vocabulary
from .base import Drafted, Drafter, register
from .checkpoint_tensors import Tensors
from .config import DrafterConfig

__all__ = ["DFlash"]

T = TypeVar("T")
DRAFT_STREAM = 1  # of ops.uniform: independent of the target's and of the acceptance's numbers


def _as_row(vector: QuantTensor) -> QuantTensor:
    """A vector as a table of one row."""
    return QuantTensor(vector.packed, vector.ggml_type, (1, vector.columns))


class Attention(Module):
    """Block attention over the context and the block itself."""

    inv_freq: Tensor
    q_norm: Tensor
    k_norm: Tensor
    sinks: Tensor | None

    def __init__(self, config: DrafterConfig, layer: int, t: Tensors) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.window = config.layers[layer].window or 0
        self.causal = config.layers[layer].causal
        self.value_scale = config.value_scale
        self.attention_scaling = config.rope.attention_scaling
        names = ("q_proj", "k_proj", "v_proj")
        self.qkv = QuantLinear(
            [t.weight(f"{n}.weight") for n in names], t.bias(*(f"{n}.bias" for n in names))
        )
        self.out = QuantLinear([t.weight("o_proj.weight")], t.bias("o_proj.bias"))
        self.register_buffer("inv_freq", config.rope.inv_freq(), persistent=False)
        self.register_buffer("q_norm", t.floats("q_norm.weight"), persistent=False)
        self.register_buffer("k_norm", t.floats("k_norm.weight"), persistent=False)
        sinks = t.optional_floats("attention_sink_bias")
        self.register_buffer("sinks", sinks, persistent=False)

    def _store(
        self, q: Tensor | None, kv: Tensor, positions: Tensor, cache: KVCache, layer: int
    ) -> Tensor:
        rows, columns = kv.shape[0], self.kv_heads * self.head_dim
        return ops.qk_norm_rope_store(
            None if q is None else q.view(rows, self.heads, self.head_dim),
            kv[:, :columns].view(rows, self.kv_heads, self.head_dim),
            kv[:, columns:].view(rows, self.kv_heads, self.head_dim),
            None if q is None else self.q_norm,
            self.k_norm,
            self.eps,
            False,
            positions,
            self.inv_freq,
            self.attention_scaling,
            [],
            positions,
            cache.k[layer],
            cache.v[layer],
        )

    def append(self, context: Tensor, positions: Tensor, cache: KVCache, layer: int) -> None:
        """Store K and V of context rows: no input norm, no convolution."""
        self._store(None, self.qkv.tail(context, 1), positions, cache, layer)

    def forward(
        self, u: Tensor, positions: Tensor, cache: KVCache, layer: int, block: Rows
    ) -> Tensor:
        """Attend; the block's own K and V are stored behind the context, and stay uncommitted."""
        columns = self.heads * self.head_dim
        qkv = self.qkv(u)
        q = self._store(qkv[:, :columns], qkv[:, columns:], positions, cache, layer)
        o = ops.block_attention(
            q,
            cache.k[layer],
            cache.v[layer],
            cache.page_table,
            block.lengths,
            block.cu_seqlens,
            self.scale,
            self.window,
            self.causal,
            self.sinks,
            None,
            self.value_scale,
            self.out.act_mode,
        )
        return self.out(o)


class Layer(Module):
    """Attention and FFN with pre-norms."""

    def __init__(self, config: DrafterConfig, index: int, t: Tensors) -> None:
        super().__init__()
        self.index = index
        self.attention = Attention(config, index, t.scope("self_attn."))
        mlp = t.scope("mlp.")
        self.down = QuantLinear([mlp.weight("down_proj.weight")])
        self.glu = QuantGLU(
            mlp.weight("gate_proj.weight"), mlp.weight("up_proj.weight"), self.down.act_mode
        )
        self.attention_norm = RMSNorm(
            t.floats("input_layernorm.weight"), config.rms_norm_eps, self.attention.qkv.act_mode
        )
        self.mlp_norm = RMSNorm(
            t.floats("post_attention_layernorm.weight"), config.rms_norm_eps, self.glu.act_mode
        )

    def attend(self, y: Tensor | None, residual: Tensor, block: Rows, cache: KVCache) -> Tensor:
        """Add ``y`` to the residual; the attention sublayer's output."""
        u = self.attention_norm(y, residual)
        return self.attention(u, block.positions, cache, self.index, block)

    def feed_forward(self, y: Tensor, residual: Tensor, block: Rows) -> Tensor:
        """Add ``y`` to the residual; the FFN sublayer's output."""
        return self.down(self.glu(self.mlp_norm(y, residual)))


@register("dflash")
class DFlash(Drafter):
    """DFlash drafter.

    Args:
        config: resolved checkpoint config.
        tensors: checkpoint tensors under Hugging Face names; every value is used as stored.
        vocabulary: the target's embedding and head, used unless the checkpoint ships its own.
        kv_dtype: dtype of the K and V caches.
    """

    layer_class = Layer

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, QuantTensor],
        vocabulary: Vocabulary,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.kv_dtype = config, kv_dtype
        t = Tensors(tensors)
        self.target_vocabulary = [vocabulary]  # a list: the target's module is not ours to move
        own_embedding, own_head = t.optional("embed_tokens.weight"), t.optional("lm_head.weight")
        self.own_embedding = None if own_embedding is None else Vocabulary(own_embedding).embed
        self.own_head = None if own_head is None else QuantLinear([own_head])
        self.fc = QuantLinear([t.weight("fc.weight")]) if config.use_aux_hidden_state else None
        layers = [
            self.layer_class(config, i, t.scope(f"layers.{i}.")) for i in range(config.num_layers)
        ]
        self.layers = cast(Sequence[Layer], nn.ModuleList(layers))
        context_mode = max(layer.attention.qkv.act_mode for layer in self.layers)
        self.hidden_norm = RMSNorm(
            t.floats("hidden_norm.weight"), config.rms_norm_eps, context_mode
        )
        self.norm = RMSNorm(t.floats("norm.weight"), config.rms_norm_eps)
        d2t = t.optional("d2t")
        self.d2t: Tensor | None
        self.register_buffer("d2t", None if d2t is None else d2t.to_dense(), persistent=False)
        self.mask: Tensor
        mask = torch.full((1,), config.mask_token_id, dtype=torch.int64, device="cpu")
        self.register_buffer("mask", mask, persistent=False)
        mask_row = t.optional("mask_embedding")
        self.mask_row = None if mask_row is None else QuantEmbedding(_as_row(mask_row))
        self._load(t)
        # Both choose rows by the values of ids, which is not an operator of ours.
        self.graphs = StepGraphs(enabled=self.mask_row is None and self.d2t is None)
        self._sampling: SamplingRows | None = None
        self.cache = self._new_cache()
        self.reset()

    def _load(self, t: Tensors) -> None:
        """What a refinement of DFlash takes from the checkpoint beyond the backbone."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.mask.device

    @property
    def length(self) -> int:
        """Committed rows so far."""
        return self._length

    def reset(self) -> None:
        """Forget the sequence; its K and V rows stay, and are never read."""
        self._length = 0
        if self.cache.positions.device != self.device:
            self.cache = self._new_cache()

    def _new_cache(self) -> KVCache:
        c = self.config
        shape = c.num_layers, c.num_kv_heads, c.head_dim
        return KVCache(*shape, self.kv_dtype, self.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.graphs.clear()
        return super()._apply(fn, recurse)

    def commit(self, target_hidden: Tensor) -> None:
        """Append committed rows to the context: fused, normed, and as K and V of every layer."""
        rows = target_hidden.shape[0]
        if rows == 0:
            return
        if rows <= self.config.block_size:  # what a verification commits; a prompt comes once
            self.graphs.run(
                "commit", target_hidden, self.cache, self._length, self._append,
                others=self._shared(),
            )  # fmt: skip
        else:
            self._append(target_hidden, Rows(self.cache, self._length, rows))
        self._length += rows

    def _append(self, target_hidden: Tensor, rows: Rows) -> None:
        fused = target_hidden if self.fc is None else self.fc.from_float(target_hidden)
        context = self.hidden_norm(None, fused)
        for i, layer in enumerate(self.layers):
            layer.attention.append(context, rows.positions, self.cache, i)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the drafter's own embedding, or of the target's."""
        scale = self.config.input_embedding_scale
        rows = (self.own_embedding or self.target_vocabulary[0].embed)(ids, scale)
        if self.mask_row is not None:  # replaces every row of the mask token, the anchor's too
            rows[ids == self.config.mask_token_id] = self.mask_row(torch.zeros_like(ids[:1]), scale)
        return rows

    def head(self, hidden: Tensor) -> Tensor:
        """Logits by the drafter's own head, or the target's; before multiplier and soft cap."""
        return (self.own_head or self.target_vocabulary[0].head).from_float(hidden)

    def forward(self, anchor: Tensor, rows: int) -> Tensor:
        """Run one block of ``rows`` rows: the anchor, then mask tokens.

        Args:
            anchor: int64 ``[1]``.
            rows: anchor and masks.

        Returns:
            float32 ``[rows, hidden]`` after the final norm.
        """
        return self._run("forward", self._backbone, anchor, rows).clone()

    def _run(
        self,
        name: Hashable,
        run: Callable[[Tensor, Rows], T],
        anchor: Tensor,
        rows: int,
        recorded: bool = True,
    ) -> T:
        """A pass over the anchor and ``rows - 1`` masks; its result lives until the next one."""
        tail = self.mask.expand(rows - 1)
        if not recorded:
            return run(torch.cat([anchor, tail]), Rows(self.cache, self._length, rows))
        shared = self._shared()
        return self.graphs.run(name, anchor, self.cache, self._length, run, tail, shared)

    def _shared(self) -> list[Tensor]:
        """What a block reads of the target, which may move or be freed by itself."""
        vocabulary = self.target_vocabulary[0]
        embedding = [] if self.own_embedding is not None else [vocabulary.embed.packed]
        return embedding if self.own_head is not None else [*embedding, vocabulary.head.weight]

    def _backbone(self, tokens: Tensor, block: Rows) -> Tensor:
        residual = self.embed(tokens)
        y = None
        for layer in self.layers:
            y = layer.attend(y, residual, block, self.cache)
            y = layer.feed_forward(y, residual, block)
        return self.norm(y, residual)

    @property
    def _draws_by_operators(self) -> bool:
        """Whether :meth:`_drawn` is a pass that can be recorded; see there."""
        return self.config.output_multiplier == 1 and self.config.final_logit_softcapping == 0

    @property
    def skipped_rows(self) -> int:
        """Rows before the first that predicts: the anchor's, unless drafts are sampled from it."""
        return 0 if self.config.sample_from_anchor else 1

    def _block_rows(self, draft_tokens: int, rows: int | None) -> int:
        """Rows to run, after checks."""
        size, needed = self.config.block_size, draft_tokens + self.skipped_rows
        self.check_draft_tokens(draft_tokens)
        rows = rows or self.block_rows or size
        if not needed <= rows <= size:
            raise ValueError(
                f"rows must be {needed}..{size} to draft {draft_tokens} tokens, got {rows}"
            )
        return rows

    def check_draft_tokens(self, draft_tokens: int) -> None:
        """Refuse a block that the drafter was not trained for."""
        if not 1 <= draft_tokens <= self.config.max_draft_tokens:
            raise ValueError(
                f"draft_tokens must be 1..{self.config.max_draft_tokens} for this drafter "
                f"(block size {self.config.block_size}), got {draft_tokens}"
            )

    def propose(
        self,
        anchor: Tensor,
        draft_tokens: int,
        sampling: SamplingParams,
        rows: int | None = None,
    ) -> Proposal:
        """Draft one block; what a row of it predicts is the kind's own: :meth:`_best`, or
        :meth:`_drawn` at a temperature.
        """
        rows = self._block_rows(draft_tokens, rows)
        read = slice(self.skipped_rows, self.skipped_rows + draft_tokens)
        request = None if sampling.greedy else self._request(sampling)

        def run(tokens: Tensor, block: Rows) -> Drafted:
            hidden = self._backbone(tokens, block)[read]
            if request is None:
                return self._best(hidden, tokens[:1])
            uniforms = request.uniform(block.following[:draft_tokens], DRAFT_STREAM)
            return self._drawn(hidden, tokens[:1], request, uniforms)

        recorded = sampling.greedy or self._draws_by_operators
        drafted = self._run((sampling.greedy, draft_tokens), run, anchor, rows, recorded)
        offered = self.cache.counts[draft_tokens : draft_tokens + 1]
        return self._proposal(drafted.kept(), offered)

    def _request(self, sampling: SamplingParams) -> SamplingRows:
        if self._sampling is None or self._sampling.device != self.device:
            self._sampling = SamplingRows(self.config.block_size, self.device)
        return self._sampling.hold(sampling)

    def _best(self, hidden: Tensor, anchor: Tensor) -> Drafted:
        """The most likely token of every row, by operators alone."""
        logits, c = self.head(hidden), self.config
        best = ops.head_topk(logits, 1, c.output_multiplier, c.final_logit_softcapping)[1]
        return Drafted(self._target_ids(best.view(1, -1)))

    def _drawn(
        self, hidden: Tensor, anchor: Tensor, request: SamplingRows, uniforms: Tensor
    ) -> Drafted:
        """A token of every row at the request's temperature, and what it was drawn from."""
        logits, c = self.head(hidden), self.config
        if c.output_multiplier != 1 or c.final_logit_softcapping != 0:
            # the k best of all, put back where they were
            values, order = ops.head_topk(
                logits, logits.shape[1], c.output_multiplier, c.final_logit_softcapping
            )
            logits = logits.scatter(1, order, values)
        q = request.probs(logits)
        ids = ops.categorical(q, uniforms).view(1, -1)
        return Drafted(self._target_ids(ids), q[None])

    def _proposal(self, drafted: Drafted, offered: Tensor) -> Proposal:
        q = drafted.q
        if q is not None and drafted.q_ids is None and self.d2t is not None:
            full = q.new_zeros(*q.shape[:2], self.config.vocab_size)
            q = full.index_copy_(2, self.d2t, q)
        return Proposal(drafted.tokens, offered, q, drafted.q_ids, drafted.confidence)

    def _target_ids(self, ids: Tensor) -> Tensor:
        return ids if self.d2t is None else self.d2t[ids]
