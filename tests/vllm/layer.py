"""In a child process: the Gated DeltaNet layer of a running engine, on steps that are made up.

What a GPU meets and a CPU engine does not: 17 rows, rows that pad a captured graph, outputs without
the fused norm.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SLOTS, COLUMNS = 72, 17  # blocks of the cache; 16 draft tokens and the anchor
LENGTHS, ACCEPTED = [17, 1, 8, 3], [1, 3, 17, 2]
ROWS = sum(LENGTHS)


class Layer:
    """The engine's layer with caches of its own, and inputs for ``ROWS`` rows."""

    def __init__(self, layer: Any, state_dtype: torch.dtype) -> None:
        self.layer = layer
        g = torch.Generator().manual_seed(1)
        conv, state = layer.kv_cache[0], layer.kv_cache[1]
        self.taps, channels = layer.conv_kernel_size, conv.shape[-1]
        _, self.heads, self.width, k_dim = state.shape
        conv = torch.randn(SLOTS, self.taps - 1 + COLUMNS - 1, channels, generator=g)
        state = torch.randn(SLOTS, self.heads, self.width, k_dim, generator=g).mul(0.1)
        self.start = conv, state.to(state_dtype)
        self.mixed = torch.randn(ROWS, channels, generator=g)
        self.z = torch.randn(ROWS, self.heads * self.width, generator=g)
        self.a, self.b = torch.randn(2, ROWS, self.heads, generator=g)
        self.reset()

    def reset(self) -> None:
        """Caches as in the beginning."""
        self.layer.kv_cache = tuple(t.clone() for t in self.start)

    def run(self, rows: Tensor, pad: int = 0, norm: bool = True, **metadata: Any) -> Tensor:
        """One step over some rows and ``pad`` more of garbage."""
        step = {"num_prefills": 0, "num_decodes": 0, "spec_sequence_masks": None, **metadata}
        step["num_actual_tokens"] = len(rows) + pad
        self.layer._metadata = lambda: SimpleNamespace(**step)

        def padded(x: Tensor) -> Tensor:
            return torch.cat([x[rows], x.new_full((pad, x.shape[1]), torch.nan)])

        out = torch.zeros(len(rows) + pad, self.heads, self.width)
        z = padded(self.z) if norm else None
        self.layer._core(padded(self.mixed), padded(self.a), padded(self.b), z, out)
        return out

    def caches(self) -> list[Tensor]:
        """What must be the same but for the null block."""
        return [t[1:].clone() for t in self.layer.kv_cache]


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths: list[int]) -> Tensor:
    return ints([0, *torch.tensor(lengths).cumsum(0).tolist()])


def indices(sequences: int) -> Tensor:
    """Slots of sequences, none of them 0."""
    return torch.arange(1, sequences * COLUMNS + 1, dtype=torch.int32).view(sequences, COLUMNS)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def verify(layer: Layer, pad: int = 0, norm: bool = True) -> tuple[Tensor, list[Tensor]]:
    """All four sequences at once; with padding, two empty ones more, as in a captured graph."""
    layer.reset()
    state, accepted = indices(len(LENGTHS)), ints(ACCEPTED)
    cu = offsets(LENGTHS)
    if pad:
        state = torch.cat([state, torch.zeros(2, COLUMNS, dtype=torch.int32)])
        accepted, cu = torch.cat([accepted, ints([1, 1])]), torch.cat([cu, cu[-1:].repeat(2)])
    out = layer.run(
        torch.arange(ROWS),
        pad,
        norm,
        spec_sequence_masks=torch.ones(len(cu) - 1),
        spec_query_start_loc=cu,
        spec_state_indices_tensor=state,
        num_accepted_tokens=accepted,
    )
    return out, layer.caches()


