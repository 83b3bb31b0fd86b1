"""JSON files of a checkpoint, read with limits."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["CheckpointError", "next_step", "read_json"]

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class CheckpointError(ValueError):
    """A checkpoint that is not what it must be: ``<file>: <what must hold>, got <...>``."""


def next_step(path: str | os.PathLike[str]) -> str:
    """What to do about a path where nothing is: nothing is fetched by a hub's name."""
    name = os.fspath(path)
    if _HUB_NAME.fullmatch(name) and not os.path.exists(os.path.dirname(name)):
        return (
            f"check the path, or fetch a model of this name first: hf download {name} "
            f"--local-dir {os.path.basename(name)}"
        )
    return "check the path"


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Read an object from a JSON file.

    Args:
        path: the file.
        limit: bytes it may have.

    Raises:
        CheckpointError: missing, too large, not UTF-8 JSON, a repeated key, or not an object.
    """
    if not path.is_file():  # a FIFO would block
        what = "a folder or device" if path.exists() else "nothing there"
        raise CheckpointError(f"{path}: must be a file, got {what}")
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(f"{path}: must have at most {limit} bytes, got {size}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, _unique
        raise CheckpointError(f"{path}: must be UTF-8 JSON, got: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold an object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {key!r} twice")
    return value
