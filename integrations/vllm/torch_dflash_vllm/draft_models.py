"""Drafters in vLLM: its own classes with our heads, and with what it ignores in their configs.

Behind the names that vLLM knows they run on its V2 runner, with vLLM's heads unless feature
``heads`` is on; behind the names of :data:`~.drafter_plan.ALIASES` they run on the V1 runner,
which asks ``get_top_tokens`` for a whole block at once.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import rms_norm
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dflash2 import (
    DFlash2Qwen3DecoderLayer,
    DFlash2Qwen3ForCausalLM,
    DFlash2Qwen3Model,
    DFlashGroupedConv,
)
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.platforms import current_platform

from torch_dflash import ops
from torch_dflash.gguf.types import ggml_type_of

from . import markov_heads
from .features import outcomes

__all__ = ["DFlash", "DFlash2", "DSpark"]


class Block:
    """The block of draft rows that is being computed, of every request of the batch.

    Attributes:
        rows: rows of each block.
        anchors: first token of each block, int64 ``[sequences]``.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.anchors = torch.zeros(0, dtype=torch.int64)

    def begin(self, input_ids: Tensor) -> None:
        """Take note of the tokens that a forward pass starts from."""
        whole = input_ids.shape[0] // self.rows
        self.anchors = input_ids[: whole * self.rows : self.rows].to(torch.int64)

    def starts(self, rows: int) -> Tensor:
        """First row of every block among ``rows``, and the end: int32."""
        return torch.tensor([*range(0, rows, self.rows), rows], dtype=torch.int32)


def _head_logits(model: Any, hidden: Tensor) -> Tensor:
    """This rank's part of the head's logits, float32; columns of padding are -inf."""
    head = model.lm_head
    logits = model.logits_processor._apply_head(head, hidden, None).float()
    padding = head.shard_indices.num_org_vocab_padding
    if padding:
        logits[:, -padding:] = float("-inf")
    return logits.contiguous()


def top_k(model: Any, hidden: Tensor, k: int, multiplier: float, cap: float) -> tuple[Tensor, ...]:
    """``(values, ids)`` of the k best tokens over all ranks, by value and then the lower id."""
    values, ids = ops.head_topk(_head_logits(model, hidden), k, multiplier, cap)
    ids = ids + model.lm_head.shard_indices.org_vocab_start_index
    if model.lm_head.tp_size == 1:
        return values, ids
    # Ranks hold ascending ids, so the order among equals is still that of the whole vocabulary.
    values = tensor_model_parallel_all_gather(values, dim=-1).contiguous()
    # as floats: on a CPU, shared memory carries nothing else; ids below 2^24 stay exact
    ids = tensor_model_parallel_all_gather(ids.float(), dim=-1).long()
    values, best = ops.head_topk(values, k, 1.0, 0.0)
    return values, ids.gather(-1, best)


def _table(weight: Tensor) -> tuple[Tensor, int]:
    """A float matrix as GGUF bytes and their type."""
    ggml_type = ggml_type_of(weight.dtype)
    assert ggml_type is not None, weight.dtype
    return weight.detach().contiguous().view(torch.uint8), ggml_type


def _normalize_context_k(model: Any, k: Tensor) -> Tensor:
    """K of the context ``[layers, tokens, heads, head_dim]`` by each layer's own norm.

    vLLM does all layers in one call; its CPU kernel takes the first layer's weight for every one.
    """
    out = torch.empty_like(k)
    for layer, weight in enumerate(model._k_norm_weights):
        rms_norm(out[layer], k[layer], weight, model._rms_norm_eps)
    return out


class _Common:
    """What all three share; mixed into vLLM's classes."""

    config: Any
    model: Any

    def _prepare(self) -> None:
        draft = self.config.dflash_config or {}
        self.multiplier = float(draft.get("output_multiplier") or 1.0)
        self.cap = float(draft.get("final_logit_softcapping") or 0.0)
        heads = outcomes().get("heads")
        cpu = current_platform.is_cpu()
        self.ours = cpu or (heads is not None and heads.state == "on")
        if cpu:
            self.model._normalize_context_k = partial(_normalize_context_k, self.model)

    def _target_ids(self, ids: Tensor) -> Tensor:
        offsets = self.draft_id_to_target_id  # type: ignore[attr-defined]
        return ids if offsets is None else ids + offsets[ids]


