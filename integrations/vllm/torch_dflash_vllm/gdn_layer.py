"""Gated DeltaNet of Qwen3.5-type models under vLLM's contracts, on torch.ops.dflash.

vLLM keeps one wide convolution window and 1 + N recurrent states per request. A verify step starts
from the state that the last step's accepted tokens lead to and writes a state after every row;
nothing is committed or copied. The operators follow that contract for any number of rows per
request, rows of a request that drafted less than others included.

On a GPU, batches with prefills go to vLLM's own kernels. On a CPU everything runs here: vLLM's
CPU kernels keep the recurrent state transposed, so the two cannot take turns on one state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name

from torch_dflash import _ext, ops

from .features import decline

__all__ = ["DFlashGDN"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _int32(values: Tensor) -> Tensor:
    return values.to(torch.int32).contiguous()


@dataclass
class _Constants:
    """Float32 copies of the small weights, as the operators read them."""

    conv: Tensor  # [channels, taps]
    A: Tensor  # [v_heads], -exp(A_log)
    dt_bias: Tensor  # [v_heads]
    norm: Tensor  # [v_dim]


@dataclass(frozen=True)
class _Rows:
    """Rows of a step that take the same way through the layer, back to back."""

    mixed: Tensor  # [rows, q | k | v], before the convolution
    a: Tensor  # [rows, v_heads]
    b: Tensor  # [rows, v_heads]
    z: Tensor | None  # [rows, v_heads * v_dim], None: the output norm is not fused

    def __getitem__(self, index: Tensor | slice) -> "_Rows":
        z = None if self.z is None else self.z[index]
        return _Rows(self.mixed[index], self.a[index], self.b[index], z)


class _Sequences:
    """The sequences of a step as the operators read them.

    Args:
        cu_seqlens: int32 ``[sequences + 1]``.
        indices: int32 ``[sequences, columns]``, 0 is no slot.
        num_accepted: int32 ``[sequences]`` or None: 1.

    Attributes:
        slots: int32 ``[sequences]``, the first column.
        cu_seqlens, indices, num_accepted: dense.
    """

    def __init__(self, cu_seqlens: Tensor, indices: Tensor, num_accepted: Tensor | None) -> None:
        # slices of a wider table, unless they are a graph's own buffers
        self.cu_seqlens, self.indices = _int32(cu_seqlens), _int32(indices)
        self.slots = self.indices[:, 0].contiguous()
        self.num_accepted = None if num_accepted is None else _int32(num_accepted)


def _plain_sequences(md: Any) -> _Sequences:
    return _Sequences(md.non_spec_query_start_loc, md.non_spec_state_indices_tensor[:, None], None)


def _first_sequences(md: Any) -> _Sequences:
    first = md.num_decodes
    cu_seqlens, slots = md.non_spec_query_start_loc, md.non_spec_state_indices_tensor
    return _Sequences(cu_seqlens[: first + 1], slots[:first, None], None)


def _drafted_sequences(md: Any) -> _Sequences:
    return _Sequences(md.spec_query_start_loc, md.spec_state_indices_tensor, md.num_accepted_tokens)


def _shared(md: Any, make: Callable[[Any], _Sequences]) -> _Sequences:
    """What ``make`` makes of a step's metadata, once for all layers that share them.

    A graph reads copies that it makes itself: those made outside a capture, or in another one, are
    not its own.
    """
    capturing = not current_platform.is_cpu() and torch.cuda.is_current_stream_capturing()
    known: tuple[bool, _Sequences] | None = getattr(md, make.__name__, None)
    if known is None or known[0] != capturing:
        known = capturing, make(md)
        setattr(md, make.__name__, known)
    return known[1]


# mixed .. tiled: what gdn_step and gdn_prefill have in common, up to the state
_Common = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None,
    float, bool, int, int, bool,
]  # fmt: skip


class DFlashGDN(QwenGatedDeltaNetAttention):
    """Drop-in for vLLM's layer of the same weights; what it cannot run stays with vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._constants: _Constants | None = None
        self._stale = False
        reason = self._refusal()
        self._ours = reason is None
        if reason is not None:
            decline("gdn", f"layer {self.prefix}: {reason}")
            return
        self._watch_weights()
        if not current_platform.is_cpu():
            # The op that hands over z and takes normed rows: ours for plain decode too. What we
            # leave to vLLM behind it ends in its own gated norm.
            self.enable_fused_gdn_spec_decode = True

    def _refusal(self) -> str | None:
        """Why the operators cannot run this layer, or None."""
        conv_dtype, state_dtype = self.get_state_dtype()[:2]
        taps = self.conv_kernel_size
        needs = [
            ("the head layout must be flat", not self.gqa_interleaved_layout, "interleaved"),
            ("it must have in_proj_qkvz", hasattr(self, "in_proj_qkvz"), "LoRA's in_proj_qkv"),
            ("hidden_act must be silu", self.activation in ("silu", "swish"), self.activation),
            ("taps must be 2 to 16", 2 <= taps <= 16, taps),
            ("K heads must be 1 to 128 or 256 wide", self._k_dim_fits(), self.head_k_dim),
            ("the conv state must be float", conv_dtype in _FLOATS, conv_dtype),
            (
                "the recurrent state must be float32 or bfloat16",
                state_dtype in (torch.float32, torch.bfloat16),
                state_dtype,
            ),
            (
                "VLLM_SSM_CONV_STATE_LAYOUT must be SD",
                not is_conv_state_dim_first(),
                "DS",
            ),
            (
                "the operators must be there for this device",
                current_platform.is_cpu() or "cuda" in _ext.BACKENDS,
                f"only those for {', '.join(_ext.BACKENDS)}",
            ),
        ]
        for wanted, holds, got in needs:
            if not holds:
                return f"{wanted}, got {got}"
        return None

    def _k_dim_fits(self) -> bool:
        return 1 <= self.head_k_dim <= 128 or self.head_k_dim == 256

    def _watch_weights(self) -> None:
        """Weights may be loaded again into a running engine: the copies follow."""
        for p in (self.A_log, self.dt_bias, self.conv1d.weight, self.norm.weight):
            p.weight_loader = self._reloading(getattr(p, "weight_loader", default_weight_loader))

    def _reloading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def loader(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            self._stale = True
            # A captured graph does not come back to Python, it reads the copies where they are.
            if self._constants is not None and self._constants.A.is_cuda:
                self._weights()
            return result

        return loader

    def _weights(self) -> _Constants:
        """The float32 copies; after a reload the same memory with new values."""
        if self._constants is None or self._stale:
            conv = self.conv1d
            weight = getattr(
                conv, "_cpu_unpacked_conv_weight", None
            )  # the packed one is unreadable
            weight = conv.weight if weight is None else weight
            new = _Constants(
                weight.detach().reshape(weight.shape[0], -1).float().contiguous(),
                self._A(),
                self.dt_bias.detach().float().contiguous(),
                self.norm.weight.detach().float().contiguous(),
            )
            if self._constants is None:
                self._constants = new
            else:
                for name, value in vars(new).items():
                    getattr(self._constants, name).copy_(value)
            self._stale = False
        return self._constants

    def _A(self) -> Tensor:
        """``-exp(A_log)``; a GGUF file holds the decay itself, which no logarithm gives back."""
        from_file: Tensor | None = getattr(self, "decay", None)
        return -self.A_log.detach().float().exp() if from_file is None else from_file.clone()

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[tokens, hidden]``; the core is one opaque op, as on a GPU."""
        if not self._ours:
            result: Tensor = super().forward_cpu(hidden_states)
            return result
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        heads = self.num_v_heads // self.tp_size
        core = hidden_states.new_zeros(hidden_states.shape[0], heads, self.head_v_dim)
        torch.ops.vllm.qwen_gdn_attention_core_fused_norm_packed(
            mixed_qkvz, ba, core, layer_name=_encode_layer_name(self.prefix)
        )
        output, _ = self.out_proj(core.flatten(-2))
        return output

    def _forward_core_fused_norm_packed(
        self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor
    ) -> None:
        if not self._handles():
            super()._forward_core_fused_norm_packed(mixed_qkvz, ba, core_attn_out)
            return
        sizes = [
            (2 * self.key_dim + self.value_dim) // self.tp_size,
            self.value_dim // self.tp_size,
        ]
        mixed, z = mixed_qkvz.split(sizes, -1)
        b, a = self.split_ba(ba)
        self._core(mixed, a, b, z, core_attn_out)

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        if not self._handles():
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        self._core(mixed_qkv, a, b, None, core_attn_out)

    def _metadata(self) -> Any:
        """Of this layer in this step; None while vLLM measures memory."""
        metadata = get_forward_context().attn_metadata
        return metadata.get(self.prefix) if isinstance(metadata, dict) else None

    def _handles(self) -> bool:
        if not self._ours:
            return False
        md = self._metadata()
        if md is None:
            self._weights()  # before any graph is captured
        on_cpu: bool = current_platform.is_cpu()
        return on_cpu or (md is not None and md.num_prefills == 0)

    def _core(
        self, mixed: Tensor, a: Tensor, b: Tensor, z: Tensor | None, core_attn_out: Tensor
    ) -> None:
        """Convolution, recurrence and, with ``z``, the gated norm of one step.

        Args:
            mixed: ``[tokens, q | k | v]`` of this rank.
            a, b: ``[tokens, v_heads]``.
            z: gate of the output norm ``[tokens, v_heads * v_dim]``; None: leave the norm out.
            core_attn_out: ``[tokens, v_heads, v_dim]``, zeros; its rows are written.
        """
        md = self._metadata()
        if md is None:
            return
        n = md.num_actual_tokens
        out = core_attn_out.view(core_attn_out.shape[0], -1)
        rows = _Rows(mixed[:n], a[:n], b[:n], None if z is None else z[:n])
        if md.spec_sequence_masks is None:
            self._plain(md, rows, out)
        elif md.num_prefills == 0:
            out[:n] = self._verify(md, rows)
        else:
            drafted, others = md.spec_token_indx, md.non_spec_token_indx
            out[drafted] = self._verify(md, rows[drafted]).to(out.dtype)
            slots, cu_seqlens = md.non_spec_state_indices_tensor, md.non_spec_query_start_loc
            prefilled = self._prefill(rows[others], cu_seqlens, slots, md.has_initial_state)
            out[others] = prefilled.to(out.dtype)

    def _plain(self, md: Any, rows: _Rows, out: Tensor) -> None:
        """A step without drafts: single rows first, then (on CPU) prefills."""
        cu_seqlens, slots = md.non_spec_query_start_loc, md.non_spec_state_indices_tensor
        if md.num_prefills == 0:
            out[: rows.mixed.shape[0]] = self._step(rows, _shared(md, _plain_sequences))
            return
        first, tokens = md.num_decodes, md.num_decode_tokens
        if first:
            out[:tokens] = self._step(rows[:tokens], _shared(md, _first_sequences))
        last, end = first + md.num_prefills, tokens + md.num_prefill_tokens
        out[tokens:end] = self._prefill(
            rows[tokens:end],
            cu_seqlens[first : last + 1] - tokens,
            slots[first:last],
            md.has_initial_state[first:last],
        )

    def _verify(self, md: Any, rows: _Rows) -> Tensor:
        return self._step(rows, _shared(md, _drafted_sequences))

    def _step(self, rows: _Rows, sequences: _Sequences) -> Tensor:
        """Decode or verify: 1 to ``columns`` rows per sequence, none for padding.

        Returns:
            float32 ``[rows, v_heads * v_dim]``.
        """
        w, s = self._weights(), sequences
        conv, state = self.kv_cache[0], self.kv_cache[1]
        mixed = ops.ssm_conv_step(
            rows.mixed, conv, w.conv, None, True, s.slots, s.num_accepted, s.cu_seqlens
        )
        common = self._common(mixed, rows, w)
        return ops.gdn_step(*common, state, s.indices, s.num_accepted, s.cu_seqlens, 0)

    def _prefill(self, rows: _Rows, cu_seqlens: Tensor, slots: Tensor, has_state: Tensor) -> Tensor:
        """Any number of rows, the state after the last one kept.

        Args:
            rows: of whole prompts or their next chunks.
            cu_seqlens: int32 ``[sequences + 1]``.
            slots: int32 ``[sequences]``.
            has_state: bool ``[sequences]``: there are rows before these.

        Returns:
            float32 ``[rows, v_heads * v_dim]``.
        """
        w = self._weights()
        conv, state = self.kv_cache[0], self.kv_cache[1]
        slots, cu_seqlens = _int32(slots), _int32(cu_seqlens)
        offsets = cu_seqlens.tolist()
        mixed = rows.mixed.new_empty(rows.mixed.shape, dtype=torch.float32)
        for slot, known, start, end in zip(
            slots.tolist(), has_state.tolist(), offsets[:-1], offsets[1:], strict=True
        ):
            if end > start:
                x = rows.mixed[start:end]
                mixed[start:end] = self._conv_prefill(x, conv[slot], known, w.conv)
        common = self._common(mixed, rows, w)
        return ops.gdn_prefill(*common, state, slots, has_state.int(), cu_seqlens, 0)

    def _conv_prefill(self, x: Tensor, window: Tensor, known: bool, weight: Tensor) -> Tensor:
        """One sequence, in a window as long as its rows; the engine's holds a verify step."""
        n, history = x.shape[0], weight.shape[1] - 1
        wide = window.new_zeros(2, history - 1 + n, x.shape[1])
        if known:
            wide[1, :history] = window[:history]
        one = torch.ones(1, dtype=torch.int32)
        ends = torch.tensor([0, n], dtype=torch.int32)
        out = ops.ssm_conv_step(x, wide, weight, None, True, one, None, ends)
        window[:history] = wide[1, n - 1 :]
        return out

    def _common(self, mixed: Tensor, rows: _Rows, w: _Constants) -> _Common:
        return (
            mixed,
            rows.a,
            rows.b,
            w.A,
            w.dt_bias,
            rows.z,
            None if rows.z is None else w.norm,
            self.norm.eps,
            self.norm.activation == "sigmoid",
            self.num_k_heads // self.tp_size,
            self.head_k_dim,
            False,
        )
