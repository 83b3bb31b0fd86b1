"""GGUF files: reader, writer, tensors and tokenizer."""

from .deferred import DeferredTensor, Stored, retyped, with_row
from .header import GGUFArray, GGUFError, TensorInfo, Value
from .qwen35 import group_v_heads, qwen35_metadata, qwen35_tensors, tile_v_heads
from .reader import GGUFFile
from .tensor import QuantTensor
from .tokenizer import StreamDecoder, Tokenizer, TokenType, tokenizer_from_gguf
from .tokenizer_folder import write_tokenizer
from .types import TYPES, GGMLType
from .vocabulary import tokenizer_metadata
from .writer import Progress, Typed, typed_metadata, write_gguf

__all__ = [
    "TYPES",
    "DeferredTensor",
    "GGMLType",
    "GGUFArray",
    "GGUFError",
    "GGUFFile",
    "Progress",
    "QuantTensor",
    "Stored",
    "StreamDecoder",
    "TensorInfo",
    "TokenType",
    "Tokenizer",
    "Typed",
    "Value",
    "group_v_heads",
    "qwen35_metadata",
    "qwen35_tensors",
    "retyped",
    "tile_v_heads",
    "tokenizer_from_gguf",
    "tokenizer_metadata",
    "typed_metadata",
    "with_row",
    "write_gguf",
    "write_tokenizer",
]
