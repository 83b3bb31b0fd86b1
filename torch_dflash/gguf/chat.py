"""Chat templates: a file's Jinja source, rendered in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .header import GGUFError

__all__ = ["ChatTemplate"]


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Turns messages into the text a model was trained on.

    Attributes:
        source: the template.

    Raises:
        GGUFError: the source is not valid Jinja.
    """

    def __init__(self, where: str, source: str) -> None:
        """Compile ``source``; ``where`` names the file in messages."""
        self._where, self.source = where, source
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = env.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise GGUFError(
                f"{where}: tokenizer.chat_template must be a Jinja template, got: {error}"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for ``messages``.

        Args:
            messages: each with ``role`` and ``content``, and whatever else the template reads.
            **variables: such as ``add_generation_prompt``, ``tools``, ``enable_thinking``.

        Raises:
            GGUFError: the template refuses the messages or fails on them.
        """
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:  # a template is a program: it can raise anything
            raise GGUFError(
                f"{self._where}: tokenizer.chat_template must accept the messages, got: {error}"
            ) from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any
) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)
