"""When a generation ends: stop tokens, stop strings, and text that may still become one."""

from collections.abc import Callable, Collection, Sequence

__all__ = ["StopChecker"]


class StopChecker:
    """Watches tokens one by one, also inside an accepted prefix.

    Args:
        stop_ids: tokens that end the text; the token itself is kept in the ids, not in the text.
        stop_strings: strings that end the text; the text is cut before them.
        decode: one token to the text that it completes; needed for strings.
        finish: what the decoder still holds at the end: U+FFFD for a character that was cut.

    Raises:
        ValueError: an empty stop string, or strings without a decoder.
    """

    def __init__(
        self,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        decode: Callable[[int], str] | None = None,
        finish: Callable[[], str] | None = None,
    ) -> None:
        if any(not s for s in stop_strings):
            raise ValueError("a stop string must not be empty")
        if stop_strings and decode is None:
            raise ValueError("stop strings need a tokenizer, got none")
        self._ids, self._strings, self._decode = frozenset(stop_ids), tuple(stop_strings), decode
        self._finish = finish
        self._held = ""  # text that may be the beginning of a stop string
        self.reason: str | None = None

    def push(self, token: int) -> str:
        """Take the next token.

        Returns:
            text that is now certain to be part of the output; ``reason`` is set once it is over.
        """
        if token in self._ids:
            self.reason = "stop_token"
            return self.flush()
        if self._decode is None:
            return ""
        self._held += self._decode(token)
        found = [i for s in self._strings if (i := self._held.find(s)) >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            self.reason = "stop_string"
            return text
        keep = max((self._overlap(s) for s in self._strings), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of the held text may begin ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def flush(self) -> str:
        """The rest, when the generation ended for another reason than a stop string."""
        text, self._held = self._held, ""
        return text if self._finish is None else text + self._finish()
