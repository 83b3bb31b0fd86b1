"""From a GGUF file to a running target."""

from collections.abc import Callable, Container
from os import PathLike
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from ..gguf import GGUFFile, QuantTensor
from ..nn import ACT_PLANES, ACT_Q8_1, Vocabulary
from .config import DenseConfig, Qwen35Config
from .decoder import Decoder, DecoderLayer
from .from_gguf import read_target_config
from .layers import Attention, FeedForward, GatedDeltaNet
from .rows import neox_qk, split_qkv
from .state import GDNShape, StateKind

__all__ = ["Activations", "TensorSource", "build_target", "load_target"]

Config = DenseConfig | Qwen35Config
Activations = Literal["planes", "q8_1"]
_PACKED_MODES: Final = {"planes": ACT_PLANES, "q8_1": ACT_Q8_1}


class TensorSource(Protocol):
    """Where a target's tensors come from, under their GGUF names: an open file, as a rule."""

    @property
    def tensors(self) -> Container[str]:
        """Names of all tensors."""

    def tensor(self, name: str) -> QuantTensor:
        """The tensor of that name."""


class _Block:
    """The tensors of one layer, and the activations that they read where they are quantized."""

    def __init__(self, file: TensorSource, index: int, packed_mode: int) -> None:
        self._file, self._prefix, self.packed_mode = file, f"blk.{index}.", packed_mode

    def weight(self, name: str) -> QuantTensor:
        return self._file.tensor(f"{self._prefix}{name}")

    def floats(self, name: str) -> Tensor:
        return self.weight(name).to_dense().float()

    def optional(self, name: str) -> QuantTensor | None:
        full = f"{self._prefix}{name}"
        return self._file.tensor(full) if full in self._file.tensors else None

    def optional_floats(self, name: str) -> Tensor | None:
        found = self.optional(name)
        return None if found is None else found.to_dense().float()


def load_target(
    path: str | PathLike[str],
    *,
    state: StateKind = "journal",
    kv_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    activations: Activations = "planes",
) -> Decoder:
    """Load a target.

    Args:
        path: ``qwen35``, ``qwen3`` or ``llama`` GGUF.
        state: how a hybrid's recurrent state is rolled back.
        kv_dtype: dtype of the K and V caches: float32, float16 or bfloat16.
        state_dtype: dtype of the GDN states: float32 or bfloat16.
        activations: what quantized weights are multiplied with: ``planes``, 16 bits with an error
            of about 1e-8 of their energy, or ``q8_1``, rounded to 8 bits as llama.cpp rounds them.

    Returns:
        the model; its ``config`` is what the file says.

    Raises:
        GGUFError: the file is damaged.
        CheckpointError: its architecture, keys or tensors are not supported.
        ValueError: a dtype, state kind or kind of activations that does not exist.
    """
    with GGUFFile.open(path) as file:
        return build_target(
            read_target_config(file),
            file,
            state=state,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            activations=activations,
        )


def build_target(
    config: Config,
    source: TensorSource,
    *,
    state: StateKind = "journal",
    kv_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    activations: Activations = "planes",
) -> Decoder:
    """What :func:`load_target` makes of a file: a target of this config.

    Args:
        config: of the target.
        source: has every tensor that the config asks for (``models.tensors.target_table``).
        state, kv_dtype, state_dtype, activations: as of :func:`load_target`.

    Raises:
        ValueError: a dtype, state kind or kind of activations that does not exist.
    """
    _check("state", state, ("journal", "snapshots"))
    _check("kv_dtype", kv_dtype, (torch.float32, torch.float16, torch.bfloat16))
    _check("state_dtype", state_dtype, (torch.float32, torch.bfloat16))
    _check("activations", activations, tuple(_PACKED_MODES))
    packed_mode = _PACKED_MODES[activations]
    gdn = None
    if isinstance(config, Qwen35Config):
        gdn = GDNShape(
            k_heads=config.num_key_heads,
            v_heads=config.num_value_heads,
            k_dim=config.key_head_dim,
            v_dim=config.value_head_dim,
            taps=config.conv_kernel,
        )
    head = None if config.tied else source.tensor("output.weight")
    model = Decoder(
        Vocabulary(source.tensor("token_embd.weight"), head, packed_mode),
        [_layer(config, gdn, _Block(source, i, packed_mode), i) for i in range(config.num_layers)],
        source.tensor("output_norm.weight").to_dense().float(),
        config.rms_norm_eps,
        gdn,
        kv_dtype,
        state,
        state_dtype,
    )
    model.config = config
    return model


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        known = ", ".join(str(a) for a in allowed)
        raise ValueError(f"load_target: {name} must be one of {known}, got {value}")


def _layer(config: Config, gdn: GDNShape | None, block: _Block, index: int) -> DecoderLayer:
    mixer: Attention | GatedDeltaNet
    if gdn is not None and config.layer_kinds[index] == "gdn":
        mixer = _gated_delta_net(config, gdn, block)
    else:
        mixer = _attention(config, block, index)
    ffn_norm = "post_attention_norm" if isinstance(config, Qwen35Config) else "ffn_norm"
    gate, up, down = (block.weight(f"ffn_{n}.weight") for n in ("gate", "up", "down"))
    ffn = FeedForward(gate, up, down, block.packed_mode)
    return DecoderLayer(
        mixer,
        block.floats("attn_norm.weight"),
        ffn,
        block.floats(f"{ffn_norm}.weight"),
        config.rms_norm_eps,
    )


def _attention(config: Config, block: _Block, index: int) -> Attention:
    def parts(suffix: str, get: Callable[[str], QuantTensor]) -> list[QuantTensor]:
        if index in config.fused_qkv:
            q, k, v = split_qkv(config, get(f"attn_qkv.{suffix}"))
        else:
            q, k, v = (get(f"attn_{n}.{suffix}") for n in "qkv")
        if isinstance(config, DenseConfig):
            q, k = neox_qk(config, q, k)
        return [q, k, v]

    bias = None
    if isinstance(config, DenseConfig) and config.attention_bias:
        bias = torch.cat([p.to_dense().float() for p in parts("bias", block.weight)])
    return Attention(
        parts("weight", block.weight),
        block.weight("attn_output.weight"),
        block.optional_floats("attn_q_norm.weight"),
        block.optional_floats("attn_k_norm.weight"),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        isinstance(config, Qwen35Config),
        config.rms_norm_eps,
        config.rope,
        bias,
        block.optional_floats("attn_output.bias"),
        block.packed_mode,
    )


def _gated_delta_net(config: Config, gdn: GDNShape, block: _Block) -> GatedDeltaNet:
    names = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
    return GatedDeltaNet(
        [block.weight(f"{n}.weight") for n in names],
        block.weight("ssm_out.weight"),
        block.floats("ssm_conv1d.weight"),
        block.floats("ssm_a"),
        block.floats("ssm_dt.bias"),
        block.floats("ssm_norm.weight"),
        gdn,
        config.rms_norm_eps,
        block.packed_mode,
    )
