"""Paths on the command line."""

import argparse
from pathlib import Path

__all__ = ["named", "path"]


def named(text: str) -> str:
    """A name or path that is one: an empty text is what an unset shell variable leaves."""
    if not text:
        raise argparse.ArgumentTypeError("must be a name, got an empty text")
    return text


def path(text: str) -> Path:
    """The same as a path."""
    return Path(named(text))
