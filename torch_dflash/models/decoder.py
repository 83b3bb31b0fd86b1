"""A decoder that verifies: the part that every native target shares."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ..decoding.graphs import StepGraphs
from ..decoding.kv_cache import KVCache, Rows
from ..decoding.target import Verification
from ..nn import Module, RMSNorm, Vocabulary
from .config import TargetConfig
from .layers import Attention, FeedForward, GatedDeltaNet
from .state import GDNShape, RecurrentState, StateKind, TargetState

__all__ = ["Decoder", "DecoderLayer"]

MAX_ROWS = 32  # of one verification, and of one prefill chunk: the decode kernels' widest tile


class _Mixer(Protocol):
    act_mode: int

    def __call__(self, u: Tensor, step: Rows, state: TargetState, index: int) -> Tensor: ...


class DecoderLayer(Module):
    """Token mixer and FFN, each behind a norm.

    Args:
        mixer: attention or Gated DeltaNet.
        mixer_norm, ffn_norm: float32 ``[hidden]``, as they multiply.
        ffn: feed-forward part.
        eps: of the norms.
    """

    def __init__(
        self,
        mixer: Attention | GatedDeltaNet,
        mixer_norm: Tensor,
        ffn: FeedForward,
        ffn_norm: Tensor,
        eps: float,
    ) -> None:
        super().__init__()
        self.mixer, self.ffn = mixer, ffn
        self.mixer_norm = RMSNorm(mixer_norm, eps, mixer.act_mode)
        self.ffn_norm = RMSNorm(ffn_norm, eps, ffn.act_mode)


class Decoder(Module):
    """A native target (see ``decoding.Target``) over one sequence.

    Prefill runs through the decode kernels in chunks of 32 rows from position 0, so that a prompt
    gives the same bits however it is split or extended.

    Args:
        vocabulary: embedding and head.
        layers: in order.
        norm: final norm, float32 ``[hidden]``.
        eps: of the norms.
        gdn: sizes of the recurrent layers, None without them.
        kv_dtype: of the K and V caches.
        state: how recurrent states are rolled back.
        state_dtype: of the GDN states.
    """

    config: TargetConfig  # what the file says; set by load_target

    def __init__(
        self,
        vocabulary: Vocabulary,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        eps: float,
        gdn: GDNShape | None = None,
        kv_dtype: torch.dtype = torch.float32,
        state: StateKind = "journal",
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.layers = cast(Sequence[DecoderLayer], nn.ModuleList(layers))
        self.norm = RMSNorm(norm, eps, vocabulary.head.act_mode)
        self.hidden_size = vocabulary.embed.columns
        self._gdn, self._kv_dtype = gdn, kv_dtype
        self._state_kind, self._state_dtype = state, state_dtype
        counts = {Attention: 0, GatedDeltaNet: 0}
        self._index = []
        for layer in layers:
            self._index.append(counts[type(layer.mixer)])
            counts[type(layer.mixer)] += 1
        self._counts = counts
        self.graphs = StepGraphs()
        self._captured: tuple[int, ...] = ()  # in the order that was asked for
        self._layers_captured: list[int] = []  # once each, as they come
        self._verified = 0  # rows of a verification that is not committed yet
        self.state = self._new_state()

    def _new_state(self) -> TargetState:
        self.graphs.clear()
        mixers = [layer.mixer for layer in self.layers]
        attention = next((m for m in mixers if isinstance(m, Attention)), None)
        kv = KVCache(
            self._counts[Attention],
            attention.kv_heads if attention else 0,
            attention.head_dim if attention else 0,
            self._kv_dtype,
            self.device,
        )
        recurrent = None
        if self._gdn is not None:
            recurrent = RecurrentState(
                self._gdn,
                self._counts[GatedDeltaNet],
                MAX_ROWS,
                self._state_kind,
                self._state_dtype,
                self.device,
            )
        return TargetState(kv, recurrent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.device
        self.graphs.clear()
        super()._apply(fn, recurse)
        if self.device != before:  # a sequence does not move along: it is forgotten
            self.state = self._new_state()
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.vocabulary.embed.packed.device

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.state.length

    @property
    def max_rows(self) -> int:
        """Most rows of one verification."""
        return MAX_ROWS

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.vocabulary.embed.rows

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Choose the layers whose outputs make up target_hidden; watching changes nothing.

        Raises:
            ValueError: an id is out of range, or the last layer's (its output is read before the
                final norm by some engines and after it by others).
        """
        for i in layer_ids:
            if not 0 <= i < self.num_layers - 1:
                raise ValueError(
                    f"target_layer_ids must be in 0..{self.num_layers - 2} for a target of "
                    f"{self.num_layers} layers, got {i}"
                )
        self._captured = tuple(layer_ids)
        self._layers_captured = sorted(set(layer_ids))

    def reset(self) -> None:
        """Forget the sequence, and a verification that was not committed."""
        self.state.reset()
        self._verified = 0

    def _rows(self, tokens: Tensor, step: Rows) -> tuple[Tensor, Tensor]:
        """Run rows behind the committed ones: (rows as the head reads them, captured layers)."""
        hidden = self.hidden_size
        residual = self.vocabulary.embed(tokens)
        captured = residual.new_empty(step.rows, len(self._layers_captured) * hidden)
        places = dict(zip(self._layers_captured, captured.split(hidden, 1), strict=False))
        y = None
        for i, layer in enumerate(self.layers):
            u = layer.mixer_norm(y, residual, places.get(i - 1))
            y = layer.mixer(u, step, self.state, self._index[i])
            y = layer.ffn(layer.ffn_norm(y, residual))
        return self.norm(y, residual), captured

    def _target_hidden(self, captured: Tensor) -> Tensor:
        """The captured layers, a copy in the order that was asked for."""
        order = self._layers_captured
        if order == [*self._captured]:
            return captured.clone() if order else captured
        layers = captured.split(self.hidden_size, 1)
        return torch.cat([layers[order.index(i)] for i in self._captured], 1)

    def prefill(self, tokens: Tensor, sink: Callable[[Tensor], None] | None = None) -> Tensor:
        """Append and commit tokens.

        Args:
            tokens: int64 ``[n]``, n >= 1.
            sink: called with the target_hidden rows of every chunk, in order.

        Returns:
            logits of the last token, float32 ``[1, vocabulary]``.

        Raises:
            ValueError: there are no tokens, or a verification is not committed.
        """
        if tokens.dim() != 1 or tokens.shape[0] == 0:
            raise ValueError(f"prefill: tokens must be [n >= 1], got {list(tokens.shape)}")
        self._check_committed("prefill")
        kv, recurrent = self.state.kv, self.state.recurrent
        if recurrent is not None:
            recurrent.begin_prefill()
        try:
            for chunk in tokens.split(MAX_ROWS):
                normed, captured = self._rows(chunk, Rows(kv, self.length, chunk.shape[0]))
                self.state.length += chunk.shape[0]
                if recurrent is not None:
                    recurrent.prefilled(chunk.shape[0])
                if sink is not None and self._captured:
                    sink(self._target_hidden(captured))
        finally:
            if recurrent is not None:
                recurrent.end_prefill()
        return self.vocabulary.head(normed[-1:])

    def verify(self, tokens: Tensor) -> Verification:
        """Run the anchor and draft tokens behind the committed ones, committing none of them.

        Args:
            tokens: int64 ``[rows]``, ``1 <= rows <= max_rows``.

        Raises:
            ValueError: wrong shape, too many rows, or the last verification is not committed.
        """
        if tokens.dim() != 1 or not 1 <= tokens.shape[0] <= MAX_ROWS:
            raise ValueError(f"verify: tokens must be [1..{MAX_ROWS}], got {list(tokens.shape)}")
        self._check_committed("verify")
        kv, start = self.state.kv, self.length
        normed, captured = self.graphs.run(self._captured, tokens, kv, start, self._rows)
        self._verified = tokens.shape[0]
        return Verification(self.vocabulary.head(normed), self._target_hidden(captured))

    def _check_committed(self, what: str) -> None:
        """A recurrent state is replayed by the next step: two steps in a row would replay twice."""
        if self._verified:
            raise ValueError(
                f"{what}: the last verification of {self._verified} rows must be committed first; "
                "commit(1) keeps its anchor alone"
            )

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last verification; the others never happened.

        Raises:
            ValueError: that many rows were not verified since the last commit.
        """
        if not 1 <= rows <= self._verified:
            raise ValueError(f"commit: rows must be 1..{self._verified} (verified), got {rows}")
        self.state.length += rows
        if self.state.recurrent is not None:
            self.state.recurrent.commit(rows)
        self._verified = 0
