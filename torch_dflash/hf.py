"""Hugging Face folders: config.json and safetensors weights, checked and without a copy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from .gguf import QuantTensor
from .jsonfile import CheckpointError, read_json

__all__ = ["CheckpointError", "open_safetensors", "read_config"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_CONFIG: Final = 8 << 20  # bytes; published ones have a few kB
_MAX_INDEX: Final = 64 << 20


def read_config(path: str | Path) -> dict[str, Any]:
    """Read ``config.json`` of a folder (or the JSON file itself).

    Returns:
        The object as it stands; what its keys mean is for the caller to check.

    Raises:
        CheckpointError: missing, larger than 8 MiB, not UTF-8 JSON, a repeated key, or not an
            object.
    """
    path = Path(path)
    return read_json(path / "config.json" if path.is_dir() else path, _MAX_CONFIG)


def open_safetensors(path: str | Path, *, check: bool = True) -> dict[str, QuantTensor]:
    """Map every tensor of a checkpoint.

    Args:
        path: a folder with ``model.safetensors`` or ``model.safetensors.index.json`` and its
            shards, or one ``.safetensors`` file.
        check: refuse NaN and infinite values.

    Returns:
        name -> tensor in its stored dtype and shape; the files stay mapped while a tensor lives.
        Booleans come as I8.

    Raises:
        CheckpointError: a file is missing, damaged or unlisted, a shard name leads out of the
            folder, a tensor is missing, in two shards, of a dtype GGML does not have, or not
            finite.
    """
    path = Path(path)
    if path.is_dir():
        index = path / _INDEX
        if index.exists():
            return _open_shards(index, check)
        path = path / _SINGLE
        if not path.exists():
            found = sorted(p.name for p in path.parent.glob("*.safetensors"))
            raise CheckpointError(
                f"{path.parent}: must hold {_SINGLE} or {_INDEX}, got "
                f"{', '.join(found) or 'no safetensors file'}; "
                + ("name the file itself" if found else "pickled weights are not read")
            )
    return dict(_open_file(path, check))


def _open_shards(index: Path, check: bool) -> dict[str, QuantTensor]:
    weight_map = read_json(index, _MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be a non-empty object, got {weight_map!r}")
    for name, shard in weight_map.items():
        # A shard is a file of this folder. Anything else could read any file of the machine.
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise CheckpointError(
                f"{index}: weight_map[{name!r}] must be the name of a .safetensors file in this "
                f"folder, got {shard!r}"
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: all {len(shards)} shards must be there, missing {', '.join(missing)}; "
            "the download is incomplete, fetch them"
        )
    if _SINGLE not in shards and (index.parent / _SINGLE).exists():
        raise CheckpointError(
            f"{index}: the folder must hold one checkpoint, got {_SINGLE} beside these shards; "
            "remove one of them"
        )
    tensors: dict[str, QuantTensor] = {}
    for shard in shards:
        for name, tensor in _open_file(index.parent / shard, check):
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{index.parent / shard}: tensor {name!r} must be in "
                    f"{weight_map.get(name, 'no shard')} according to {_INDEX}, got it here"
                )
            tensors[name] = tensor
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise CheckpointError(
            f"{index}: every tensor must be in its shard, got none of {', '.join(absent[:5])}"
            + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        )
    return tensors


def _open_file(path: Path, check: bool) -> Iterator[tuple[str, QuantTensor]]:
    if not path.is_file():  # a FIFO would block
        raise CheckpointError(
            f"{path}: must be a file, got "
            f"{'a folder or device' if path.exists() else 'nothing there'}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, _wrap(path, name, file.get_tensor(name), check)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: must be a complete safetensors file, got: {error}; fetch the file again"
        ) from None


def _wrap(path: Path, name: str, data: Any, check: bool) -> QuantTensor:
    try:
        tensor = QuantTensor.from_tensor(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {name!r}: {error}") from None
    if check and (bad := tensor.first_nonfinite()):
        raise CheckpointError(
            f"{path}: tensor {name!r} must have finite values, got NaN or infinity in row "
            f"{bad[0]}, column {bad[1]}"
        )
    return tensor


def _is_file_name(name: str) -> bool:
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0")
