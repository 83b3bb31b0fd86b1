"""Native targets: hybrids (``qwen35``) and dense models (``qwen3``, ``llama``) from GGUF files."""

from .build import load_target
from .config import DenseConfig, Qwen35Config
from .decoder import Decoder
from .from_gguf import read_target_config

__all__ = ["Decoder", "DenseConfig", "Qwen35Config", "load_target", "read_target_config"]
