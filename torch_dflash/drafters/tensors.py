"""The closed set of tensors of a drafter: names, shapes, and what may be absent."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from ..fields import CheckpointError, shape_text
from .config import DrafterConfig, Kind

__all__ = ["TensorTable", "check_tensors", "detect_kind", "layer_count", "tensor_table"]

Shapes = Mapping[str, tuple[int, ...]]

_SELECTOR: Final = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "candidate_selector.hidden_projection.weight",
)
_CONV: Final = (
    "attention_conv.base_kernel",
    "attention_conv.kernel_projection.weight",
    "mlp_conv.base_kernel",
    "mlp_conv.kernel_projection.weight",
)
_MARKOV: Final = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


@dataclass(frozen=True)
class TensorTable:
    """Row-major shapes by logical name.

    Attributes:
        required: must be in the file.
        optional: may be; a drafter without them uses its target's, or a zero bias.
    """

    required: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]

    @property
    def num_parameters(self) -> int:
        """Values in the required tensors."""
        return sum(math.prod(shape) for shape in self.required.values())


def tensor_table(config: DrafterConfig) -> TensorTable:
    """Every tensor that a drafter of this config has."""
    c = config
    hidden, ffn = c.hidden_size, c.intermediate_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    required: dict[str, tuple[int, ...]] = {}
    if c.use_aux_hidden_state:
        required["fc.weight"] = (hidden, c.target_hidden_columns)
    required |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(c.num_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "self_attn.q_norm.weight": (c.head_dim,),
            "self_attn.k_norm.weight": (c.head_dim,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if c.attention_bias:
            for name, rows in (("q", q), ("k", kv), ("v", kv), ("o", hidden)):
                layer[f"self_attn.{name}_proj.bias"] = (rows,)
        if c.attention_sinks:
            layer["self_attn.attention_sink_bias"] = (c.num_heads,)
        if c.conv_kernel_size is not None and c.conv_group_size is not None:
            taps, groups = c.conv_kernel_size, hidden // c.conv_group_size
            for conv in ("attention_conv", "mlp_conv"):
                layer[f"{conv}.base_kernel"] = (2, taps, hidden)
                layer[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
        required |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if c.selector_rank is not None:
        codebook = (c.vocab_size, c.selector_rank)
        required |= dict(
            zip(_SELECTOR, (codebook, codebook, (c.selector_rank, hidden)), strict=True)
        )
    optional: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, hidden)}
    head = {"lm_head.weight": (c.draft_vocab_size, hidden), "d2t": (c.draft_vocab_size,)}
    (required if c.draft_vocab_size < c.vocab_size else optional).update(head)
    if c.markov_rank is not None:
        required |= _markov(c, c.markov_rank)
        if c.confidence is not None:
            optional["confidence_head.proj.bias"] = (1,)
    return TensorTable(required, optional)


def _markov(c: DrafterConfig, rank: int) -> dict[str, tuple[int, ...]]:
    head: dict[str, tuple[int, ...]] = {
        _MARKOV[0]: (c.vocab_size, rank),
        _MARKOV[1]: (c.draft_vocab_size, rank),
    }
    if c.markov_head_type == "gated":
        head["markov_head.gate_proj.weight"] = (rank, c.hidden_size + rank)
        head["markov_head.gate_proj.bias"] = (rank,)
    elif c.markov_head_type == "rnn":
        head["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + c.hidden_size)
        head["markov_head.joint_proj.bias"] = (3 * rank,)
    if c.confidence is not None:
        width = c.hidden_size + (rank if c.confidence == "hidden+markov" else 0)
        head["confidence_head.proj.weight"] = (1, width)
    return head


def layer_count(shapes: Shapes) -> int:
    """Layers that a file holds: one more than the highest index."""
    found = (re.match(r"layers\.(\d+)\.", name) for name in shapes)
    return max((int(m[1]) + 1 for m in found if m), default=0)


def detect_kind(shapes: Shapes, where: str) -> Kind:
    """Tell the drafter by its tensors.

    Raises:
        CheckpointError: a set that is only partly there, or no drafter at all.
    """
    markov = [n for n in _MARKOV if n in shapes]
    selector = [n for n in _SELECTOR if n in shapes]
    conv = [n for n in shapes if n.startswith("layers.") and n.endswith(_CONV)]
    if markov and (selector or conv):
        _fail(where, f"a Markov head and {(selector or conv)[0]!r} cannot be in one drafter")
    if markov:
        _whole(where, "DSpark's Markov head", _MARKOV, shapes)
        return "dspark"
    if selector or conv:
        if not conv:
            _fail(where, f"DFlash2 must have convolutions in its layers, got only {selector[0]!r}")
        _whole(where, "DFlash2's candidate selector", _SELECTOR, shapes)
        wanted = [f"layers.{i}.{c}" for i in range(layer_count(shapes)) for c in _CONV]
        _whole(where, "DFlash2's convolutions", wanted, shapes)
        return "dflash2"
    for name in shapes:
        if name.startswith(("markov_head.", "confidence_head.")):
            _fail(where, f"{name!r} must come with {_MARKOV[0]!r}, got a file without it")
    if "hidden_norm.weight" in shapes and layer_count(shapes):
        return "dflash"
    names = ", ".join([*shapes][:5]) or "no tensor"
    _fail(where, f"must hold hidden_norm.weight and layers.*, as a drafter has, got {names}")


def _whole(where: str, what: str, wanted: "tuple[str, ...] | list[str]", shapes: Shapes) -> None:
    missing = [n for n in wanted if n not in shapes]
    if missing:
        _fail(where, f"{what} must be whole, got all but {_list(missing)}")


def check_tensors(config: DrafterConfig, shapes: Shapes, where: str) -> None:
    """Check names and shapes of a whole file against its config.

    Args:
        config: resolved config.
        shapes: logical name -> row-major shape.
        where: the file, for messages.

    Raises:
        CheckpointError: an unknown tensor, a missing one, or a wrong shape; unknown and missing
            ones are listed.
    """
    table = tensor_table(config)
    known = table.required | table.optional
    unknown = [n for n in shapes if n not in known]
    if unknown:
        _fail(
            where,
            f"a {config.kind} drafter must hold only its own tensors, got {len(unknown)} unknown: "
            f"{_list(unknown)}",
        )
    missing = [n for n in table.required if n not in shapes]
    if missing:
        _fail(
            where,
            f"a {config.kind} drafter of {config.num_layers} layers must hold {len(table.required)}"
            f" tensors, got all but {len(missing)}: {_list(missing)}",
        )
    for name, shape in shapes.items():
        if tuple(shape) != known[name]:
            _fail(
                where,
                f"tensor {name!r} must be {shape_text(known[name])}, got {shape_text(shape)}",
            )
    if ("d2t" in shapes) and ("lm_head.weight" not in shapes):
        _fail(where, "d2t must come with lm_head.weight, got a file without it")


def _list(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _fail(where: str, text: str) -> NoReturn:
    raise CheckpointError(f"{where}: {text}")
