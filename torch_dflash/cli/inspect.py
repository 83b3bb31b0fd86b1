"""``torch-dflash inspect``: what a file is, where each value came from, whether it can be used."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "inspect"]


def add_parser(commands: Any) -> None:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect", help="what a target or drafter file is, and whether it can be used"
    )
    parser.add_argument("file", type=Path, help="GGUF file, or a drafter's Hugging Face folder")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run)


def inspect(path: Path, tensors: bool = False) -> dict[str, Any]:
    """Facts about a target or a drafter.

    Args:
        path: GGUF file, or a drafter's folder.
        tensors: include a line per tensor.

    Returns:
        plain values: ``kind``, ``config`` as ``name -> [value, source]``, ``types``, ``usable``.

    Raises:
        GGUFError, CheckpointError, OSError: the file is damaged or not there.
    """
    from ..drafters.from_gguf import is_drafter_arch
    from ..gguf import GGUFFile

    if path.is_dir():
        return _drafter(path, tensors)
    with GGUFFile.open(path) as file:
        architecture = file.architecture
    return (_drafter if is_drafter_arch(architecture) else _target)(path, tensors)


def _drafter(path: Path, tensors: bool) -> dict[str, Any]:
    from ..drafters.checkpoint import read_checkpoint
    from ..drafters.config import check_supported
    from ..fields import CheckpointError

    checkpoint = read_checkpoint(path)
    try:
        check_supported(checkpoint.config, str(path))
        refusal = None
    except CheckpointError as error:
        refusal = str(error)
    config = checkpoint.config
    facts: dict[str, Any] = {
        "file": str(path),
        "kind": f"{config.kind} drafter ({checkpoint.format})",
        "usable": refusal or "yes",
        "draft tokens per step": config.max_draft_tokens,
        "config": {n: [_plain(v), source] for n, v, source in config.describe()},
        "notes": list(config.notes),
    }
    return facts | _sizes(checkpoint.tensors, tensors)


def _target(path: Path, tensors: bool) -> dict[str, Any]:
    from ..fields import CheckpointError
    from ..gguf import GGUFFile
    from ..models import read_target_config

    with GGUFFile.open(path) as file:
        facts: dict[str, Any] = {"file": str(path), "kind": f"{file.architecture} target (gguf)"}
        try:
            config = read_target_config(file)
            facts["usable"] = "yes"
            facts["config"] = {
                name: [_plain(value), source] for name, value, source in config.describe()
            }
        except CheckpointError as error:
            facts["usable"] = str(error)
        return facts | _sizes({n: file.tensor(n, check=False) for n in file.tensors}, tensors)


def _sizes(stored: Mapping[str, Any], listed: bool) -> dict[str, Any]:
    types: dict[str, list[int]] = {}
    for tensor in stored.values():
        count = types.setdefault(tensor.type_name, [0, 0])
        count[0] += 1
        count[1] += tensor.nbytes
    values = sum(t.rows * t.columns for t in stored.values())
    facts: dict[str, Any] = {
        "tensors": len(stored),
        "parameters": values,
        "megabytes": round(sum(t.nbytes for t in stored.values()) / 2**20, 2),
        "types": {n: f"{c} tensors, {b / 2**20:.2f} MB" for n, (c, b) in sorted(types.items())},
    }
    if listed:
        facts["tensor list"] = {n: f"{t.type_name} {[*t.shape]}" for n, t in stored.items()}
    return facts


def _plain(value: Any) -> Any:
    """A value that JSON and a terminal can show."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    facts = inspect(args.file, args.tensors)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for key, value in facts.items():
        if key == "config":
            for name, (shown, source) in value.items():
                print(f"  {name:28} {_short(shown):40} {source}")
        elif isinstance(value, Mapping):
            for name, shown in value.items():
                print(f"  {name:28} {shown}")
        elif isinstance(value, list):
            for line in value:
                print(f"  note: {line}")
        else:
            print(f"{key:22} {value}")
    return 0


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 1 and all(v == value[0] for v in value):
        return f"{len(value)} x {_short(value[0])}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)
