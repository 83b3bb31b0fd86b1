"""vLLM's model loader for GGUF files."""

import logging
import time
from collections import Counter
from dataclasses import replace

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import TYPES, GGUFFile

from .fill import fill_model
from .folder import file_of, open_target
from .shards import check_parallel

__all__ = ["GGUFLoader"]

_log = logging.getLogger("vllm.torch_dflash")


class GGUFLoader(BaseModelLoader):
    """Fills vLLM's own model from the file that ``config.json`` names.

    A drafter inherits the target's load format; one that is no GGUF target is loaded as vLLM does.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to do: the file is here."""

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """Build and fill a model."""
        if file_of(model_config.model) is None:
            ordinary = replace(self.load_config, load_format="auto")
            return get_model_loader(ordinary).load_model(vllm_config, model_config, prefix)
        return super().load_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill a model that was built for ``model_config``.

        Raises:
            GGUFError, CheckpointError: the file cannot be used, or does not fit the model.
        """
        path = file_of(model_config.model)
        if path is None:
            raise CheckpointError(
                f"{model_config.model}: must be a folder made from a GGUF file, got another"
            )
        start = time.perf_counter()
        file, config = open_target(path)
        with file:
            check_parallel(config, file, get_tensor_model_parallel_world_size())
            device = next(model.parameters()).device
            fill_model(model, file, config, model_config.dtype, device)
            kinds = _kinds(file)
        _log.info("torch-dflash: %s in %.1f s: %s", path, time.perf_counter() - start, kinds)


def _kinds(file: GGUFFile) -> str:
    size: Counter[str] = Counter()
    for tensor in file.tensors.values():
        size[TYPES[tensor.ggml_type].name] += tensor.nbytes
    return ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in size.most_common())
