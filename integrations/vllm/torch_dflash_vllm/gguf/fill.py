"""Puts the tensors of a GGUF file into vLLM's model, each rank its own part.

vLLM's weight loaders are left out: they know tensors that have a value per column, and names of
published checkpoints. Here every module is given what it multiplies with; a parameter that nobody
filled is an error, as is a tensor that nobody took.
"""

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import GGUFFile, QuantTensor
from torch_dflash.models import DenseConfig, Qwen35Config
from torch_dflash.models.rows import neox_qk, split_qkv
from torch_dflash.models.tensors import target_table

from .method import set_linear, set_table
from .shards import GDNShard, rows, take_columns
from .values import log_decay

__all__ = ["fill_model"]

_log = logging.getLogger("vllm.torch_dflash")


def fill_model(
    model: Any,
    file: GGUFFile,
    config: DenseConfig | Qwen35Config,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fill a model that was built from :func:`~.hf_config.hf_config`.

    Args:
        model: vLLM's, with layers of this pipeline rank.
        file: open.
        config: of the file.
        dtype: of the model.
        device: of the weights.

    Raises:
        CheckpointError: the model and the file do not fit each other.
    """
    _Filler(model, file, config, dtype, device).run()


class _Filler:
    def __init__(
        self,
        model: Any,
        file: GGUFFile,
        config: DenseConfig | Qwen35Config,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.file, self.config = model, file, config
        self.dtype, self.device = dtype, device
        self.filled: set[str] = set()  # names of parameters
        self.taken: set[str] = set()  # names of tensors
        self.rounded: dict[str, int] = {}  # kind of tensor -> how many were rounded to dtype
        self.names = {id(p): n for n, p in model.named_parameters()}
        self.ropes: dict[int, nn.Module] = {}

    def run(self) -> None:
        body = self.model.model
        if _present(body.embed_tokens):
            set_table(body.embed_tokens, self.vocabulary(body.embed_tokens, "token_embd.weight"))
        for i, layer in enumerate(body.layers):
            if i < self.config.num_layers and _present(layer):
                self.layer(layer, i)
        if _present(body.norm):
            self.norm(body.norm, "output_norm.weight")
        head = self.model.lm_head
        if _present(head):
            name = "token_embd.weight" if self.config.tied else "output.weight"
            set_linear(head, [self.vocabulary(head, name)])
        self.check(whole=_present(body.embed_tokens) and _present(head))
        for name, count in self.rounded.items():
            _log.warning(
                "torch-dflash: %s holds float32 values that %s rounds (%d tensors); "
                "--dtype float32 keeps them", name, self.dtype, count,
            )  # fmt: skip

    def check(self, whole: bool) -> None:
        """Everything was filled and, on a rank with all layers, everything was used."""
        left = [n for n, p in self.model.named_parameters() if p.numel() and n not in self.filled]
        if left:
            raise CheckpointError(
                f"{self.file.path}: must fill every parameter of {type(self.model).__name__}, got "
                f"none for {', '.join(left[:8])}; this vLLM's model is not known to torch-dflash"
            )
        tensors = {name for name, _ in target_table(self.config).items()}
        unused = sorted(tensors - self.taken - {"rope_freqs.weight"})
        if whole and unused:
            raise CheckpointError(
                f"{self.file.path}: {type(self.model).__name__} must use every tensor, got no use "
                f"for {', '.join(unused[:8])}"
            )

    def weight(self, name: str) -> QuantTensor:
        self.taken.add(name)
        return self.file.tensor(name)

    def floats(self, name: str) -> Tensor:
        return self.weight(name).to_dense().float()

    def put(self, module: Any, value: Tensor, name: str, *, exact: bool = False) -> None:
        """Set ``module.weight``; see :meth:`parameter`."""
        self.parameter(module, "weight", value, name, exact=exact)

    def parameter(
        self, module: Any, attribute: str, value: Tensor, name: str, *, exact: bool = False
    ) -> None:
        """Set a parameter in its dtype.

        Args:
            module: its owner.
            attribute: where it is.
            value: float32, of its shape.
            name: of the tensor it comes from.
            exact: where the dtype would round, the parameter becomes float32.
        """
        old = getattr(module, attribute)
        if tuple(old.shape) != tuple(value.shape):
            raise CheckpointError(
                f"{self.file.path}: {self.names[id(old)]} must be {list(old.shape)} for "
                f"{name!r}, got {list(value.shape)}"
            )
        dtype = old.dtype
        if not torch.equal(value.to(dtype).float(), value):
            if exact:
                dtype = torch.float32
            else:
                kind = name.split(".", 2)[-1]
                self.rounded[kind] = self.rounded.get(kind, 0) + 1
        self.filled.add(self.names[id(old)])
        if dtype == old.dtype:
            old.data.copy_(value)
        else:
            new = nn.Parameter(value.to(old.device, dtype), requires_grad=False)
            setattr(module, attribute, new)

    def norm(self, module: Any, name: str) -> None:
        """A norm; files of hybrids hold ``1 + w``, and vLLM's norms of hybrids add the one."""
        value = self.floats(name)
        hybrid = isinstance(self.config, Qwen35Config)
        self.put(module, value - 1 if hybrid else value, name, exact=True)

    def vocabulary(self, layer: Any, name: str) -> QuantTensor:
        """A rank's rows of embedding or head, filled up with zeros as vLLM wants."""
        shard = layer.shard_indices
        start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        part = rows(self.weight(name), start, end - start)
        missing = layer.num_embeddings_per_partition - part.rows
        if missing:
            zeros = part.packed.new_zeros(missing, part.packed.shape[1])
            packed = torch.cat([part.packed, zeros])
            part = QuantTensor(packed, part.ggml_type, (packed.shape[0], part.columns))
        return part.to(self.device)

    def linear(
        self,
        layer: Any,
        segments: list[QuantTensor],
        biases: list[Tensor] | None = None,
        like: int = 0,
    ) -> None:
        row_parallel = type(layer).__name__ == "RowParallelLinear"
        wanted = [
            layer.output_size if row_parallel else sum(layer.output_partition_sizes),
            layer.input_size_per_partition if row_parallel else layer.input_size,
        ]
        got = [sum(s.rows for s in segments), segments[0].columns]
        if got != wanted:
            raise CheckpointError(
                f"{self.file.path}: {layer.prefix} must be {wanted} on this rank, got {got}"
            )
        bias = None
        if layer.bias is not None:
            self.filled.add(self.names[id(layer.bias)])
            zeros = torch.zeros(got[0], dtype=torch.float32)  # the default is the model's
            bias = (zeros if biases is None else torch.cat(biases)).to(self.device)
        elif biases is not None:
            raise CheckpointError(f"{self.file.path}: {layer.prefix} must take a bias, got none")
        set_linear(layer, [s.to(self.device) for s in segments], bias, like=like)

    def row_parallel(self, layer: Any, name: str, bias: str | None = None) -> None:
        """A layer whose columns are cut evenly over the ranks."""
        tensor, width = self.weight(name), layer.input_size_per_partition
        start = layer.tp_rank * width
        part = take_columns(tensor, [(start, start + width)], name, self.dtype)
        self.linear(layer, [part], [self.floats(bias)] if bias else None)

    def layer(self, layer: Any, index: int) -> None:
        blk = f"blk.{index}."
        hybrid = isinstance(self.config, Qwen35Config)
        self.norm(layer.input_layernorm, f"{blk}attn_norm.weight")
        second = "post_attention_norm" if hybrid else "ffn_norm"
        self.norm(layer.post_attention_layernorm, f"{blk}{second}.weight")
        gate_up = layer.mlp.gate_up_proj
        size = self.config.intermediate_size // gate_up.tp_size
        start = gate_up.tp_rank * size
        names = (f"{blk}ffn_gate.weight", f"{blk}ffn_up.weight")
        self.linear(gate_up, [rows(self.weight(n), start, size) for n in names])
        self.row_parallel(layer.mlp.down_proj, f"{blk}ffn_down.weight")
        if isinstance(self.config, Qwen35Config) and self.config.layer_kinds[index] == "gdn":
            self.gdn(layer.linear_attn, blk)
        else:
            self.attention(layer.self_attn, blk, index)

    def attention(self, attention: Any, blk: str, index: int) -> None:
        config, qkv = self.config, attention.qkv_proj

        def parts(suffix: str) -> list[QuantTensor]:
            """A rank's q (with gates), k and v."""
            if index in config.fused_qkv:
                q, k, v = split_qkv(config, self.weight(f"{blk}attn_qkv.{suffix}"))
            else:
                q, k, v = (self.weight(f"{blk}attn_{n}.{suffix}") for n in "qkv")
            if isinstance(config, DenseConfig):
                q, k = neox_qk(config, q, k)
            q_size = qkv.num_heads * qkv.head_size
            kv_size = qkv.num_kv_heads * qkv.head_size
            kv_rank = qkv.tp_rank // qkv.num_kv_head_replicas
            return [
                rows(q, qkv.tp_rank * q_size, q_size),
                rows(k, kv_rank * kv_size, kv_size),
                rows(v, kv_rank * kv_size, kv_size),
            ]

        biases = out_bias = None
        if isinstance(config, DenseConfig):
            if config.attention_bias:
                biases = [p.to_dense().float() for p in parts("bias")]
            out_bias = f"{blk}attn_output.bias" if config.output_bias else None
        self.linear(qkv, parts("weight"), biases)
        self.row_parallel(attention.o_proj, f"{blk}attn_output.weight", out_bias)
        if isinstance(config, Qwen35Config) or config.qk_norm:
            self.norm(attention.q_norm, f"{blk}attn_q_norm.weight")
            self.norm(attention.k_norm, f"{blk}attn_k_norm.weight")
        attention.rotary_emb = self.rope(attention.rotary_emb)

    def rope(self, old: Any) -> nn.Module:
        """vLLM's rotary embedding with the frequencies of the file.

        vLLM shares one module between all models with equal settings, so ours is a copy. Another
        rope than the folder's config asks for was asked for by the user, and stays.
        """
        rope = self.config.rope
        wanted = ("RotaryEmbedding", rope.theta, rope.rotary_dim)
        if (type(old).__name__, old.base, old.rotary_dim) != wanted:
            if id(old) not in self.ropes:
                _log.warning(
                    "torch-dflash: the rope is that of --hf-overrides (%s), not the file's (%s)",
                    type(old).__name__, rope,
                )  # fmt: skip
            return self.ropes.setdefault(id(old), old)
        if id(old) not in self.ropes:
            new = copy.deepcopy(old)
            cache = old.cos_sin_cache
            positions = torch.arange(cache.shape[0], dtype=torch.float32)
            angles = positions[:, None] * rope.inv_freq()
            both = torch.cat([angles.cos(), angles.sin()], 1) * rope.attention_scaling
            new.cos_sin_cache = both.to(cache.device, cache.dtype)
            self.ropes[id(old)] = new
        return self.ropes[id(old)]

    def gdn(self, gdn: Any, blk: str) -> None:
        assert isinstance(self.config, Qwen35Config)
        shard = GDNShard(self.config, gdn.tp_rank, gdn.tp_size)
        heads = shard.v_heads()
        qkv = self.weight(f"{blk}attn_qkv.weight").take_rows(shard.qkv_rows())
        z = self.weight(f"{blk}attn_gate.weight").take_rows(shard.v_rows())
        ba = [self.weight(f"{blk}ssm_{n}.weight").take_rows(heads) for n in ("beta", "alpha")]
        self.linear(gdn.in_proj_qkvz, [qkv, z])
        self.linear(gdn.in_proj_ba, ba, like=gdn.in_proj_qkvz.quants.act_mode)
        out, name = gdn.out_proj, f"{blk}ssm_out.weight"
        self.linear(out, [take_columns(self.weight(name), shard.out_columns(), name, self.dtype)])
        if shard.ratio > 1:
            out.tiled_heads = (shard.k_heads, shard.ratio, self.config.value_head_dim)
        conv = self.floats(f"{blk}ssm_conv1d.weight")[shard.qkv_rows()]
        self.put(gdn.conv1d, conv[:, None], f"{blk}ssm_conv1d.weight")
        A = self.floats(f"{blk}ssm_a")[heads]
        self.parameter(gdn, "A_log", log_decay(A), f"{blk}ssm_a")
        gdn.decay = A.to(self.device)  # exact, for DFlashGDN
        self.parameter(gdn, "dt_bias", self.floats(f"{blk}ssm_dt.bias")[heads], f"{blk}ssm_dt.bias")
        self.put(gdn.norm, self.floats(f"{blk}ssm_norm.weight"), f"{blk}ssm_norm.weight")


def _present(module: Any) -> bool:
    """Whether this pipeline rank has the module."""
    return type(module).__name__ != "PPMissingLayer"
