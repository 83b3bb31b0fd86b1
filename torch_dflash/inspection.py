"""What a file is, where each value came from, and whether it can be used: here and elsewhere."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from .drafters.checkpoint import DrafterCheckpoint, read_checkpoint
from .drafters.config import DrafterConfig, check_against_target
from .drafters.from_gguf import is_drafter_arch
from .drafters.from_hf import config_from_hf
from .drafters.resolve import Overrides
from .drafters.target_shape import ModelShape, target_shape
from .drafters.tensors import tensor_table
from .drafters.to_gguf import gguf_notes
from .drafters.to_hf import hf_notes
from .gguf import GGUFFile, QuantTensor
from .gguf.types import TYPES
from .hf import CheckpointError, read_config

__all__ = ["inspect_file", "summary"]


def inspect_file(
    path: str | Path, *, target: str | Path | None = None, tensors: bool = False
) -> dict[str, Any]:
    """Facts about a target or a drafter, as plain values that JSON can hold.

    Args:
        path: GGUF file; a drafter's folder, with or without weights; or its ``config.json``.
        target: GGUF or folder of the drafter's target: fills in what the drafter leaves to it, and
            whether they match is said.
        tensors: include a line per tensor.

    Returns:
        ``file``, ``kind``, ``usable`` (``yes``, or why not) and, as far as they can be told,
        ``config`` (name -> ``[value, source]``), ``notes``, ``elsewhere`` (what other engines
        refuse or leave out), ``tensors``, ``parameters``, ``megabytes`` and ``types``. A drafter
        has ``draft tokens per step``, ``layers`` (mask of each), ``target layers`` in both ways of
        counting and ``target`` besides.

    Raises:
        GGUFError, CheckpointError, OSError: the file is damaged or not there, or ``target`` was
            given with a target. A whole file that cannot be used is no error: ``usable`` says why.
    """
    path = Path(path)
    shape = None if target is None else target_shape(target)
    if path.is_dir() or path.suffix == ".json":
        return _drafter(path, shape, tensors)
    with GGUFFile.open(path) as file:
        architecture = file.architecture
    if is_drafter_arch(architecture):
        return _drafter(path, shape, tensors)
    if target is not None:
        raise CheckpointError(f"{path}: must be a drafter to hold against a target, got a target")
    return _target(path, tensors)


def summary(path: str | Path) -> str:
    """One line about a file: kind, tensors, size, types."""
    facts = inspect_file(path)
    types = ", ".join(f"{name} {text.split()[0]}" for name, text in facts["types"].items())
    return (
        f"{facts['kind']}, {facts['tensors']} tensors, {facts['parameters']:,} parameters, "
        f"{facts['megabytes']} MB ({types})"
    )


def _drafter(path: Path, shape: ModelShape | None, listed: bool) -> dict[str, Any]:
    overrides = Overrides()
    if shape is not None:
        overrides = Overrides(num_target_layers=shape.num_layers, vocab_size=shape.vocab_size)
    if _has_no_weights(path):
        return _config_only(path, shape, overrides)
    facts: dict[str, Any] = {"file": str(path), "kind": "drafter", "usable": "yes"}
    try:
        checkpoint = read_checkpoint(path, overrides=overrides)
    except CheckpointError as error:
        facts["usable"] = str(error)
        return facts | _what_there_is(path, listed)
    config = checkpoint.config
    facts["kind"] = f"{config.kind} drafter ({checkpoint.format})"
    facts["usable"] = _refusal(config, shape, path) or "yes"
    facts |= _config_facts(config, shape)
    facts["elsewhere"] = [*_once(gguf_notes(checkpoint), hf_notes(config))]
    return facts | _sizes(checkpoint.tensors, listed)


def _has_no_weights(path: Path) -> bool:
    return path.suffix == ".json" or (
        path.is_dir() and not any(path.glob("*.safetensors*")) and (path / "config.json").exists()
    )


def _config_only(path: Path, shape: ModelShape | None, overrides: Overrides) -> dict[str, Any]:
    """A config promises kind, names and shapes; types and values are not known."""
    raw = read_config(path)
    where = path / "config.json" if path.is_dir() else path
    facts: dict[str, Any] = {"file": str(where), "kind": "drafter (config)", "usable": "yes"}
    try:
        config = config_from_hf(raw, where=str(where), overrides=overrides)
    except CheckpointError as error:
        return facts | {"usable": str(error)}
    facts["kind"] = f"{config.kind} drafter (config)"
    facts["usable"] = _refusal(config, shape, where) or "yes, once its weights are there"
    facts |= _config_facts(config, shape)
    empty = DrafterCheckpoint(config, {}, path, "hf", None)
    facts["elsewhere"] = [*_once(gguf_notes(empty), hf_notes(config))]
    table = tensor_table(config)
    promised = dict(table.required)
    bias = "confidence_head.proj.bias"
    if bias in table.optional:  # every published confidence head has one
        promised[bias] = table.optional[bias]
    return facts | {
        "tensors": len(promised),
        "parameters": sum(math.prod(s) for s in promised.values()),
        "megabytes": round(2 * sum(math.prod(s) for s in promised.values()) / 2**20, 2),
        "types": {"BF16": f"{len(promised)} tensors, as published"},
    }


def _refusal(config: DrafterConfig, shape: ModelShape | None, where: Path) -> str | None:
    try:
        if shape is not None:
            check_against_target(config, shape, str(where))
    except CheckpointError as error:
        return str(error)
    return None


def _config_facts(c: DrafterConfig, shape: ModelShape | None) -> dict[str, Any]:
    depth = c.num_target_layers or "unknown"
    return {
        "draft tokens per step": c.max_draft_tokens,
        "target": {
            "hidden size": c.target_hidden_size,
            "vocabulary": c.vocab_size,
            "layers": depth,
            "given": "no" if shape is None else "yes",
        },
        "target layers": {
            "output of layer (from 0)": [*c.target_layer_ids],
            "input of layer, as in GGUF": [i + 1 for i in c.target_layer_ids],
        },
        "layers": [
            f"{'full attention' if layer.window is None else f'window {layer.window}'}, "
            f"{'causal' if layer.causal else 'not causal'}"
            for layer in c.layers
        ],
        "config": {n: [_plain(v), source] for n, v, source in c.describe()},
        "notes": [*c.notes],
    }


def _what_there_is(path: Path, listed: bool) -> dict[str, Any]:
    """Sizes of a drafter that cannot be read as one."""
    if path.is_dir():
        return {}
    with GGUFFile.open(path) as file:
        return _sizes({n: file.tensor(n, check=False) for n in file.tensors}, listed)


def _target(path: Path, listed: bool) -> dict[str, Any]:
    from .models import read_target_config

    with GGUFFile.open(path) as file:
        facts: dict[str, Any] = {"file": str(path), "kind": f"{file.architecture} target (gguf)"}
        try:
            config = read_target_config(file)
            facts["usable"] = "yes"
            facts["config"] = {n: [_plain(v), source] for n, v, source in config.describe()}
            facts["notes"] = [*config.notes]
        except CheckpointError as error:
            facts["usable"] = str(error)
        return facts | _sizes({n: file.tensor(n, check=False) for n in file.tensors}, listed)


def _sizes(stored: Mapping[str, QuantTensor], listed: bool) -> dict[str, Any]:
    types: dict[str, list[int]] = {}
    for tensor in stored.values():
        count = types.setdefault(tensor.type_name, [0, 0])
        count[0] += 1
        count[1] += tensor.nbytes
    order = {t.name: t.id for t in TYPES.values()}
    facts: dict[str, Any] = {
        "tensors": len(stored),
        "parameters": sum(t.rows * t.columns for t in stored.values()),
        "megabytes": round(sum(t.nbytes for t in stored.values()) / 2**20, 2),
        "types": {
            n: f"{types[n][0]} tensors, {types[n][1] / 2**20:.2f} MB"
            for n in sorted(types, key=lambda n: order[n])
        },
    }
    if listed:
        facts["tensor list"] = {n: f"{t.type_name} {[*t.shape]}" for n, t in stored.items()}
    return facts


def _once(*lists: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(line for lines in lists for line in lines)


def _plain(value: Any) -> Any:
    """A value that JSON and a terminal can show."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)