def one_by_one(layer: Layer) -> Tensor:
    """Every sequence in steps of one row, plain decoding from the state that was accepted."""
    layer.reset()
    outs, first = [], 0
    for s, n in enumerate(LENGTHS):
        for i in range(n):
            accepted = ints([ACCEPTED[s] if i == 0 else 1])
            outs.append(
                layer.run(
                    torch.tensor([first + i]),
                    spec_sequence_masks=torch.ones(1),
                    spec_query_start_loc=ints([0, 1]),
                    num_accepted_tokens=accepted,
                    spec_state_indices_tensor=indices(len(LENGTHS))[s : s + 1],
                )
            )
        first += n
    return torch.cat(outs)


def decode(layer: Layer, pad: int) -> tuple[Tensor, list[Tensor]]:
    """A row of each of three requests without speculation."""
    layer.reset()
    slots = ints([5, 9, 2] + [0] * pad)
    cu = ints([0, 1, 2, 3] + [3] * pad)
    out = layer.run(torch.arange(3), pad, num_decodes=3, non_spec_query_start_loc=cu,
                    non_spec_state_indices_tensor=slots)  # fmt: skip
    return out, layer.caches()


def prefill(layer: Layer, cuts: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The rows as one prompt in slot 7, in chunks that end at ``cuts``."""
    layer.reset()
    outs = []
    for start, end in zip([0, *cuts], [*cuts, ROWS], strict=True):
        outs.append(
            layer.run(
                torch.arange(start, end),
                num_prefills=1,
                num_decode_tokens=0,
                num_prefill_tokens=end - start,
                non_spec_query_start_loc=ints([0, end - start]),
                non_spec_state_indices_tensor=ints([7]),
                has_initial_state=torch.tensor([start > 0]),
            )
        )
    conv, state = layer.layer.kv_cache
    return torch.cat(outs), [conv[7, : layer.taps - 1].clone(), state[7].clone()]


def gated(layer: Layer, x: Tensor) -> Tensor:
    """The output norm in float64."""
    x, z = x.double(), layer.z.view_as(x).double()
    norm = layer.layer.norm
    y = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    return y * torch.nn.functional.silu(z)


def check(model: Any) -> dict[str, Any]:
    """Of both state dtypes: what is equal, and how far the fused norm is from the separate one."""
    found: dict[str, Any] = {}
    original = model.model.layers[0].linear_attn
    caches = original.kv_cache
    for dtype in (torch.float32, torch.bfloat16):
        layer = Layer(original, dtype)
        out, after = verify(layer)
        padded, padded_after = verify(layer, pad=6)
        plain, plain_after = decode(layer, 0)
        plain_padded, plain_padded_after = decode(layer, 5)
        whole, whole_after = prefill(layer, [])
        parts, parts_after = prefill(layer, [2, 3, 20])
        bare, _ = verify(layer, norm=False)
        error = (out.double() - gated(layer, bare)).abs().max() / out.abs().max()
        found[str(dtype)] = {
            "padding changes nothing": torch.equal(padded[:ROWS], out)
            and same(after, padded_after),
            "padding is zero": not padded[ROWS:].any() and not plain_padded[3:].any(),
            "rows do not see each other": torch.equal(one_by_one(layer), out),
            "decode with padding": torch.equal(plain_padded[:3], plain)
            and same(plain_after, plain_padded_after),
            "prefill in chunks": torch.equal(parts, whole) and same(parts_after, whole_after),
            "error of the norm": float(error),
        }
    original.kv_cache = caches
    del original._metadata  # the method shows again
    return found


def generate_and_check(engine: dict[str, Any], jobs: dict[str, Any]) -> dict[str, Any]:
    """As ``generate.named``, then :func:`check` on the engine's own layer."""
    from generate import build, features, sample

    llm = build(engine)
    results = {name: sample(llm, **job) for name, job in jobs.items()}
    [layer] = llm.apply_model(check)
    again = {name: sample(llm, **job) for name, job in jobs.items()}
    return {"jobs": results, "again": again, "layer": layer, "features": features()}
