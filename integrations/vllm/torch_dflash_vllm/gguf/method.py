"""vLLM's quantization method over ``torch.ops.dflash``: linear layers, embedding and head.

A layer holds its weights as the repacked quants of its parts, which may be of different types and
are multiplied in one call. The loader hands them over; nothing here reads files.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from torch_dflash import ops
from torch_dflash.gguf import QuantTensor
from torch_dflash.nn import QuantEmbedding, QuantLinear

from .hf_config import QUANTIZATION
from .product import linear, multiply, prefill_mode

__all__ = ["GGUFConfig", "GGUFLinearMethod", "GGUFVocabularyMethod", "set_linear", "set_table"]


class GGUFConfig(QuantizationConfig):
    """``quantization_config`` of a folder made from a GGUF file.

    Args:
        file: the GGUF file.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def get_name(self) -> str:
        """The method's name."""
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the model around the weights."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Least CUDA capability that the kernels are compiled for."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the mark stands in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "GGUFConfig":
        """From ``quantization_config``."""
        return cls(config["file"])

    def get_quant_method(self, layer: Any, prefix: str) -> "GGUFLinearMethod | None":
        """The method of a linear layer, an embedding or a head; None for anything else."""
        if isinstance(layer, VocabParallelEmbedding):
            return GGUFVocabularyMethod()
        return GGUFLinearMethod() if isinstance(layer, LinearBase) else None


class GGUFLinearMethod(LinearMethodBase):
    """``x W^T + b`` over quants of any types, of a decoder layer.

    A row's result depends on that row alone, whatever else is in the batch, but where prefills go
    through a library's product (see :mod:`.product`).
    """

    requires_device_loading = False

    def __init__(self) -> None:
        speculation = get_current_vllm_config().speculative_config
        drafted = speculation.num_speculative_tokens if speculation else None
        self.decode_rows = 1 + (drafted or 0)
        self.prefill = prefill_mode()

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """Nothing yet: what a layer will hold depends on the file."""
        layer.register_parameter("weight", None)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply.

        Args:
            layer: after :func:`set_linear`.
            x: ``[..., columns]``.
            bias: float32 ``[rows]`` or None.

        Returns:
            ``[..., rows]`` in the dtype of ``x``.
        """
        w = layer.quants
        flat = _tiled(layer, x).reshape(-1, w.columns)
        arguments = (flat, w.weight, w.types, w.rows, w.columns, w.act_mode, bias)
        if self.prefill == "exact":
            y = multiply(*arguments)
        else:
            y = linear(*arguments, self.decode_rows, self.prefill == "gemm")
        return y.view(*x.shape[:-1], y.shape[-1])


class GGUFVocabularyMethod(GGUFLinearMethod):
    """An embedding or a head: rows of a quantized table, or the product of rows that are sampled.

    ``weight`` is an empty matrix as wide as the rows: vLLM compares width and values of a drafter's
    own embedding and head with the target's, and finds these different.
    """

    def __init__(self) -> None:
        self.prefill = "exact"  # the rows of a prefill that are sampled are few

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """No values yet, see the class."""
        layer.weight = nn.Parameter(torch.empty(0, layer.embedding_dim), requires_grad=False)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """int64 ids ``[...]`` -> ``[..., hidden]`` in the model's dtype."""
        table = layer.table
        rows = ops.embed_rows(table.packed, table.ggml_type, ids.reshape(-1), 1.0)
        return rows.to(layer.params_dtype).view(*ids.shape, table.columns)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> nn.Module:
        """The head stays a layer of its own: it multiplies what the embedding looks up."""
        return layer


def _tiled(layer: Any, x: Tensor) -> Tensor:
    """Heads as the columns of an output projection have them; see ``GDNShard``."""
    heads: tuple[int, int, int] | None = getattr(layer, "tiled_heads", None)
    if heads is None:
        return x
    return x.reshape(-1, *heads).transpose(1, 2)


def set_linear(
    layer: Any, segments: list[QuantTensor], bias: Tensor | None = None, *, like: int = 0
) -> None:
    """Give a layer its weights.

    Args:
        layer: of :class:`GGUFLinearMethod`.
        segments: its parts in order, on the layer's device.
        bias: float32 ``[rows]``, for a layer that was built with one.
        like: activations that a neighbour of the same input reads: float weights read them too,
            so that a layer that vLLM splits in two counts like one.
    """
    quants = QuantLinear(segments)
    quants.act_mode = max(quants.act_mode, like)
    layer.quants = quants
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)


def set_table(layer: VocabParallelEmbedding, table: QuantTensor) -> None:
    """Give an embedding its rows; one that was built without quantization is turned into ours."""
    if not isinstance(layer.quant_method, GGUFVocabularyMethod):
        layer.quant_method = GGUFVocabularyMethod()
        layer.weight = nn.Parameter(layer.weight.new_empty(0, table.columns), requires_grad=False)
        layer.use_fused_embedding = False
    layer.table = QuantEmbedding(table)