class _Blocks(_Common):
    """For kinds whose rows depend on each other within a block."""

    block: Block

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """One pass over the blocks."""
        if not input_ids.is_cuda:
            self.block.begin(input_ids)
        hidden: Tensor = super().forward(  # type: ignore[misc]
            input_ids, positions, inputs_embeds
        )
        return hidden


class ScaledDFlashModel(DFlashQwen3Model):
    """DFlash's backbone; vLLM reads ``input_embedding_scale`` for DFlash2 only."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Rows of the embedding, scaled."""
        rows = super().embed_input_ids(input_ids)
        scale = float(self.config.dflash_config.get("input_embedding_scale") or 1.0)
        return rows if scale == 1.0 else rows * scale


class DFlash(_Common, DFlashQwen3ForCausalLM):
    """DFlash, with the head's multiplier and soft cap where probabilities matter."""

    model_cls = ScaledDFlashModel

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._prepare()

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The best token of every row, int64 ``[rows]``."""
        if not self.ours:
            ids = self.logits_processor.get_top_tokens(self.lm_head, hidden_states)
            return self._target_ids(ids)
        ids = top_k(self, hidden_states, 1, 1.0, 0.0)[1].view(-1)  # neither scale moves it
        return self._target_ids(ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits over the target's vocabulary."""
        logits = super().compute_logits(hidden_states)
        if logits is None or (self.multiplier == 1.0 and not self.cap):
            return logits
        logits = logits * self.multiplier
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


class BlockConvLayer(DFlash2Qwen3DecoderLayer):
    """DFlash2's layer, with blocks as long as they are at run time."""

    block: Block

    def _convolve(self, conv: DFlashGroupedConv, x: Tensor, coef: Tensor, side: int) -> Tensor:
        base = conv.base_kernel.float()
        starts = self.block.starts(x.shape[0])
        return ops.grouped_conv(x.float().contiguous(), coef, base, side, starts, 0).to(x.dtype)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention and FFN, a convolution before and after each."""
        if hidden_states.is_cuda:  # blocks never change their length there
            return super().forward(positions, hidden_states, residual)
        if residual is None:
            residual, u = hidden_states, self.input_layernorm(hidden_states)
        else:
            u, residual = self.input_layernorm(hidden_states, residual)
        conv = self.attention_conv
        coef = conv.kernel_projection(u).float().contiguous()
        y = self.self_attn(positions=positions, hidden_states=self._convolve(conv, u, coef, 0))
        y = self._convolve(conv, y, coef, 1)
        u, residual = self.post_attention_layernorm(y, residual)
        conv = self.mlp_conv
        coef = conv.kernel_projection(u).float().contiguous()
        y = self._convolve(conv, self.mlp(self._convolve(conv, u, coef, 0)), coef, 1)
        return y, residual


class BlockConvModel(DFlash2Qwen3Model):
    """DFlash2's backbone of such layers."""

    decoder_layer_cls = BlockConvLayer


