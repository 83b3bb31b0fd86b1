"""``torch-dflash vllm-check``: what the plugin replaces in the vLLM at hand, and why not."""

import argparse
import importlib
import importlib.util
import json
import textwrap
from typing import Any

__all__ = ["add_parser", "screen"]

_NEXT = "pip install vllm==0.33.0 beside torch-dflash (0.32 and 0.33 are checked)"


def add_parser(commands: Any) -> None:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "vllm-check",
        help="what the vLLM plugin replaces here, what it leaves alone, and why",
        description="Say what the plugin replaces in the vLLM of this environment, what it leaves "
        "alone, and why. The exit status is 1 where vLLM does not load it.",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run)


def screen(facts: dict[str, Any]) -> str:
    """The report on one screen of 100 columns."""
    lines = [f"{key:16} {value}" for key, value in facts.items() if key != "features"]
    for name, feature in facts["features"].items():
        text = f"  {name:14} {feature['state']:9} {feature['detail']}"
        lines.append(textwrap.fill(text, 100, subsequent_indent=" " * 27, break_long_words=False))
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        ImportError: there is no vLLM here.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"vllm-check: vLLM must be installed here, got nothing; {_NEXT}")
    # by name: the base package knows no framework
    facts = importlib.import_module("torch_dflash_vllm.check").report()
    print(json.dumps(facts, indent=2) if args.json else screen(facts))
    return 0 if facts["loaded by vLLM"] == "yes" else 1
