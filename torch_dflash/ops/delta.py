"""Gated DeltaNet: one row after another, with the means to take rows back.

A verify step runs the rows of a proposal before it is known how many of them will be accepted. Two
ways to return to the state after the accepted ones: a *snapshot* of the state after every row
(vLLM's contract), or a *journal* of what each row did to the state, replayed at the next step. A
journal row is two vectors and a number per head where a snapshot is a matrix, and replaying it is
the same multiply-adds on the same numbers, so both give the same bits.
"""

import torch
from torch import Tensor

from .act import new_activations

__all__ = ["gdn_commit", "gdn_journal_step", "gdn_prefill", "gdn_step"]


def gdn_step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    sigmoid_gate: bool,
    k_heads: int,
    k_dim: int,
    tiled: bool,
    state: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor | None,
    cu_seqlens: Tensor,
    act_mode: int,
) -> Tensor:
    r"""Gated delta rule over a decode or verify block, the state kept after each row.

    Per v head, with k and q normalised to unit length and q divided by :math:`\sqrt{d_k}`:

    .. math::
        g = e^{A \operatorname{softplus}(a + \delta)}, \quad \beta = \sigma(b), \quad
        u = \beta (v - g S k), \quad S \leftarrow g S + u k^\top, \quad o = S q

    and then, with ``norm_weight``, the gated norm :math:`\operatorname{rms}(o)\, w \odot
    \operatorname{silu}(z)`.

    Args:
        mixed: ``[rows, 2 * k_heads * k_dim + v_heads * v_dim]``: q, k and v of every head after the
            convolution, float32, float16 or bfloat16, row stride free.
        a: decay projection ``[rows, v_heads]``, dtypes and stride as ``mixed``.
        b: write projection, like ``a``.
        A: float32 ``[v_heads]``, ``-exp(A_log)``, as a GGUF's ``ssm_a``.
        dt_bias: float32 ``[v_heads]``.
        z: gate of the output norm ``[rows, v_heads * v_dim]``, dtypes and stride as ``mixed``, or
            None together with ``norm_weight``: return the heads' outputs as they are.
        norm_weight: float32 ``[v_dim]`` or None.
        eps: of the output norm.
        sigmoid_gate: gate with sigmoid(z), not silu(z).
        k_heads: number of q/k heads; ``v_heads`` is a multiple of it.
        k_dim: width of a q/k head, 1 to 128 or 256.
        tiled: v head h reads k head ``h % k_heads`` (GGUF), not ``h // (v_heads / k_heads)``.
        state: ``[slots, v_heads, v_dim, k_dim]``, float32 or bfloat16 (rounded after each row, so
            that a block gives the bits of single rows), slot stride free; written.
        state_indices: int32 ``[sequences, columns]``. The block starts from the state in slot
            ``state_indices[s, max(num_accepted, 1) - 1]``; the state after row t goes to slot
            ``state_indices[s, t]``. 0 and below is no slot: a start there skips the sequence (zero
            rows, nothing written), a destination there is not written.
        num_accepted: int32 ``[sequences]``: accepted rows of the last block, the anchor included;
            values below 1 count as 1, as does None.
        cu_seqlens: int32 ``[sequences + 1]``, row offsets from 0. A sequence without rows is left
            alone; rows after the last offset are padding and come out zero.
        act_mode: 0 float32; 1 planes or 2 Q8_1, packed for :func:`qmm` as by :func:`quant_act`.

    Returns:
        float32 ``[rows, v_heads * v_dim]``, or packed activations.

    Raises:
        RuntimeError: a shape, dtype, device or layout above does not hold; on CPU also a
            slot outside ``state``, offsets that do not ascend, or fewer columns than rows.
            A GPU cannot stop for those: it returns NaN rows and writes nothing for the sequence.

    Source: gated delta networks (arXiv:2412.06464). Formula: ``csrc/core/delta.h``.
    Backends: CPU, CUDA, HIP. Not differentiable.
    """
    return torch.ops.dflash.gdn_step.default(
        mixed,
        a,
        b,
        A,
        dt_bias,
        z,
        norm_weight,
        eps,
        sigmoid_gate,
        k_heads,
        k_dim,
        tiled,
        state,
        state_indices,
        num_accepted,
        cu_seqlens,
        act_mode,
    )


@torch.library.register_fake("dflash::gdn_step")
def _(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    sigmoid_gate: bool,
    k_heads: int,
    k_dim: int,
    tiled: bool,
    state: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor | None,
    cu_seqlens: Tensor,
    act_mode: int,
) -> Tensor:
    return new_activations(mixed, mixed.shape[0], state.shape[1] * state.shape[2], act_mode)


