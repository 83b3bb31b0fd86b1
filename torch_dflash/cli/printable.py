"""Text of files and errors, fit for a terminal and for one line."""

import re

__all__ = ["printable"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with control characters, and bytes that are no text, written out: names hold any.

    >>> printable("a\nb\x1b[1m")
    'a\\nb\\x1b[1m'
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
