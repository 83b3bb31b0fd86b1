"""Hugging Face tokenizers as the ``tokenizer.*`` keys of a GGUF file."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..jsonfile import read_json
from .header import GGUFError
from .pretokenizers import PRETOKENIZERS
from .tokenizer import TokenType
from .writer import Typed

__all__ = ["tokenizer_metadata"]

_log = logging.getLogger(__name__)

_SPECIAL = ("bos", "eos", "pad", "mask")


def tokenizer_metadata(
    folder: str | Path, *, vocab_size: int | None = None, pre: str | None = None
) -> dict[str, Typed]:
    """Everything :func:`tokenizer_from_gguf` reads, from a byte-level BPE tokenizer.

    Args:
        folder: with ``tokenizer.json``, and ``tokenizer_config.json`` for the names of the special
            tokens and the chat template.
        vocab_size: rows of the embedding; tokens missing up to there become unused ones.
        pre: name of the cutting rule; None finds it by its expressions.

    Raises:
        CheckpointError: a file is missing or not JSON.
        GGUFError: another kind of tokenizer, an unknown cutting rule, or more tokens than rows.
    """
    folder = Path(folder)
    where = folder / "tokenizer.json"
    tokenizer = read_json(where, 256 << 20)
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file, 8 << 20) if settings_file.exists() else {}
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE" or "vocab" not in model or "merges" not in model:
        raise GGUFError(f"{where}: model must be BPE, got {model.get('type')!r}")
    ids: dict[str, int] = dict(model["vocab"])
    kinds = dict.fromkeys(ids.values(), TokenType.NORMAL)
    for token in tokenizer.get("added_tokens", []):
        ids[token["content"]] = token["id"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    names = {i: token for token, i in ids.items()}
    size = max(names) + 1 if vocab_size is None else vocab_size
    if max(names) >= size or len(names) != len(ids):
        raise GGUFError(f"{where}: ids must be unique and below {size}, got up to {max(names)}")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if not merges:
        raise GGUFError(f"{where}: merges must not be empty, llama.cpp refuses such a file")
    pre = pre or _find_pre(where, tokenizer)
    out = {
        "model": Typed("string", "gpt2"),
        "pre": Typed("string", pre),
        "tokens": Typed("array[string]", [names.get(i, f"[PAD{i}]") for i in range(size)]),
        "token_type": Typed(
            "array[int32]", [int(kinds.get(i, TokenType.UNUSED)) for i in range(size)]
        ),
        "merges": Typed("array[string]", merges),
    }
    for name in _SPECIAL:
        token = settings.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            continue
        if content not in ids:
            raise GGUFError(f"{settings_file}: {name}_token must be a token, got {content!r}")
        key = "padding" if name == "pad" else name
        out[f"{key}_token_id"] = Typed("uint32", ids[content])
    out["add_bos_token"] = Typed("bool", bool(settings.get("add_bos_token", False)))
    keys = {f"tokenizer.ggml.{key}": value for key, value in out.items()}
    template = folder / "chat_template.jinja"
    source = template.read_text() if template.exists() else settings.get("chat_template")
    if isinstance(source, str):
        keys["tokenizer.chat_template"] = Typed("string", source)
    return keys


def _find_pre(where: Path, tokenizer: Mapping[str, Any]) -> str:
    cutter = tokenizer.get("pre_tokenizer") or {}
    parts = cutter.get("pretokenizers", [cutter])
    expressions = tuple(
        p.get("pattern", {}).get("Regex") for p in parts if p.get("type") == "Split"
    )
    same = [n for n, p in PRETOKENIZERS.items() if p.expressions == expressions]
    if not same:
        raise GGUFError(
            f"{where}: pre_tokenizer must be that of {', '.join(PRETOKENIZERS)}, got "
            f"{json.dumps(cutter)[:200]}; pass pre= if it is one of them in other words"
        )
    _check_normalizer(where, tokenizer.get("normalizer"), same[-1])
    return same[-1]


def _check_normalizer(where: Path, normalizer: Mapping[str, Any] | None, pre: str) -> None:
    """A file cannot say how text is normalized: it follows from ``pre``."""
    kind = None if normalizer is None else normalizer.get("type")
    if kind == "NFC" and PRETOKENIZERS[pre].nfc:
        return
    if kind is not None:
        raise GGUFError(f"{where}: normalizer must follow from pre {pre!r}, got {kind!r}")
    if PRETOKENIZERS[pre].nfc:
        _log.warning(
            "%s: has no normalizer, but readers of pre %r compose text (NFC) first", where, pre
        )
