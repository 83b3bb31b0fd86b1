"""``LLM(model="x.gguf")`` and ``vllm serve x.gguf``: the file becomes a folder before vLLM looks.

Whose file it is, where vllm-gguf-plugin is loaded too:

* ours, if asked for: ``--quantization dflash_gguf``, ``--load-format dflash_gguf`` or
  ``TORCH_DFLASH_GGUF=1``;
* else the other plugin's, which does not know that we exist. Alone, every ``.gguf`` is ours.
"""

import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

from torch_dflash.gguf import GGUFFile

from .folder import file_of, materialise, open_target
from .hf_config import QUANTIZATION
from .shards import check_parallel

__all__ = ["install", "resolve"]

_log = logging.getLogger("vllm.torch_dflash")

ASK = "TORCH_DFLASH_GGUF"
_METHODS = ("create_engine_config", "create_model_config")


def install(engine_args: Any) -> None:
    """Resolve a GGUF model at the beginning of everything that reads ``EngineArgs.model``.

    Args:
        engine_args: vLLM's class ``EngineArgs``.
    """
    for name in _METHODS:
        original = getattr(engine_args, name)
        if getattr(original, "_torch_dflash", False):
            continue
        setattr(engine_args, name, _wrapped(original))


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        resolve(self)
        return original(self, *args, **kwargs)

    method._torch_dflash = True  # type: ignore[attr-defined]
    return method


def resolve(args: Any) -> None:
    """Turn arguments that name a GGUF file into arguments for its folder; leave others alone.

    Args:
        args: an ``EngineArgs``; changed in place: ``model``, ``load_format``, ``quantization``,
            and ``served_model_name`` unless it is set.

    Raises:
        ValueError: an argument contradicts the file, the file cannot be used (GGUFError,
            CheckpointError) or cannot be split over the ranks.
        OSError: the file cannot be opened.
    """
    asked = _asked(args)
    if file_of(args.model) is not None:  # a folder of ours, resolved before or given as such
        _check_arguments(args)
        args.load_format = QUANTIZATION
        return
    if not str(args.model).lower().endswith(".gguf"):
        if asked:
            raise ValueError(
                f"--model must be a .gguf file on this machine for {asked}, got {args.model!r}"
            )
        return
    if not asked and _left_to_other(args):
        return
    _check_arguments(args)
    name = str(args.model)
    if not Path(name).is_file():
        what = "a folder" if Path(name).is_dir() else "nothing there"
        raise ValueError(
            f"--model must be a .gguf file on this machine, got {what} at {name!r}; "
            "download the file first"
        )
    file, config = open_target(name)
    with file:
        check_parallel(config, file, args.tensor_parallel_size)
        own = args.tokenizer is None and not args.skip_tokenizer_init
        folder = materialise(file, config, tokenizer=own)
        _note_template(file, own)
    args.model = str(folder)
    args.load_format = args.quantization = QUANTIZATION
    if args.config_format == QUANTIZATION:
        args.config_format = "auto"
    if args.served_model_name is None:
        args.served_model_name = [name]
    _log.info("torch-dflash: serving %s through %s", name, folder)


def _asked(args: Any) -> str | None:
    """What asks for this plugin's GGUF, as the user wrote it."""
    flags = {
        "--quantization": args.quantization,
        "--load-format": args.load_format,
        "--config-format": args.config_format,
    }
    for flag, value in flags.items():
        if value == QUANTIZATION:
            return f"{flag} {QUANTIZATION}"
    return None


def _left_to_other(args: Any) -> bool:
    """Whether a .gguf is not ours, with one line that says why."""
    ask = os.environ.get(ASK)
    if ask not in (None, "0", "1"):
        raise ValueError(f"{ASK} must be 0 or 1, got {ask!r}")
    if ask == "0":
        return True
    if "gguf" in (args.quantization, args.load_format, args.config_format):
        return True
    if ask is None and _other_is_there():
        _say_left(args.model)
        return True
    return False


@functools.cache  # vLLM comes by twice
def _say_left(model: str) -> None:
    _log.info(
        "torch-dflash: %s is left to vllm-gguf-plugin; --quantization %s or %s=1 serves it "
        "through torch-dflash", model, QUANTIZATION, ASK,
    )  # fmt: skip


def _other_is_there() -> bool:
    """Whether another plugin took the name ``gguf``; vLLM loads all plugins before it asks."""
    methods = sys.modules.get("vllm.model_executor.layers.quantization")
    return "gguf" in getattr(methods, "QUANTIZATION_METHODS", ())


def _check_arguments(args: Any) -> None:
    """Arguments that a GGUF target contradicts, or that would silently do nothing."""
    allowed = {
        "quantization": (None, QUANTIZATION),
        "load_format": ("auto", QUANTIZATION),
        "config_format": ("auto", "hf", QUANTIZATION),
        "hf_config_path": (None,),
        "enable_lora": (False, None),
        "cpu_offload_gb": (0, None),
        "quantization_config": (None,),
    }
    reasons = {
        "hf_config_path": "the config is the file's",
        "enable_lora": "adapters over quantized GGUF layers are not supported",
        "cpu_offload_gb": "packed weights are not offloaded",
        "quantization_config": "a GGUF file is quantized already",
    }
    for name, values in allowed.items():
        value = getattr(args, name, None)
        if value not in values:
            wanted = " or ".join(str(v) for v in values if v is not None) or "absent"
            why = reasons.get(name, f"{Path(str(args.model)).name} is a GGUF file")
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be {wanted}, got {value!r}: {why}")


def _note_template(file: GGUFFile, own: bool) -> None:
    if own and "tokenizer.chat_template" not in file.metadata:
        _log.info("torch-dflash: %s has no chat template; chat needs --chat-template", file.path)
