"""Tensor names: what every file calls them, and the one name each has in here.

The logical name is the published Hugging Face one without a prefix, such as
``layers.0.self_attn.q_proj.weight``.
"""

import re
from collections.abc import Iterable
from typing import Final, Literal

from ..fields import CheckpointError

__all__ = ["Layout", "gguf_name", "logical_names", "upstream_name"]

Layout = Literal["upstream", "lucebox"]

# logical -> names in GGUF files: upstream first, then lucebox's
_GGUF: Final = {
    "fc.weight": ("fc.weight", "dflash.fc.weight", "dflash_fc.weight"),
    "hidden_norm.weight": (
        "enc.output_norm.weight",
        "dflash.hidden_norm.weight",
        "dflash_hidden_norm.weight",
    ),
    "norm.weight": ("output_norm.weight",),
    "embed_tokens.weight": ("token_embd.weight",),
    "lm_head.weight": ("output.weight",),
    "d2t": ("d2t",),
    "candidate_selector.predecessor_codebook": (
        "selector_predecessor.weight",
        "dflash.selector.pred_cb",
    ),
    "candidate_selector.successor_codebook": (
        "selector_successor.weight",
        "dflash.selector.succ_cb",
    ),
    "candidate_selector.hidden_projection.weight": (
        "selector_hidden.weight",
        "dflash.selector.hproj.weight",
    ),
    "markov_head.markov_w1.weight": ("markov_w1.weight", "dflash.dspark.markov.w1"),
    "markov_head.markov_w2.weight": ("markov_w2.weight", "dflash.dspark.markov.w2"),
    "markov_head.gate_proj.weight": ("markov_gate.weight",),
    "markov_head.gate_proj.bias": ("markov_gate.bias",),
    "markov_head.joint_proj.weight": ("markov_joint.weight",),
    "markov_head.joint_proj.bias": ("markov_joint.bias",),
    "confidence_head.proj.weight": ("conf_proj.weight", "dflash.dspark.confidence.weight"),
    "confidence_head.proj.bias": ("conf_proj.bias", "dflash.dspark.confidence.bias"),
}

# the same inside a layer: behind "layers.{i}." and "blk.{i}."
_GGUF_LAYER: Final = {
    "input_layernorm.weight": ("attn_norm.weight",),
    "post_attention_layernorm.weight": ("ffn_norm.weight",),
    "self_attn.q_proj.weight": ("attn_q.weight",),
    "self_attn.k_proj.weight": ("attn_k.weight",),
    "self_attn.v_proj.weight": ("attn_v.weight",),
    "self_attn.o_proj.weight": ("attn_output.weight",),
    "self_attn.q_proj.bias": ("attn_q.bias",),
    "self_attn.k_proj.bias": ("attn_k.bias",),
    "self_attn.v_proj.bias": ("attn_v.bias",),
    "self_attn.o_proj.bias": ("attn_output.bias",),
    "self_attn.q_norm.weight": ("attn_q_norm.weight",),
    "self_attn.k_norm.weight": ("attn_k_norm.weight",),
    "self_attn.attention_sink_bias": ("attn_sinks.weight", "attn_sinks"),
    "mlp.gate_proj.weight": ("ffn_gate.weight",),
    "mlp.up_proj.weight": ("ffn_up.weight",),
    "mlp.down_proj.weight": ("ffn_down.weight",),
    "attention_conv.base_kernel": ("attn_conv_base", "attn_conv.base", "attn_conv_base.weight"),
    "attention_conv.kernel_projection.weight": ("attn_conv_proj.weight", "attn_conv.proj.weight"),
    "mlp_conv.base_kernel": ("ffn_conv_base", "ffn_conv.base", "ffn_conv_base.weight"),
    "mlp_conv.kernel_projection.weight": ("ffn_conv_proj.weight", "ffn_conv.proj.weight"),
}

_FROM_GGUF: Final = {name: logical for logical, names in _GGUF.items() for name in names}
_FROM_GGUF_LAYER: Final = {n: logical for logical, names in _GGUF_LAYER.items() for n in names}