def gdn_journal_step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    sigmoid_gate: bool,
    k_heads: int,
    k_dim: int,
    tiled: bool,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    parity: Tensor,
    journal_k: Tensor,
    journal_u: Tensor,
    journal_decay: Tensor,
    cu_seqlens: Tensor,
    act_mode: int,
) -> Tensor:
    r"""Gated delta rule over a decode or verify block, the rows kept in a journal.

    The slot's state is the one before the last block. First ``num_accepted`` rows of the journal
    that ``parity`` names are replayed into it and it is written back; then the new rows run, and
    what they did to the state, not the state, goes to the other journal. The formula of a row is
    that of :func:`gdn_step`. After the step the caller flips ``parity`` and sets ``num_accepted``
    to the accepted rows, the anchor included, of every sequence that had rows.

    Args:
        mixed: ``[rows, 2 * k_heads * k_dim + v_heads * v_dim]``: q, k and v of every head after the
            convolution, float32, float16 or bfloat16, row stride free.
        a: decay projection ``[rows, v_heads]``, dtypes and stride as ``mixed``.
        b: write projection, like ``a``.
        A: float32 ``[v_heads]``, ``-exp(A_log)``, as a GGUF's ``ssm_a``.
        dt_bias: float32 ``[v_heads]``.
        z: gate of the output norm ``[rows, v_heads * v_dim]``, dtypes and stride as ``mixed``, or
            None together with ``norm_weight``: return the heads' outputs as they are.
        norm_weight: float32 ``[v_dim]`` or None.
        eps: of the output norm.
        sigmoid_gate: gate with sigmoid(z), not silu(z).
        k_heads: number of q/k heads; ``v_heads`` is a multiple of it.
        k_dim: width of a q/k head, 1 to 128 or 256.
        tiled: v head h reads k head ``h % k_heads`` (GGUF), not ``h // (v_heads / k_heads)``.
        state: ``[slots, v_heads, v_dim, k_dim]``, float32 or bfloat16 (rounded after each row, so
            that a block gives the bits of single rows), slot stride free; written.
        slots: int32 ``[sequences]``; 0 and below skips the sequence: zero rows, nothing written.
        num_accepted: int32 ``[sequences]``, 0 to ``journal rows``: rows to replay; 0 after a
            prefill or :func:`gdn_commit`.
        parity: int32 ``[sequences]``, 0 or 1: the half of the journals to replay from.
        journal_k: float32 ``[2, slots, journal rows, k_heads, k_dim]``, unit keys; written.
        journal_u: float32 ``[2, slots, journal rows, v_heads, v_dim]``; written.
        journal_decay: float32 ``[2, slots, journal rows, v_heads]``; written.
        cu_seqlens: int32 ``[sequences + 1]``, row offsets from 0. A sequence without rows is left
            alone; rows after the last offset are padding and come out zero.
        act_mode: 0 float32; 1 planes or 2 Q8_1, packed for :func:`qmm` as by :func:`quant_act`.

    Returns:
        float32 ``[rows, v_heads * v_dim]``, or packed activations.

    Raises:
        RuntimeError: a shape, dtype, device or layout above does not hold; on CPU also a
            slot outside ``state``, descending offsets, or more rows than the journal holds.
            A GPU cannot stop for those: it returns NaN rows and writes nothing for the sequence.

    Source: gated delta networks (arXiv:2412.06464). Formula: ``csrc/core/delta.h``.
    Backends: CPU, CUDA, HIP. Not differentiable.
    """
    return torch.ops.dflash.gdn_journal_step.default(
        mixed,
        a,
        b,
        A,
        dt_bias,
        z,
        norm_weight,
        eps,
        sigmoid_gate,
        k_heads,
        k_dim,
        tiled,
        state,
        slots,
        num_accepted,
        parity,
        journal_k,
        journal_u,
        journal_decay,
        cu_seqlens,
        act_mode,
    )


@torch.library.register_fake("dflash::gdn_journal_step")
def _(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    sigmoid_gate: bool,
    k_heads: int,
    k_dim: int,
    tiled: bool,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    parity: Tensor,
    journal_k: Tensor,
    journal_u: Tensor,
    journal_decay: Tensor,
    cu_seqlens: Tensor,
    act_mode: int,
) -> Tensor:
    return new_activations(mixed, mixed.shape[0], state.shape[1] * state.shape[2], act_mode)