class DFlash2(_Blocks, DFlash2Qwen3ForCausalLM):
    """DFlash2, with its candidate selector on the V1 runner too."""

    model_cls = BlockConvModel

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._prepare()
        self.block = Block(1 + vllm_config.speculative_config.num_speculative_tokens)
        for layer in self.model.layers:
            layer.block = self.block

    def compute_candidates(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """``(ids, values)`` of the candidates of every row ``[rows, top_k]``; for the V2 runner."""
        if not self.ours:
            return super().compute_candidates(hidden_states)
        k = self.model.candidate_selector.top_k
        values, ids = top_k(self, hidden_states, k, self.multiplier, self.cap)
        return ids, values

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The selector's greedy path through every block, int64 ``[rows]``."""
        selector, anchors = self.model.candidate_selector, self.block.anchors
        blocks = len(anchors)
        values, ids = top_k(self, hidden_states, selector.top_k, self.multiplier, self.cap)
        hidden = selector.hidden_projection(hidden_states).float()
        tokens, _ = ops.selector_walk(
            ids.view(blocks, -1, selector.top_k),
            values.view(blocks, -1, selector.top_k),
            hidden.view(blocks, -1, hidden.shape[-1]).contiguous(),
            anchors,
            *_table(selector.predecessor_codebook),
            *_table(selector.successor_codebook),
            torch.zeros(blocks),
            torch.zeros(blocks, len(ids) // blocks),
        )
        return tokens.view(-1)


class DSpark(_Blocks, Qwen3DSparkForCausalLM):
    """DSpark, with its Markov chain on the V1 runner too."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._prepare()
        self.sample_from_anchor = bool(getattr(self.config, "sample_from_anchor", True))
        drafts = vllm_config.speculative_config.num_speculative_tokens
        self.block = Block(drafts if self.sample_from_anchor else 1 + drafts)
        self._chain: tuple[Any, ...] | None = None
        self.head_type, self.joint = 0, None
        kind = getattr(self.config, "markov_head_type", None)
        if kind in markov_heads.HEADS:
            self.head_type = markov_heads.HEADS[kind][0]
            rank, hidden = self.config.markov_rank, self.config.hidden_size
            self.joint = markov_heads.JointHead(kind, rank, hidden)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Load, and forget what was derived from older weights."""
        self._chain = None
        return super().load_weights(weights if self.joint is None else self._load_joint(weights))

    def _load_joint(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Keep J, whose name vLLM would take for an FFN's; pass on the rest."""
        assert self.joint is not None
        prefix = f"markov_head.{self.joint.name}."
        for name, value in weights:
            if name.startswith(prefix):
                getattr(self.joint, name.removeprefix(prefix)).copy_(value)
            else:
                yield name, value

    def _tables(self) -> tuple[Any, ...]:
        if self._chain is None:
            head = self.model.markov_head
            w2 = head.markov_w2.weight[: self.config.draft_vocab_size]
            packed, ggml_type = _table(w2)
            repacked = ops.repack(packed, ggml_type, w2.shape[1])
            offsets = self.draft_id_to_target_id
            ids = torch.arange(len(w2), device=w2.device)
            d2t = None if offsets is None else offsets + ids
            joint: tuple[Any, ...] = (None, 0, None)
            if self.joint is not None:
                packed, joint_type = _table(self.joint.weight)
                packed = ops.repack(packed, joint_type, self.joint.in_features)
                joint = (packed, joint_type, self.joint.bias.detach().float())
            self._chain = (*_table(head.markov_w1.weight), repacked, ggml_type, d2t, *joint)
        return self._chain

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The chain's greedy tokens of every block, int64 ``[rows]``."""
        return self._walk(hidden_states, self.block.anchors).view(-1)

    def sample_sequential(self, speculator: Any, num_reqs: int, head_hidden: Tensor) -> bool:
        """Fill in the drafts of vLLM's V2 runner (0.33), or leave them to its own loop.

        Args:
            speculator: its ``DSparkSpeculator``.
            num_reqs: blocks.
            head_hidden: hidden rows of the pass.

        Returns:
            False, nothing done, where drafts are sampled or scored: its random numbers and its
            acceptance estimate belong to that loop, which knows vanilla heads only.
        """
        asks = (
            speculator.draft_logits is not None
            or speculator.use_confidence_head
            or getattr(speculator, "use_acceptance_estimator", False)
        )
        if not self.ours or asks:
            if self.joint is None:
                return False
            markov_heads.draft(self, self.joint, speculator, num_reqs, head_hidden)
            return True
        drafts = speculator.num_speculative_steps
        hidden = head_hidden[speculator.sample_indices[: num_reqs * drafts]]
        anchors = speculator.input_buffers.input_ids[speculator._anchor_idx[:num_reqs]]
        speculator.draft_tokens[:num_reqs, :drafts] = self._walk(hidden, anchors.to(torch.int64))
        return True

    def _walk(self, hidden_states: Tensor, anchors: Tensor) -> Tensor:
        """Greedy tokens ``[blocks, rows]`` behind the anchors."""
        blocks = len(anchors)
        base = _head_logits(self, hidden_states)
        if self.lm_head.tp_size > 1:
            base = tensor_model_parallel_all_gather(base, dim=-1)
        base = base[:, : self.config.draft_vocab_size].contiguous()
        hidden = hidden_states.float()
        w1, w1_type, w2, w2_type, d2t, joint, joint_type, joint_bias = self._tables()
        tokens, _, _ = ops.markov_chain(
            base.view(blocks, -1, base.shape[-1]),
            hidden.view(blocks, -1, hidden.shape[-1]).contiguous(),
            anchors,
            w1,
            w1_type,
            w2,
            w2_type,
            None,
            None,
            self.logits_processor.scale,
            d2t,
            None,
            None,
            draft_topk=int(getattr(self.config, "dspark_draft_topk", None) or 0),
            head_type=self.head_type,
            joint=joint,
            joint_type=joint_type,
            joint_bias=joint_bias,
        )
        return tokens