# spellings of Hugging Face files, tried in this order on each name
_HF_RULES: Final = (
    (r"^(?:model|draft_model)\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),
    (r"^(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$", r"\1"),
    (r"^(?:dspark_)?(?:markov_head\.)?markov_(w[12])\.weight$", r"markov_head.markov_\1.weight"),
    (r"^dspark_markov_head\.", "markov_head."),
    (r"^(?:dspark_confidence_head|confidence_proj)\.(weight|bias)$", r"confidence_head.proj.\1"),
)

# kept in files for training or for engines, of no use to a drafter that runs
_IGNORED: Final = re.compile(
    r"t2d|.*rotary_emb\.inv_freq|verifier_lm_head\.weight|verifier_norm\.weight|mask_embedding"
)

# what only another drafter has: pattern -> its name. Checked before anything is called unknown.
_REFUSED: Final = (
    (r"mtp\.|.*(?:attn_q_a|q_a_proj)\.|.*output_hc_|.*hyper_connection", "DeepSeek-V4 DSpark"),
    (r"(?:dflash\.)?domino[._]|embed_proj\.|prefix_gru\.", "Domino"),
    (
        r".*\.(?:qkv_proj|g_proj)\.|blk\.\d+\.attn_gate\.|(?:dflash\.)?aux_hidden_norms?\.",
        "Laguna DFlash",
    ),
    (r"log_snr_", "log-SNR conditioned DFlash"),
    (
        r"rope_freqs\.|.*(?:layer_output_scale|post_ffw_norm|layer_scalar|"
        r"(?:pre|post)_feedforward_layernorm)",
        "Gemma 4 DSpark",
    ),
    (r".*\.(?:scale|weight_scale|input_scale)$", "per-tensor scales (NVFP4, FP8)"),
    (r".*\bmask_hidden", "a learned mask state (mask_hidden)"),
)


def logical_names(where: str, names: Iterable[str], gguf: bool) -> dict[str, str]:
    """Map every tensor of a file to its logical name.

    Args:
        where: the file, for messages.
        names: the tensors of the file.
        gguf: whether they are GGUF names.

    Returns:
        logical name -> name in the file. Tensors that are safe to ignore are left out; unknown
        ones keep their own name, for :func:`check_tensors` to list.

    Raises:
        CheckpointError: a tensor belongs to a drafter that is not supported, or two tensors mean
            the same.
    """
    names = list(names)
    for name in names:
        for pattern, what in _REFUSED:
            if re.match(pattern, name.removeprefix("model.")):
                raise CheckpointError(
                    f"{where}: tensor {name!r} belongs to {what}, which is not supported; "
                    "use a DFlash, DFlash2 or dense DSpark drafter"
                )
    found: dict[str, str] = {}
    for name in names:
        logical = _from_gguf(where, name, names) if gguf else _from_hf(name)
        if logical is None:
            continue
        if logical in found:
            raise CheckpointError(
                f"{where}: tensors {found[logical]!r} and {name!r} both mean {logical!r}"
            )
        found[logical] = name
    return found


def gguf_name(logical: str, layout: Layout) -> str | None:
    """Name of a tensor in a GGUF file; None: the format has no place for it.

    Where lucebox has no name of its own, its files get upstream's.

    >>> gguf_name("fc.weight", "upstream"), gguf_name("fc.weight", "lucebox")
    ('fc.weight', 'dflash.fc.weight')
    """
    layer = re.match(r"layers\.(\d+)\.(.+)", logical)
    names = _GGUF_LAYER.get(layer[2]) if layer else _GGUF.get(logical)
    if names is None:
        return None
    name = names[0]
    if layout == "lucebox":  # its own names have a dot where upstream's have an underscore
        name = next((n for n in names[1:] if "." in n.removesuffix(".weight")), name)
    return f"blk.{layer[1]}.{name}" if layer else name


def upstream_name(logical: str) -> str | None:
    """Name of a tensor in an upstream ``dflash`` GGUF; None: the format has no place for it.

    >>> upstream_name("layers.0.mlp.up_proj.weight")
    'blk.0.ffn_up.weight'
    """
    return gguf_name(logical, "upstream")


def _from_hf(name: str) -> str | None:
    for pattern, to in _HF_RULES:
        name = re.sub(pattern, to, name)
    return None if _IGNORED.fullmatch(name) else name


def _from_gguf(where: str, name: str, names: list[str]) -> str | None:
    if _IGNORED.fullmatch(name):
        return None
    layer = re.match(r"blk\.(\d+)\.(.+)", name)
    if not layer:
        return _FROM_GGUF.get(name, name)
    i, rest = layer.groups()
    if rest == "post_attention_norm.weight":
        # lucebox: the norm before the FFN. Beside an ffn_norm: Gemma's extra norm after attention.
        if f"blk.{i}.ffn_norm.weight" in names:
            raise CheckpointError(
                f"{where}: tensor {name!r} beside ffn_norm belongs to Gemma 4 DSpark, which is "
                "not supported; use a DFlash, DFlash2 or dense DSpark drafter"
            )
        rest = "ffn_norm.weight"
    logical = _FROM_GGUF_LAYER.get(rest)
    return f"layers.{i}.{logical}" if logical else name
