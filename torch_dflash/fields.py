"""Reads typed values out of model configs and GGUF metadata, and remembers where each came from."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

from .hf import CheckpointError

__all__ = ["CheckpointError", "Fields", "describe", "shape_text", "short"]

T = TypeVar("T", int, float, bool, str)

_WANTED: Final[dict[type, str]] = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
}


def shape_text(shape: Sequence[int]) -> str:
    """A shape as the errors print it.

    >>> shape_text((2, 3))
    '[2, 3]'
    """
    return str([*shape])


def short(value: Any) -> str:
    """A value as messages print it: one line, never a whole vocabulary.

    >>> short([*range(1000)])
    '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17...'
    """
    text = repr(value)
    return text if len(text) <= 64 else text[:61] + "..."


def describe(config: Any, sources: Mapping[str, str], at: str = "") -> list[tuple[str, Any, str]]:
    """``(field, value, source)`` of every field of a config dataclass, for people.

    Nested dataclasses are spread out, as ``rope.theta``.
    """
    rows: list[tuple[str, Any, str]] = []
    for field in dataclasses.fields(config):
        name, value = at + field.name, getattr(config, field.name)
        if name in ("sources", "notes"):
            continue
        if dataclasses.is_dataclass(value):
            rows += describe(value, sources, f"{name}.")
        else:
            rows.append((name, value, sources.get(name, "default")))
    return rows


class Fields:
    """Typed look-up over nested mappings, first hit wins, null counts as absent.

    Args:
        where: the file, for messages.
        scopes: ``(prefix, mapping)`` in order of precedence; the prefix is how messages and
            ``sources`` call the mapping, such as ``dflash_config.``.

    Attributes:
        sources: field -> the key, tensor or rule that its value came from.
        notes: decisions a reader of the model should know about, one line each.
        used: every full key that was looked at.
    """

    def __init__(self, where: str, scopes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Read from ``scopes``; see the class."""
        self.where = where
        self.scopes = tuple(scopes)
        self.sources: dict[str, str] = {}
        self.notes: list[str] = []
        self.used: set[str] = set()

    def fail(self, text: str, step: str = "") -> NoReturn:
        """Raise a :class:`CheckpointError` about this file."""
        raise CheckpointError(f"{self.where}: {text}" + (f"; {step}" if step else ""))

    def note(self, text: str) -> None:
        """Keep a line for the log and for ``inspect``; the same line once."""
        if text not in self.notes:
            self.notes.append(text)

    def found(self, *names: str) -> list[tuple[str, Any]]:
        """Every ``(full key, value)`` that is present and not null, best first."""
        hits = []
        for name in names:
            for prefix, mapping in self.scopes:
                self.used.add(prefix + name)
                if mapping.get(name) is not None:
                    hits.append((prefix + name, mapping[name]))
        return hits

    def raw(self, field: str, *names: str) -> Any:
        """The value of the first key that is present, unchecked; None if there is none.

        Values of keys that lost and say something else are noted: they were written for a reason.
        """
        hits = self.found(*names)
        if not hits:
            return None
        key, value = hits[0]
        self.sources[field] = key
        for other, ignored in hits[1:]:
            if ignored != value:
                self.note(f"{field}: {key} = {short(value)} wins over {other} = {short(ignored)}")
        return value

    def optional(
        self,
        kind: type[T],
        field: str,
        *names: str,
        low: float | None = None,
        high: float | None = None,
    ) -> T | None:
        """A value of ``kind`` in ``[low, high]`` from the first of ``names`` (default: field).

        Raises:
            CheckpointError: the value has another type or is out of range.
        """
        value = self.raw(field, *(names or (field,)))
        if value is None:
            return None
        return self.check(kind, self.sources[field], value, low, high)

    def require(
        self,
        kind: type[T],
        field: str,
        *names: str,
        default: T | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> T:
        """Like :meth:`optional`, with a default or an error when no key is present.

        Raises:
            CheckpointError: additionally, no key is present and there is no default.
        """
        value = self.optional(kind, field, *names, low=low, high=high)
        if value is not None:
            return value
        if default is None:
            self.missing(names or (field,))
        self.sources[field] = "default"
        return default

    def missing(self, names: Iterable[str], step: str = "") -> NoReturn:
        """Raise about a key that must be there, named as the innermost scope has it."""
        prefix = self.scopes[-1][0]
        keys = " or ".join(prefix + name for name in names)
        self.fail(f"{keys} must be present, got nothing", step)

    def check(
        self,
        kind: type[T],
        key: str,
        value: Any,
        low: float | None = None,
        high: float | None = None,
    ) -> T:
        """``value`` as ``kind``, or an error that names ``key``."""
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        wrong_type = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
        if wrong_type or (kind is float and not math.isfinite(value)):
            self.fail(f"{key} must be {_WANTED[kind]}, got {short(value)}")
        if low is not None and value < low:
            self.fail(f"{key} must be at least {low}, got {value!r}")
        if high is not None and value > high:
            self.fail(f"{key} must be at most {high}, got {value!r}")
        return value

    def items(self, kind: type[T], key: str, value: Any, length: int | None = None) -> list[T]:
        """A list of ``kind``; any integer type of the file counts as an integer."""
        if isinstance(value, str) or not isinstance(value, Sequence):
            self.fail(f"{key} must be a list, got {short(value)}")
        if length is not None and len(value) != length:
            self.fail(f"{key} must have {length} entries, got {len(value)}")
        return [self.check(kind, f"{key}[{i}]", item) for i, item in enumerate(value)]

    def agree(self, field: str, value: T | None, from_tensor: T | None, tensor: str) -> T | None:
        """A value that a key and a tensor both state; the tensor is the ground truth.

        Raises:
            CheckpointError: both are there and differ.
        """
        if from_tensor is None:
            return value
        if value is None:
            self.sources[field] = f"shape of {tensor}"
        elif value != from_tensor:
            self.fail(
                f"{self.sources[field]} must agree with tensor {tensor}, got {value} "
                f"where the tensor says {from_tensor}"
            )
        return from_tensor
