"""``torch-dflash requantize``: a GGUF file in other types."""

import argparse
import re
from typing import Any

from .paths import path
from .printable import printable

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Register the subcommand."""
    from ..drafters.outtypes import OUTTYPES

    p: argparse.ArgumentParser = commands.add_parser(
        "requantize",
        help="write a target or drafter with its matrices in another type",
        description="Write a GGUF file with its matrices in another type and everything else kept. "
        "Vectors, integers and what is small already stay as they are.",
    )
    p.add_argument("source", type=path, help="GGUF file of a target or drafter")
    p.add_argument("output", type=path, help="another GGUF file")
    p.add_argument(
        "--type", required=True, choices=tuple(OUTTYPES), type=str.lower, dest="outtype",
        help="of most matrices",
    )  # fmt: skip
    p.add_argument(
        "--tensor-type", action="append", default=[], type=_rule, metavar="REGEX=TYPE",
        help="of tensors in whose name REGEX is found (keep: as it is); repeat it, the first wins",
    )  # fmt: skip
    p.add_argument(
        "--fallback", choices=tuple(OUTTYPES), type=str.lower, default="q8_0",
        help="of matrices whose rows are no whole quants of TYPE (default: q8_0)",
    )  # fmt: skip
    p.add_argument(
        "--alignment", type=int, metavar="BYTES", help="of tensor data (default: the source's)"
    )
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Requantize, and say what was written."""
    from ..inspection import summary
    from ..requantization import requantize
    from .progress import progress_bar

    with progress_bar(args.output.name) as progress:
        done = requantize(
            args.source,
            args.output,
            args.outtype,
            tensor_types=args.tensor_type,
            fallback=args.fallback,
            alignment=args.alignment,
            progress=progress,
        )
    for note in done.notes:
        print(printable(f"note: {note}"))
    print(printable(f"{args.output}: {summary(args.output)}"))
    return 0


def _rule(text: str) -> tuple[str, str]:
    from ..drafters.outtypes import OUTTYPES

    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"must be REGEX=TYPE, got {text!r}")
    if name.lower() not in (*OUTTYPES, "keep"):
        known = ", ".join((*OUTTYPES, "keep"))
        raise argparse.ArgumentTypeError(f"TYPE must be one of {known}, got {name!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"REGEX must be a regular expression, got {pattern!r}: {error}"
        ) from None
    return pattern, name