def gdn_prefill(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    sigmoid_gate: bool,
    k_heads: int,
    k_dim: int,
    tiled: bool,
    state: Tensor,
    slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
    act_mode: int,
) -> Tensor:
    r"""Gated delta rule over the rows of a prompt; only the final state is kept.

    The formula of a row is that of :func:`gdn_step`, bit for bit on CPU.

    Args:
        mixed: ``[rows, 2 * k_heads * k_dim + v_heads * v_dim]``: q, k and v of every head after the
            convolution, float32, float16 or bfloat16, row stride free.
        a: decay projection ``[rows, v_heads]``, dtypes and stride as ``mixed``.
        b: write projection, like ``a``.
        A: float32 ``[v_heads]``, ``-exp(A_log)``, as a GGUF's ``ssm_a``.
        dt_bias: float32 ``[v_heads]``.
        z: gate of the output norm ``[rows, v_heads * v_dim]``, dtypes and stride as ``mixed``, or
            None together with ``norm_weight``: return the heads' outputs as they are.
        norm_weight: float32 ``[v_dim]`` or None.
        eps: of the output norm.
        sigmoid_gate: gate with sigmoid(z), not silu(z).
        k_heads: number of q/k heads; ``v_heads`` is a multiple of it.
        k_dim: width of a q/k head, 1 to 128 or 256.
        tiled: v head h reads k head ``h % k_heads`` (GGUF), not ``h // (v_heads / k_heads)``.
        state: ``[slots, v_heads, v_dim, k_dim]``, float32 or bfloat16 (rounded after each row, so
            that a block gives the bits of single rows), slot stride free; written.
        slots: int32 ``[sequences]``; 0 and below skips the sequence: zero rows, nothing written.
        has_state: int32 ``[sequences]``; 0 starts from zeros and does not read the slot.
        cu_seqlens: int32 ``[sequences + 1]``, row offsets from 0. A sequence without rows is left
            alone; rows after the last offset are padding and come out zero.
        act_mode: 0 float32; 1 planes or 2 Q8_1, packed for :func:`qmm` as by :func:`quant_act`.

    Returns:
        float32 ``[rows, v_heads * v_dim]``, or packed activations.

    Raises:
        RuntimeError: a shape, dtype, device or layout above does not hold; on CPU also a
            slot outside ``state`` or offsets that do not ascend.
            A GPU cannot stop for those: it returns NaN rows and writes nothing for the sequence.

    Source: gated delta networks (arXiv:2412.06464). Formula: ``csrc/core/delta.h``.
    Backends: CPU, CUDA, HIP. Not differentiable.
    """
    return torch.ops.dflash.gdn_prefill.default(
        mixed,
        a,
        b,
        A,
        dt_bias,
        z,
        norm_weight,
        eps,
        sigmoid_gate,
        k_heads,
        k_dim,
        tiled,
        state,
        slots,
        has_state,
        cu_seqlens,
        act_mode,
    )


@torch.library.register_fake("dflash::gdn_prefill")
def _(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    sigmoid_gate: bool,
    k_heads: int,
    k_dim: int,
    tiled: bool,
    state: Tensor,
    slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
    act_mode: int,
) -> Tensor:
    return new_activations(mixed, mixed.shape[0], state.shape[1] * state.shape[2], act_mode)


def gdn_commit(
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    parity: Tensor,
    journal_k: Tensor,
    journal_u: Tensor,
    journal_decay: Tensor,
    tiled: bool,
) -> None:
    """Replay the accepted rows of a journal into the state, for readers of the state itself.

    What :func:`gdn_journal_step` does first, without new rows. The caller then sets
    ``num_accepted`` to 0.

    Args:
        state: ``[slots, v_heads, v_dim, k_dim]``, float32 or bfloat16, slot stride free; written.
        slots: int32 ``[sequences]``; 0 and below skips the sequence.
        num_accepted: int32 ``[sequences]``, 0 to ``journal rows``: rows to replay.
        parity: int32 ``[sequences]``, 0 or 1: the half of the journals to replay from.
        journal_k: float32 ``[2, slots, journal rows, k_heads, k_dim]``.
        journal_u: float32 ``[2, slots, journal rows, v_heads, v_dim]``.
        journal_decay: float32 ``[2, slots, journal rows, v_heads]``.
        tiled: v head h reads k head ``h % k_heads`` (GGUF), not ``h // (v_heads / k_heads)``.

    Returns:
        Nothing.

    Raises:
        RuntimeError: a shape, dtype, device or layout above does not hold; on CPU also a slot
            outside ``state`` or more rows than the journal holds. A GPU cannot stop for those: it
            leaves such a sequence alone.

    Formula: ``csrc/core/delta.h``. Backends: CPU, CUDA, HIP. Not differentiable.
    """
    torch.ops.dflash.gdn_commit.default(
        state, slots, num_accepted, parity, journal_k, journal_u, journal_decay, tiled
    )
