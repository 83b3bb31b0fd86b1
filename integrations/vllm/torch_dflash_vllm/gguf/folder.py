"""A GGUF file as the folder that vLLM wants: config, tokenizer, generation config; no weights.

Folders are made once per file and kept in ``$TORCH_DFLASH_CACHE`` (default
``~/.cache/torch-dflash``). The weights stay where they are: ``config.json`` names the file.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch_dflash
from torch_dflash.gguf import GGUFError, GGUFFile, tokenizer_from_gguf, write_tokenizer
from torch_dflash.models import DenseConfig, Qwen35Config, read_target_config

from .hf_config import QUANTIZATION, generation_config, hf_config

__all__ = ["file_of", "materialise", "open_target"]

_LAYOUT = 1  # of the folders; another number makes new ones


def open_target(path: str | os.PathLike[str]) -> tuple[GGUFFile, DenseConfig | Qwen35Config]:
    """Open a file and resolve what it is.

    Returns:
        the open file, for the caller to close, and its config.

    Raises:
        GGUFError, CheckpointError: it cannot be used; the message names what is wrong.
        OSError: it cannot be opened.
    """
    file = GGUFFile.open(path)
    try:
        return file, read_target_config(file)
    except BaseException:
        file.close()
        raise


def materialise(
    file: GGUFFile, config: DenseConfig | Qwen35Config, *, tokenizer: bool = True
) -> Path:
    """The folder of an open file, made if it is not there yet.

    Args:
        file: open; its path, size and time of change are its identity.
        config: of the file.
        tokenizer: False leaves the tokenizer out, for files whose kind is not known here.

    Raises:
        GGUFError: the file's tokenizer is not known, and it was wanted.
        OSError: the folder cannot be written.
    """
    path, status = file.path.resolve(), file.path.stat()
    identity = (
        str(path), status.st_size, status.st_mtime_ns, tokenizer, torch_dflash.__version__, _LAYOUT,
    )  # fmt: skip
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    folder = _cache() / "gguf" / f"{path.stem}-{key}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # made aside and renamed: another process sees a whole folder or none
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(made, file, config, tokenizer)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # not just another process that was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _cache() -> Path:
    named = os.environ.get("TORCH_DFLASH_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch-dflash"


def _write(
    folder: Path, file: GGUFFile, config: DenseConfig | Qwen35Config, tokenizer: bool
) -> None:
    words = None
    if tokenizer:
        try:
            words = tokenizer_from_gguf(file)
        except GGUFError as error:
            raise GGUFError(f"{error}; or give a tokenizer folder with --tokenizer") from None
        write_tokenizer(folder, words)
    _json(folder / "config.json", hf_config(config, file))
    _json(folder / "generation_config.json", generation_config(file, words))


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def file_of(folder: str | os.PathLike[str]) -> str | None:
    """The GGUF file behind a folder made by :func:`materialise`; None for any other folder."""
    try:
        values = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        mark = values["quantization_config"]
        return str(mark["file"]) if mark["quant_method"] == QUANTIZATION else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
