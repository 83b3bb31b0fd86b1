"""Folders that vLLM loads, made from other files and kept by content."""

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.config import DrafterConfig
from torch_dflash.drafters.resolve import Overrides
from torch_dflash.drafters.to_hf import hf_config, write_folder

__all__ = ["CACHE_MARK", "cache_root", "folder_for"]

_log = logging.getLogger("vllm.torch_dflash")

CACHE_MARK: Final = "torch_dflash.json"  # in every folder that was made here: where it came from
_LAYOUT: Final = 1  # raise it when what is written changes
_LINKED: Final = ("*.safetensors", "*.safetensors.index.json", "mask_embedding.pt")


def cache_root() -> Path:
    """``$TORCH_DFLASH_CACHE``, else ``torch-dflash`` in the user's cache folder."""
    own = os.environ.get("TORCH_DFLASH_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch-dflash"


def folder_for(
    path: Path,
    config: DrafterConfig,
    *,
    link: bool,
    extra: Mapping[str, Any],
    architecture: str | None,
    context_length: int,
    num_target_layers: int,
    dtype: torch.dtype,
    vocab_size: int,
) -> Path:
    """The cached folder of a drafter, written if need be; complete or not there at all.

    Args:
        path: the drafter's folder or ``.gguf`` file.
        config: of the drafter.
        link: keep the weights where they are, with a config of our own beside links to them.
        extra: further keys of config.json.
        architecture: in config.json, instead of the drafter's usual one.
        context_length: ``max_position_embeddings``.
        num_target_layers, vocab_size: of the target.
        dtype: of the weights, where they are written.

    Raises:
        CheckpointError: the drafter cannot be written as a folder.
        OSError: the cache folder cannot be written.
    """
    text = hf_config(
        config,
        where=str(path),
        context_length=context_length,
        num_target_layers=num_target_layers,
        dtype=dtype,
    ) | dict(extra)
    text["max_position_embeddings"] = context_length
    if architecture is not None:
        text["architectures"] = [architecture]
    source = _identity(path) if link else _content(path)
    key = hashlib.sha256(json.dumps([_LAYOUT, link, source, text]).encode()).hexdigest()[:24]
    folder = cache_root() / "drafters" / f"{path.stem}-{key}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        if link:
            temporary.mkdir()
            for pattern in _LINKED:
                for file in path.glob(pattern):
                    (temporary / file.name).symlink_to(file.resolve())
        else:
            _log.info("torch-dflash: writing %s as a folder that vLLM loads, %s", path, folder)
            overrides = Overrides(num_target_layers=num_target_layers, vocab_size=vocab_size)
            write_folder(
                temporary,
                read_checkpoint(path, overrides=overrides),
                context_length=context_length,
                num_target_layers=num_target_layers,
                dtype=dtype,
            )
        (temporary / "config.json").write_text(json.dumps(text, indent=2) + "\n")
        (temporary / CACHE_MARK).write_text(json.dumps({"source": str(path.resolve())}) + "\n")
        os.replace(temporary, folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _content(path: Path) -> str:
    """Hash of a file, or of all that makes up a folder's drafter."""
    files = [path] if path.is_file() else _files(path)
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def _identity(path: Path) -> list[list[str | int]]:
    """Names, sizes and times of the files that a folder of links would lead to."""
    stats = [(f, f.resolve().stat()) for f in _files(path)]
    return [[str(f.resolve()), s.st_size, s.st_mtime_ns] for f, s in stats]


def _files(path: Path) -> list[Path]:
    return sorted(f for p in (*_LINKED, "config.json") for f in path.glob(p))
