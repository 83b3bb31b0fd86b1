"""GGUF files: reader, writer, tensors and tokenizer."""

from .header import GGUFArray, GGUFError, TensorInfo, Value
from .reader import GGUFFile
from .tensor import QuantTensor
from .types import TYPES, GGMLType

__all__ = [
    "TYPES",
    "GGMLType",
    "GGUFArray",
    "GGUFError",
    "GGUFFile",
    "QuantTensor",
    "TensorInfo",
    "Value",
]
