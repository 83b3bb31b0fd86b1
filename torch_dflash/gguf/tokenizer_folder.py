"""The tokenizer of a GGUF file as the folder that Hugging Face tokenizers are loaded from."""

import copy
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, processors

from .tokenizer import Tokenizer

__all__ = ["write_tokenizer"]

_NO_LIMIT = 10**30  # what transformers writes for a model without its own maximum


def write_tokenizer(folder: str | Path, tokenizer: Tokenizer) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and, if there is one, the template.

    A loaded copy gives the same ids, adds the same begin and end tokens and decodes to the same
    text. Tokens that the file marks as unused stay out of it.

    Args:
        folder: an existing folder.
        tokenizer: of an open file.
    """
    folder = Path(folder)
    engine = copy.deepcopy(tokenizer.engine)
    engine.decoder = decoders.ByteLevel()
    _add_markers(engine, tokenizer)
    engine.save(str(folder / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _NO_LIMIT,
    }
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    for name, i in ids.items():
        if i is not None:
            settings[f"{name}_token"] = tokenizer.token(i)
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if tokenizer.chat_template is not None:
        source = tokenizer.chat_template.source
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")


def _add_markers(engine: Engine, tokenizer: Tokenizer) -> None:
    def marker(added: bool, i: int | None) -> list[str]:
        return [tokenizer.token(i)] if added and i is not None else []

    before = marker(tokenizer.add_bos, tokenizer.bos_id)
    after = marker(tokenizer.add_eos, tokenizer.eos_id)
    if not before and not after:
        return

    def text(name: str, kind: int) -> list[str]:
        return [f"{t}:{kind}" for t in (*before, name, *after)]

    engine.post_processor = processors.TemplateProcessing(
        single=text("$A", 0),
        pair=[*text("$A", 0), *text("$B", 1)],
        special_tokens=[(t, engine.token_to_id(t)) for t in {*before, *after}],
    )
