"""Finds a peer's files in a folder."""

import hashlib
import lzma
import shutil
import sys
import tempfile
from pathlib import Path

from ..work import Absent

__all__ = ["library", "on_path"]


def library(folder: Path, name: str) -> Path:
    """A shared object, unpacked first if it is there as ``name.xz``.

    Raises:
        Absent: it is not there.
    """
    plain, packed = folder / name, folder / f"{name}.xz"
    if plain.exists():
        return plain
    if not packed.exists():
        raise Absent(f"{folder} must hold {name} or {name}.xz, got neither")
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()[:16]
    out = Path(tempfile.gettempdir()) / f"dflash-peer-{digest}-{name}"
    if not out.exists():
        part = out.with_suffix(".part")
        with lzma.open(packed) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
        part.rename(out)  # whole or not at all
    return out


def on_path(folder: Path, name: str) -> None:
    """Let modules of the folder be imported.

    Raises:
        Absent: there is no module of that name.
    """
    if not (folder / name).exists():
        raise Absent(f"{folder} must hold {name}, got none")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
