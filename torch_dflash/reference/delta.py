"""The gated delta rule, one row after another, as the paper writes it (arXiv:2412.06464)."""

import torch
from torch import Tensor

__all__ = ["delta_row", "delta_rule", "gates", "k_heads_of", "l2norm"]


def softplus(x: Tensor) -> Tensor:
    """``log(1 + e^x)``; above 20 it is x, the threshold that every engine uses."""
    return torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))


def gates(a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay ``exp(A softplus(a + dt_bias))`` and write strength ``sigmoid(b)``, in float64."""
    decay = (A.double() * softplus(a.double() + dt_bias.double())).exp()
    return decay, b.double().sigmoid()


def l2norm(x: Tensor) -> Tensor:
    """Unit length over the last dimension, in float64; eps 1e-6 below the root."""
    x = x.double()
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def k_heads_of(v_heads: int, k_heads: int, tiled: bool) -> list[int]:
    """The k head of each v head: grouped (Hugging Face) or tiled (GGUF)."""
    each = v_heads // k_heads
    return [h % k_heads if tiled else h // each for h in range(v_heads)]


def delta_row(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """One row of one head: forget, write what the key does not yet give, read with the query.

    Args:
        state: ``[v_dim, k_dim]``.
        q: ``[k_dim]``, normalised and scaled.
        k: ``[k_dim]``, normalised.
        v: ``[v_dim]``.
        decay: a number.
        strength: a number.

    Returns:
        The new state and the output ``[v_dim]``.
    """
    state = decay * state
    missing = v - state @ k
    state = state + torch.outer(strength * missing, k)
    return state, state @ q


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    state: Tensor,
    tiled: bool = False,
    state_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Every head over all rows.

    Args:
        q: ``[rows, k_heads, k_dim]``, raw.
        k: ``[rows, k_heads, k_dim]``, raw.
        v: ``[rows, v_heads, v_dim]``.
        decay: ``[rows, v_heads]``.
        strength: ``[rows, v_heads]``.
        state: ``[v_heads, v_dim, k_dim]``.
        tiled: the order of the v heads, see :func:`k_heads_of`.
        state_dtype: what the state is rounded to after every row.

    Returns:
        Outputs ``[rows, v_heads, v_dim]`` and the states after every row
        ``[rows, v_heads, v_dim, k_dim]``, float64.
    """
    rows, v_heads, v_dim = v.shape
    q, k = l2norm(q) / q.shape[-1] ** 0.5, l2norm(k)
    v, state = v.double(), state.double()
    outputs = torch.empty(rows, v_heads, v_dim, dtype=torch.float64, device=v.device)
    states = torch.empty(rows, *state.shape, dtype=torch.float64, device=v.device)
    for h, kh in enumerate(k_heads_of(v_heads, k.shape[1], tiled)):
        s = state[h]
        for t in range(rows):
            s, _ = delta_row(s, q[t, kh], k[t, kh], v[t, h], decay[t, h], strength[t, h])
            s = s.to(state_dtype).double()
            outputs[t, h] = s @ q[t, kh]
            states[t, h] = s
    return outputs, states
