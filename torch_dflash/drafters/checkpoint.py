"""Reads a drafter from a Hugging Face folder or a GGUF file into one form."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..dtypes import check_types, low_bit_note
from ..fields import CheckpointError, Fields
from ..gguf import GGUFFile, QuantTensor
from ..hf import open_safetensors, read_config
from ..jsonfile import next_step
from .config import DrafterConfig, TargetShape, check_against_target
from .from_gguf import config_from_gguf, drafter_arch
from .from_hf import config_from_hf
from .mask_embedding import read_mask_embedding
from .names import logical_names
from .resolve import Overrides
from .rope import neox_order

__all__ = ["DrafterCheckpoint", "load_checkpoint", "read_checkpoint"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DrafterCheckpoint:
    """A drafter as its file holds it, under the names and in the layout of this package.

    Attributes:
        config: everything that is not a weight; ``rope_is_neox`` is True, since rows of the other
            layout were reordered.
        tensors: logical name -> tensor, types as stored. ``d2t`` holds absolute target ids
            (I64), ``confidence_head.proj.bias`` is there whenever the head is, and
            ``mask_embedding`` ``[hidden]`` replaces the embedding of the mask token if present.
        path: the folder or file.
        format: which of the two.
        tokenizer: folder or file with the tokenizer that came along; None: use the target's.
    """

    config: DrafterConfig
    tensors: Mapping[str, QuantTensor]
    path: Path
    format: Literal["hf", "gguf"]
    tokenizer: Path | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())


def load_checkpoint(
    path: str | Path,
    *,
    target: TargetShape | None = None,
    overrides: Overrides | None = None,
) -> DrafterCheckpoint:
    """Read a drafter that can run, and log what was decided about it.

    Args:
        path: a folder with ``config.json`` and safetensors, or a ``.gguf`` file.
        target: config of its target; fills in what the file leaves to it, and must match.
        overrides: what the caller knows better than the file.

    Raises:
        CheckpointError: the file is incomplete, contradicts itself, belongs to a drafter that is
            not supported or does not match ``target``.
        GGUFError: a ``.gguf`` file is damaged.
    """
    if target is not None:
        overrides = replace(
            overrides or Overrides(),
            num_target_layers=target.num_layers,
            vocab_size=target.vocab_size,
        )
    checkpoint = read_checkpoint(path, overrides=overrides)
    if target is not None:
        check_against_target(checkpoint.config, target, str(path))
    for note in checkpoint.config.notes:
        _log.warning("%s: %s", path, note)
    return checkpoint


def read_checkpoint(path: str | Path, *, overrides: Overrides | None = None) -> DrafterCheckpoint:
    """Like :func:`load_checkpoint`, also for heads that are recognised but do not run yet."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(path, overrides or Overrides())
    if path.suffix == ".gguf" or _is_gguf(path):
        return _read_gguf(path, overrides or Overrides())
    got = "another file" if path.exists() else f"nothing there; {next_step(path)}"
    raise CheckpointError(
        f"{path}: a drafter must be a folder with config.json and safetensors, or a .gguf file, "
        f"got {got}"
    )


def _is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF does, whatever its name is."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _read_folder(path: Path, overrides: Overrides) -> DrafterCheckpoint:
    config_file = path / "config.json"
    raw = read_config(path)
    stored = open_safetensors(path)
    names = logical_names(str(path), stored, gguf=False)
    notes = _drop_unwanted(names, raw)
    tensors = {logical: stored[name] for logical, name in names.items()}
    ignored = sorted(stored.keys() - set(names.values()))
    mask = read_mask_embedding(path / "mask_embedding.pt")
    if mask is not None:
        overrides = replace(overrides, fallback_mask_token_id=mask.token_id)
    config = config_from_hf(
        raw,
        {n: t.shape for n, t in tensors.items()},
        where=str(config_file),
        tensors_in=str(path),
        overrides=overrides,
    )
    if mask is not None:
        mask.check(config.hidden_size, config.mask_token_id)
        tensors["mask_embedding"] = QuantTensor.from_tensor(mask.embedding)
    if ignored:
        notes.append(f"tensors of no use here: {', '.join(ignored)}")
    has_tokenizer = any((path / f"tokenizer{s}.json").exists() for s in ("", "_config"))
    tensors = _finish(str(path), config, tensors, absolute=False)
    config = _with_notes(config, notes, tensors)
    return DrafterCheckpoint(config, tensors, path, "hf", path if has_tokenizer else None)


