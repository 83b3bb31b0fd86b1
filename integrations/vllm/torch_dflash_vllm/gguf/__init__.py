"""GGUF targets: ``vllm serve model.gguf`` for ``qwen35``, ``qwen3`` and ``llama`` files.

A file becomes a folder with config and tokenizer (:mod:`.folder`), vLLM builds its own model from
that, and the loader (:mod:`.loader`) fills it with quants that are multiplied as they are
(:mod:`.method`).
"""

__all__ = ["apply"]


def apply() -> str:
    """Register quantization method and loader, and take ``.gguf`` models; idempotent."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )
    from vllm.model_executor.model_loader import (
        _LOAD_FORMAT_TO_MODEL_LOADER,
        register_model_loader,
    )

    from .engine_args import install
    from .hf_config import QUANTIZATION
    from .loader import GGUFLoader
    from .method import GGUFConfig

    if QUANTIZATION not in QUANTIZATION_METHODS:
        register_quantization_config(QUANTIZATION)(GGUFConfig)
    if QUANTIZATION not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(QUANTIZATION)(GGUFLoader)
    install(EngineArgs)
    return f"models that are .gguf files, quantization and load format {QUANTIZATION}"
