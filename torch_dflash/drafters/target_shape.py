"""The few numbers of a target that a drafter must fit, from a GGUF file or a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..fields import Fields
from ..gguf import GGUFFile
from ..hf import read_config

__all__ = ["ModelShape", "target_shape"]


@dataclass(frozen=True)
class ModelShape:
    """Width, vocabulary and depth of a model.

    Attributes:
        hidden_size: width of a hidden state.
        vocab_size: rows of the embedding.
        num_layers: decoder layers; multi-token prediction blocks are not counted.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int


def target_shape(path: str | Path) -> ModelShape:
    """Read a target's shape; the target may be one that does not run natively.

    Args:
        path: GGUF file, or a folder with ``config.json``.

    Raises:
        CheckpointError, GGUFError: a number is missing or wrong.
        OSError: there is no such file.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".json":
        raw = read_config(path)
        where = path / "config.json" if path.is_dir() else path
        return _from_hf(Fields(str(where), _scopes(raw)))
    with GGUFFile.open(path) as file:
        return _from_gguf(Fields(str(path), [("", file.metadata)]), file)


def _scopes(raw: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The text model's part first, however deep it lies."""
    scopes: list[tuple[str, Mapping[str, Any]]] = []
    for prefix, name in (
        ("thinker_config.", "text_config"),
        ("", "text_config"),
        ("", "llm_config"),
    ):
        outer = raw.get(prefix.rstrip("."), {}) if prefix else raw
        inner = outer.get(name) if isinstance(outer, Mapping) else None
        if isinstance(inner, Mapping):
            scopes.append((f"{prefix}{name}.", inner))
    return [*scopes, ("", raw)]


def _from_hf(fields: Fields) -> ModelShape:
    return ModelShape(
        fields.require(int, "hidden_size", low=1),
        fields.require(int, "vocab_size", low=1),
        fields.require(int, "num_hidden_layers", low=1),
    )


def _from_gguf(fields: Fields, file: GGUFFile) -> ModelShape:
    arch = file.architecture
    blocks = fields.require(int, "num_layers", f"{arch}.block_count", low=1)
    nextn = fields.optional(int, "nextn", f"{arch}.nextn_predict_layers", low=0) or 0
    embedding = file.tensors.get("token_embd.weight")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if embedding is not None:
        vocab = embedding.shape[0]
    elif isinstance(tokens, Sequence) and not isinstance(tokens, str):
        vocab = len(tokens)
    else:
        fields.fail("a target must hold token_embd.weight or a tokenizer, got neither")
    return ModelShape(
        fields.require(int, "hidden_size", f"{arch}.embedding_length", low=1), vocab, blocks - nextn
    )