def _read_gguf(path: Path, overrides: Overrides) -> DrafterCheckpoint:
    with GGUFFile.open(path) as file:
        drafter_arch(Fields(str(path), [("", file.metadata)]))  # before its tensors are judged
        names = logical_names(str(path), file.tensors, gguf=True)
        shapes = {logical: file.tensors[name].shape for logical, name in names.items()}
        config = config_from_gguf(file.metadata, shapes, where=str(path), overrides=overrides)
        tensors = {logical: file.tensor(name) for logical, name in names.items()}
        has_tokenizer = "tokenizer.ggml.tokens" in file.metadata
    tensors = _finish(str(path), config, tensors, absolute=True)
    config = _with_notes(config, [], tensors)
    return DrafterCheckpoint(config, tensors, path, "gguf", path if has_tokenizer else None)


def _drop_unwanted(names: dict[str, str], raw: Mapping[str, Any]) -> list[str]:
    """Leave out an embedding or head that the config disowns."""
    notes = []
    for key in ("embed_tokens", "lm_head"):
        if raw.get(f"has_{key}") is False and names.pop(f"{key}.weight", None) is not None:
            notes.append(f"has_{key} is false: tensor {key}.weight is not used")
    return notes


def _with_notes(
    config: DrafterConfig, notes: list[str], tensors: Mapping[str, QuantTensor]
) -> DrafterConfig:
    low = low_bit_note(tensors)
    lines = (*config.notes, *notes, *([low] if low else []))
    if config.rope_is_neox:
        return replace(config, notes=lines)
    source = config.sources["rope_is_neox"]
    return replace(
        config,
        rope_is_neox=True,
        sources={**config.sources, "rope_is_neox": f"{source} = false, rows reordered"},
        notes=(*lines, f"rope: {source} is false; q and k rows were put in NeoX order"),
    )


def _finish(
    where: str, config: DrafterConfig, tensors: dict[str, QuantTensor], absolute: bool
) -> dict[str, QuantTensor]:
    """Bring stored tensors into the one form that a drafter reads."""
    conf = "confidence_head.proj"
    weight = tensors.get(f"{conf}.weight")
    if weight is not None:
        if len(weight.shape) == 1:  # some writers drop the row dimension
            row = QuantTensor(weight.packed, weight.ggml_type, (1, *weight.shape))
            tensors[f"{conf}.weight"] = row
        zero = torch.zeros(1, dtype=torch.float32, device="cpu")
        tensors.setdefault(f"{conf}.bias", QuantTensor.from_tensor(zero))
    check_types(where, tensors, integers=["d2t"])
    if "d2t" in tensors:
        tensors["d2t"] = _absolute_ids(where, config, tensors["d2t"], absolute)
    if not config.rope_is_neox:
        _reorder(config, tensors)
    return tensors


def _absolute_ids(
    where: str, config: DrafterConfig, table: QuantTensor, absolute: bool
) -> QuantTensor:
    """``d2t`` as target ids: Hugging Face files store offsets, GGUF files the ids."""
    ids = table.to_dense().to(torch.int64)
    if not absolute:
        ids = ids + torch.arange(len(ids), device=ids.device)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        stored = "ids" if absolute else "offsets from the draft id"
        raise CheckpointError(
            f"{where}: tensor 'd2t' must hold {stored} that stay in the vocabulary of "
            f"{config.vocab_size}, got ids {low}..{high}"
        )
    repeats = len(ids) - len(set(ids.tolist()))
    if repeats:
        raise CheckpointError(
            f"{where}: tensor 'd2t' must map every draft token to another token, got {repeats} "
            "repeats"
        )
    return QuantTensor.from_tensor(ids)


def _reorder(config: DrafterConfig, tensors: dict[str, QuantTensor]) -> None:
    """Interleaved rope becomes NeoX rope; whole rows move, nothing is rounded."""
    dims = config.head_dim, config.rope.rotary_dim
    for i in range(config.num_layers):
        for letter, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            at = f"layers.{i}.self_attn.{letter}"
            for name, count in (
                ("_proj.weight", heads),
                ("_proj.bias", heads),
                ("_norm.weight", 1),
            ):
                if at + name in tensors:
                    tensors[at + name] = tensors[at + name].take_rows(neox_order(count, *dims))
