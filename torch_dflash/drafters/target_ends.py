"""Embedding and head of a target, for a drafter file that must bring them along."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..fields import CheckpointError, shape_text
from ..gguf import GGUFFile, QuantTensor
from ..hf import open_safetensors
from .checkpoint import DrafterCheckpoint

__all__ = ["with_target_ends"]

_EMBEDDING = ("token_embd.weight", "embed_tokens.weight")
_HEAD = ("output.weight", "lm_head.weight")
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")


def with_target_ends(checkpoint: DrafterCheckpoint, target: str | Path | None) -> DrafterCheckpoint:
    """The drafter with what a GGUF needs of its target's embedding and head.

    A drafter with an embedding but no head reads the target's head, which llama.cpp would replace
    by the embedding; a mask embedding has to become a row of an embedding. In both cases the file
    must hold both ends. Any other drafter comes back as it is.

    Args:
        checkpoint: the drafter.
        target: GGUF file or folder; None leaves the drafter alone, and the writer refuses it.

    Raises:
        CheckpointError: the target lacks a tensor, or has one of another shape.
    """
    tensors = dict(checkpoint.tensors)
    mask, embedding, head = (
        n in tensors for n in ("mask_embedding", "embed_tokens.weight", "lm_head.weight")
    )
    if target is None or not (mask or (embedding and not head)) or (embedding and head):
        return checkpoint
    ends = _open(Path(target))
    if not embedding:
        tensors["embed_tokens.weight"] = _take(checkpoint, target, ends, _EMBEDDING)
    if not head:
        # a model without a head of its own is tied
        tensors["lm_head.weight"] = _take(checkpoint, target, ends, (*_HEAD, *_EMBEDDING))
    return replace(checkpoint, tensors=tensors)


def _open(target: Path) -> Mapping[str, QuantTensor]:
    if target.is_dir():
        return open_safetensors(target, check=False)
    with GGUFFile.open(target) as file:
        names = [n for n in (*_EMBEDDING, *_HEAD) if n in file.tensors]
        return {n: file.tensor(n) for n in names}


def _take(
    checkpoint: DrafterCheckpoint,
    target: str | Path,
    ends: Mapping[str, QuantTensor],
    names: tuple[str, ...],
) -> QuantTensor:
    found = [ends[p + n] for n in names for p in _PREFIXES if p + n in ends]
    if not found:
        raise CheckpointError(f"{target}: must hold {names[0]} or {names[1]}, got neither")
    want = (checkpoint.config.vocab_size, checkpoint.config.hidden_size)
    if found[0].shape != want:
        raise CheckpointError(
            f"{target}: {names[0]} must be {shape_text(want)}, got {shape_text(found[0].shape)}"
        )
    if bad := found[0].first_nonfinite():
        raise CheckpointError(
            f"{target}: {names[0]} must be finite, got NaN or inf in row {bad[0]}"
        )
    return found[0]
