"""``torch-dflash inspect``: what a file is, where each value came from, whether it can be used."""

import argparse
import json
import sys
from typing import Any

from .paths import path
from .printable import printable

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="what a target or drafter file is, and whether it can be used",
        description="Say what a file is, where each value came from, and whether it can be used. "
        "The exit status is 1 for a file that cannot.",
    )
    parser.add_argument(
        "file", type=path, help="GGUF file; a drafter's folder, or only its config.json"
    )
    parser.add_argument("--target", type=path, metavar="MODEL", help="check a drafter against it")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    from ..inspection import inspect_file

    facts = inspect_file(args.file, target=args.target, tensors=args.tensors)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    if facts["usable"].startswith("yes"):
        return 0
    print(f"torch-dflash: error: {printable(facts['usable'])}", file=sys.stderr)
    return 1


def _print(facts: dict[str, Any]) -> None:
    for key, value in facts.items():
        if key == "config":
            for name, (shown, source) in value.items():
                _say(f"  {name:36} {_short(shown):36} {source}")
        elif key in ("notes", "elsewhere"):
            for line in value:
                _say(f"  {'note' if key == 'notes' else key}: {line}")
        elif isinstance(value, dict):
            _say(key)
            for name, shown in value.items():
                _say(f"  {name:36} {_short(shown)}")
        elif isinstance(value, list):
            _say(f"{key:22} {_lines(value)}")
        else:
            _say(f"{key:22} {value}")


def _say(text: str) -> None:
    print(printable(text))


def _lines(values: list[str]) -> str:
    """Equal neighbours together: ``0-3: window 2048, causal; 4: full attention, not causal``."""
    groups: list[list[int]] = []
    for i, value in enumerate(values):
        if groups and values[groups[-1][0]] == value:
            groups[-1].append(i)
        else:
            groups.append([i])
    return "; ".join(f"{g[0]}{f'-{g[-1]}' if len(g) > 1 else ''}: {values[g[0]]}" for g in groups)


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 1 and all(v == value[0] for v in value):
        return f"{len(value)} x {_short(value[0])}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)
