"""The two ends of a model: token ids to rows, rows to logits."""

from torch import Tensor

from .. import ops
from ..gguf.tensor import QuantTensor
from .linear import ACT_PLANES, QuantLinear
from .module import Module

__all__ = ["QuantEmbedding", "Vocabulary"]


class QuantEmbedding(Module):
    """Rows of a quantized table, as they lie in the file.

    Args:
        table: ``[vocabulary, hidden]`` of any GGUF type.
    """

    packed: Tensor

    def __init__(self, table: QuantTensor) -> None:
        super().__init__()
        self.register_buffer("packed", table.packed, persistent=False)
        self.ggml_type, self.rows, self.columns = table.ggml_type, table.rows, table.columns

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """int64 ``[rows]`` -> float32 ``[rows, hidden]``, times ``scale``."""
        return ops.embed_rows(self.packed, self.ggml_type, ids, scale)


class Vocabulary(Module):
    """Embedding and output head that a target owns and its drafters share.

    Args:
        embedding: ``[vocabulary, hidden]``.
        head: ``[vocabulary, hidden]``; None ties it to the embedding.
        packed_mode: activations of a quantized head, as of :class:`QuantLinear`.
    """

    def __init__(
        self,
        embedding: QuantTensor,
        head: QuantTensor | None = None,
        packed_mode: int = ACT_PLANES,
    ) -> None:
        super().__init__()
        self.embed = QuantEmbedding(embedding)
        segments = [embedding if head is None else head]
        self.head = QuantLinear(segments, packed_mode=packed_mode)
        self.size = self.head.rows[0]
