"""The tokenizer of a GGUF file: vocabulary, special tokens, streaming decoder, chat template."""

import codecs
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NoReturn

from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Engine

from .chat import ChatTemplate
from .header import GGUFArray, GGUFError, Value
from .pretokenizers import PRETOKENIZERS
from .reader import GGUFFile

__all__ = ["StreamDecoder", "TokenType", "Tokenizer", "tokenizer_from_gguf"]


class TokenType(IntEnum):
    """What ``tokenizer.ggml.token_type`` says about a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Found in a text by their name, before anything is cut.
_MARKED: Final = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)

# Tokens that end a turn in the models we know, also where a file names only one of them.
_END_NAMES: Final = {
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "</s>",
}
_END_KEYS: Final = ("eos", "eot", "eom")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES: Final = _byte_alphabet()


class Tokenizer:
    """Text to ids and back.

    Attributes:
        vocab_size: number of tokens, unused ones included.
        bos_id, eos_id, pad_id, mask_id: ids, or None where the file has none.
        eos_ids: every id that ends a generation.
        control_ids: ids of control tokens: markers that are not part of a text.
        add_bos, add_eos: what ``encode(add_special=True)`` adds.
        chat_template: the template, or None.
    """

    def __init__(self, where: str, metadata: Mapping[str, Value]) -> None:
        """Build from the ``tokenizer.*`` keys of a file; see :func:`tokenizer_from_gguf`."""
        keys = _Keys(where, metadata)
        model = keys.string("tokenizer.ggml.model")
        if model != "gpt2":
            keys.fail(
                f"tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {model!r:.80}",
                "pass token ids, or convert the model with a byte-level tokenizer",
            )
        self._tokens = keys.strings("tokenizer.ggml.tokens")
        self.vocab_size = len(self._tokens)
        self._types = keys.types(self.vocab_size)
        ids = {name: keys.id(name, self.vocab_size) for name in (*_ID_KEYS, *_END_KEYS)}
        self.bos_id, self.eos_id = ids["bos"], ids["eos"]
        self.pad_id, self.mask_id = ids["padding"], ids["mask"]
        pre = keys.pretokenizer()
        self.add_bos = keys.flag("tokenizer.ggml.add_bos_token", pre.add_bos)
        self.add_eos = keys.flag("tokenizer.ggml.add_eos_token", False)
        for name, added, known in (
            ("bos", self.add_bos, self.bos_id),
            ("eos", self.add_eos, self.eos_id),
        ):
            if added and known is None:
                keys.fail(f"tokenizer.ggml.{name}_token_id must be there where {name} is added")
        self.control_ids = frozenset(
            i for i, t in enumerate(self._types) if t in (TokenType.CONTROL, TokenType.UNKNOWN)
        )
        self.eos_ids = frozenset(i for name in _END_KEYS if (i := ids[name]) is not None) | {
            i
            for i, token in enumerate(self._tokens)
            if token in _END_NAMES and self._types[i] in _MARKED
        }
        self._nfc = pre.nfc
        self._engine = self._build(keys, pre.ignore_merges)
        self._engine.pre_tokenizer = pre.build()
        # A vocabulary without some byte has no way to write it, and the engine would drop it.
        self._lossy = not _BYTES.keys() <= {*self._tokens}
        self._pieces: dict[int, bytes] = {}
        source = metadata.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            keys.fail(f"tokenizer.chat_template must be a string, got {source!r:.80}")
        self.chat_template = ChatTemplate(where, source) if source else None
        self._where = where

    def _build(self, keys: "_Keys", ignore_merges: bool) -> Engine:
        """The engine: unused tokens stay out of it, so that no text can become one."""
        vocabulary = {
            token: i for i, token in enumerate(self._tokens) if self._types[i] != TokenType.UNUSED
        }
        merges = []
        for i, merge in enumerate(keys.strings("tokenizer.ggml.merges")):
            left, space, right = merge.partition(" ")
            if not (left and space and right) or " " in right:
                keys.fail(f"tokenizer.ggml.merges[{i}] must be two tokens, got {merge!r:.80}")
            merges.append((left, right))
        try:
            engine = Engine(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
        except Exception as error:  # the engine raises bare Exception
            keys.fail(f"tokenizer.ggml.merges must join tokens of the vocabulary, got: {error}")
        if self._nfc:
            engine.normalizer = normalizers.NFC()
        engine.add_tokens(
            [
                AddedToken(
                    token, special=self._types[i] != TokenType.USER_DEFINED, normalized=False
                )
                for i, token in enumerate(self._tokens)
                if self._types[i] in _MARKED and token
            ]
        )
        return engine

    @property
    def engine(self) -> Engine:
        """What cuts and merges; it neither adds begin and end tokens nor decodes."""
        return self._engine

    def token(self, token: int) -> str:
        """A token as the vocabulary spells it, in the byte alphabet.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"Tokenizer: id must be in [0, {self.vocab_size}), got {token}")
        return self._tokens[token]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text; the spelled-out name of a special token becomes that token.

        Args:
            text: any text.
            add_special: put the begin and end tokens around it that the model expects.

        Raises:
            ValueError: the vocabulary cannot express a character of ``text``, or half a surrogate
                pair stands in it, which is what Python makes of bytes that are no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self._where}: the text must be Unicode, got the surrogate "
                f"{text[error.start]!r} at {error.start}; was it read from bytes that are no UTF-8?"
            ) from error
        ids = self._engine.encode(text, add_special_tokens=False).ids
        if self._lossy and self.decode(ids, skip_control=False) != self._normalized(text):
            raise ValueError(
                f"{self._where}: the vocabulary must cover the text, got bytes it has no token for"
            )
        if add_special and self.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special and self.add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; those of a control token are its name.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
        known = self._pieces.get(token)
        if known is None:
            if not 0 <= token < self.vocab_size:
                raise IndexError(f"Tokenizer: id must be in [0, {self.vocab_size}), got {token}")
            text = self._tokens[token]
            plain = self._types[token] not in (TokenType.NORMAL, TokenType.BYTE)
            if plain or any(c not in _BYTES for c in text):
                known = text.encode()
            else:
                known = bytes(_BYTES[c] for c in text)
            self._pieces[token] = known
        return known

    def decode(self, ids: Iterable[int], *, skip_control: bool = True) -> str:
        """Text of a sequence; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_control: leave control tokens out instead of writing their names.
        """
        pieces = [self.piece(i) for i in ids if not (skip_control and i in self.control_ids)]
        return b"".join(pieces).decode(errors="replace")

    def stream(self, *, skip_control: bool = True) -> "StreamDecoder":
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self, skip_control)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation; encode it with ``add_special=False``.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: end with the beginning of the assistant's turn.
            **variables: passed to the template.

        Raises:
            GGUFError: the file has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise GGUFError(
                f"{self._where}: tokenizer.chat_template must be there to chat, got none; "
                "give a plain prompt"
            )
        names = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        special = {name: "" if i is None else self._tokens[i] for name, i in names.items()}
        return self.chat_template.render(
            messages, **{**special, "add_generation_prompt": add_generation_prompt, **variables}
        )

    def _normalized(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self._nfc else text


class StreamDecoder:
    """Text of tokens as they arrive; a character is held back until its last byte is there.

    The pieces add up to exactly what :meth:`Tokenizer.decode` makes of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skip_control: bool = True) -> None:
        """Start before the first token."""
        self._tokenizer, self._skip_control = tokenizer, skip_control
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """What is complete after one more token; may be empty."""
        piece = self._tokenizer.piece(token)
        if self._skip_control and token in self._tokenizer.control_ids:
            return ""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left at the end: U+FFFD where a character was cut, else nothing."""
        return self._decoder.decode(b"", final=True)


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer of an open file; it does not need the file afterwards.

    Raises:
        GGUFError: a ``tokenizer.*`` key is missing or malformed, or names a model or a
            pre-tokenizer that is not known; the message lists the known ones.
    """
    return Tokenizer(str(file.path), file.metadata)


_ID_KEYS: Final = ("bos", "padding", "mask")


class _Keys:
    """Typed access to the ``tokenizer.*`` keys of one file."""

    def __init__(self, where: str, metadata: Mapping[str, Value]) -> None:
        self.where, self.metadata = where, metadata

    def fail(self, text: str, step: str = "") -> NoReturn:
        raise GGUFError(f"{self.where}: {text}" + (f"; {step}" if step else ""))

    def string(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            self.fail(f"{key} must be a string, got {value!r:.80}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if not isinstance(value, list | GGUFArray):
            self.fail(f"{key} must be an array of strings, got {value!r:.80}")
        items = value if isinstance(value, list) else value.to_list()
        strings = [item for item in items if isinstance(item, str)]
        if not items or len(strings) != len(items):
            self.fail(f"{key} must be a non-empty array of strings, got {value!r:.60}")
        if key.endswith("tokens") and len({*strings}) != len(strings):
            [(twice, _)] = Counter(strings).most_common(1)
            self.fail(f"{key} must be unique, got {twice!r:.80} twice")
        return strings

    def types(self, n: int) -> list[int]:
        key = "tokenizer.ggml.token_type"
        value = self.metadata.get(key)
        if value is None:
            self.fail(f"{key} must say which tokens are special, got none")
        items = list(value) if isinstance(value, list | GGUFArray) else []
        types = [t for t in items if isinstance(t, int) and 1 <= t <= TokenType.BYTE]
        if len(types) != n:
            self.fail(f"{key} must hold {n} values of 1 to 6, got {len(items)}: {value!r:.60}")
        return types

    def id(self, name: str, n: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < n:
            self.fail(f"{key} must be in [0, {n}), got {value!r:.80}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self.fail(f"{key} must be a bool, got {value!r:.80}")
        return value

    def pretokenizer(self) -> Any:
        pre = self.string("tokenizer.ggml.pre")
        if pre not in PRETOKENIZERS:
            self.fail(
                f"tokenizer.ggml.pre must be one of {', '.join(PRETOKENIZERS)}, got {pre!r:.80}",
                "without its rule the text would be cut differently from training",
            )
        return PRETOKENIZERS[pre]
