"""GGUF files to GGUF files of other types, targets and drafters."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .drafters.from_gguf import is_drafter_arch
from .drafters.names import logical_names
from .drafters.outtypes import FILE_TYPES, OUTTYPES, storage_type
from .dtypes import bits_per_weight
from .gguf import GGUFError, GGUFFile, Progress, QuantTensor, Typed, typed_metadata, write_gguf
from .gguf.deferred import Stored, retyped
from .gguf.types import TYPES
from .gguf.writer import check_other_file

__all__ = ["Requantized", "requantize"]

_IDS: Final = {t.name: t.id for t in TYPES.values()}
_KEEP: Final = "keep"
_BELOW_SIX: Final = ("Q4_0", "IQ4_XS", "Q4_K", "Q5_K")

# What decides much and weighs little: routers, conv taps, gates and decays of a recurrent layer.
_AS_THEY_ARE: Final = re.compile(
    r"blk\.\d+\.(ffn_gate_inp\w*|ssm_(conv1d|a|dt|alpha|beta|ba)|\w*norm)\b.*"
)
# Of a target below 6 bits: one head group serves many query heads, and every token goes through
# the embedding and the head.
_SIX_BITS: Final = re.compile(
    r"(token_embd|output|blk\.\d+\.(attn_[kv]|ssm_(alpha|beta|ba)))\.weight"
)


@dataclass(frozen=True)
class Requantized:
    """What was written.

    Attributes:
        types: tensor -> its type before and after.
        notes: what the types asked for could not be given to, a line each.
    """

    types: dict[str, tuple[str, str]]
    notes: tuple[str, ...]


def requantize(
    source: str | Path,
    path: str | Path,
    outtype: str,
    *,
    tensor_types: Sequence[tuple[str, str]] = (),
    fallback: str = "q8_0",
    alignment: int | None = None,
    progress: Progress | None = None,
) -> Requantized:
    """Write a GGUF file with its matrices in another type, everything else as it is.

    Vectors, integers, routers, convolution taps and a recurrent layer's gates stay. A matrix that
    is stored in as few bits already stays too: rounding it again would lose and win nothing.
    Embedding, head, K and V of a target get at least Q6_K; a drafter's tensors get what
    :func:`~torch_dflash.drafters.outtypes.storage_type` says. Metadata is kept to the last key but
    for ``general.file_type``. Memory stays at a few tens of megabytes beyond the mapped file.

    Args:
        source: a target or drafter.
        path: another file; it appears complete or not at all.
        outtype: ``f32``, ``f16``, ``bf16``, ``q8_0``, ``q6_k``, ``q5_k``, ``q4_k``, ``iq4_xs`` or
            ``q4_0``: type of most matrices.
        tensor_types: ``(regular expression, type or "keep")``; the first that is found in a
            tensor's name decides, also about what would stay.
        fallback: type of matrices whose rows are no whole quants of ``outtype``; F16 where they
            are none of ``fallback`` either.
        alignment: of the tensor data; None: that of ``source``.
        progress: called with the tensor's name, bytes done and bytes in all.

    Returns:
        every tensor's type before and after, and notes.

    Raises:
        GGUFError: a file, type or expression that cannot be used, ``path`` being ``source``, or a
            value that a type cannot hold.
        OSError: a file cannot be read or written.
    """
    source, path = Path(source), Path(path)
    chosen, spare = _type_name(path, "outtype", outtype), _type_name(path, "fallback", fallback)
    rules = [_rule(path, pattern, name) for pattern, name in tensor_types]
    with GGUFFile.open(source) as file:
        check_other_file(path, source)
        plan = _Plan(file, chosen, spare, rules)
        metadata = typed_metadata(file)
        if "general.file_type" in metadata:
            metadata["general.file_type"] = Typed("uint32", FILE_TYPES[chosen])
        if any(TYPES[t].elems > 1 for t in plan.types.values()):
            metadata.setdefault("general.quantization_version", Typed("uint32", 2))
        try:
            write_gguf(
                path,
                file.architecture,
                metadata,
                plan.tensors(),
                alignment=file.alignment if alignment is None else alignment,
                progress=progress,
            )
        except GGUFError:
            raise
        except ValueError as error:  # of a piece of a tensor
            raise GGUFError(f"{path}: tensor {error}") from None
        before = {n: TYPES[t.ggml_type].name for n, t in file.tensors.items()}
        return Requantized(
            {n: (b, TYPES[plan.types[n]].name) for n, b in before.items()}, plan.notes()
        )


def _type_name(path: Path, argument: str, name: str) -> str:
    found = OUTTYPES.get(name.lower())
    if found is None:
        raise GGUFError(f"{path}: {argument} must be one of {', '.join(OUTTYPES)}, got {name!r}")
    return found


def _rule(path: Path, pattern: str, name: str) -> tuple[re.Pattern[str], str]:
    if name.lower() != _KEEP:
        name = _type_name(path, f"type of {pattern!r}", name)
    try:
        return re.compile(pattern), name if name in _IDS else _KEEP
    except re.error as error:
        raise GGUFError(
            f"{path}: tensor type {pattern!r} must be a regular expression, got {error}"
        ) from None


class _Plan:
    """The type of every tensor of a file."""

    def __init__(
        self, file: GGUFFile, chosen: str, spare: str, rules: list[tuple[re.Pattern[str], str]]
    ) -> None:
        self.file, self.chosen, self.spare, self.rules = file, chosen, spare, rules
        self.logical: dict[str, str] | None = None
        if is_drafter_arch(file.architecture):
            found = logical_names(str(file.path), file.tensors, gguf=True)
            self.logical = {name: logical for logical, name in found.items()}
        self.used: Counter[str] = Counter()
        self.fell: dict[str, list[str]] = {}  # type given -> tensors
        self.kept = self.again = 0
        self.types = {name: self._type(name) for name in file.tensors}
        for pattern, _ in rules:
            if not self.used[pattern.pattern]:
                raise GGUFError(
                    f"{file.path}: tensor type {pattern.pattern!r} must match a tensor, got none "
                    f"of {len(file.tensors)}; torch-dflash inspect --tensors lists them"
                )

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name, ggml_type in self.types.items():
            yield name, retyped(self.file.tensor(name), ggml_type, repr(name))

    def notes(self) -> tuple[str, ...]:
        notes = [
            f"rows that are no whole quants of {self.chosen}, stored as {given}: "
            f"{', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for given, names in self.fell.items()
        ]
        if self.kept:
            notes.append(f"matrices that had no more bits already, kept as they were: {self.kept}")
        if self.again:
            notes.append(
                f"matrices that were quantized before, so that both roundings add up: {self.again};"
                " an unquantized source is better"
            )
        return tuple(notes)

    def _type(self, name: str) -> int:
        tensor = self.file.tensor(name, check=False)
        ggml_type = self._ordered(name, tensor)
        if ggml_type is None:
            ggml_type = self._sensible(name, tensor)
        if ggml_type != tensor.ggml_type and tensor.type.dtype is None:
            self.again += TYPES[ggml_type].dtype is None
        return ggml_type

    def _ordered(self, name: str, tensor: QuantTensor) -> int | None:
        """The type that the caller named for it."""
        for pattern, kind in self.rules:
            if not pattern.search(name):
                continue
            self.used[pattern.pattern] += 1
            if kind == _KEEP:
                return tensor.ggml_type
            wanted = TYPES[_IDS[kind]]
            if not _is_float(tensor):
                raise GGUFError(
                    f"{self.file.path}: tensor {name!r} holds integers and must stay "
                    f"{tensor.type_name}, got {kind} for it from {pattern.pattern!r}"
                )
            if tensor.columns % wanted.elems or (len(tensor.shape) < 2 and wanted.elems > 1):
                raise GGUFError(
                    f"{self.file.path}: tensor {name!r} must be a matrix with rows of a multiple "
                    f"of {wanted.elems} values for {kind}, got {[*tensor.shape]} "
                    f"from {pattern.pattern!r}"
                )
            return wanted.id
        return None

    def _sensible(self, name: str, tensor: QuantTensor) -> int:
        if not _is_float(tensor) or len(tensor.shape) < 2:
            return tensor.ggml_type
        plain = tensor.type.dtype is not None
        if plain and self.logical is None and _AS_THEY_ARE.fullmatch(name):
            return tensor.ggml_type
        wanted = TYPES[_IDS[self.chosen]]
        if self.logical is not None:
            if name not in self.logical:  # of no use to the drafter that runs
                return tensor.ggml_type
            wanted = TYPES[storage_type(self.logical[name], tensor, self.chosen)]
        elif self.chosen in _BELOW_SIX and _SIX_BITS.fullmatch(name):
            wanted = TYPES[_IDS["Q6_K"]]
        for kind in (wanted, TYPES[_IDS[self.spare]], TYPES[_IDS["F16"]]):
            if tensor.columns % kind.elems == 0:
                break
        if kind.elems > 1 and bits_per_weight(tensor) <= 8 * kind.bytes / kind.elems:
            self.kept += kind.id != tensor.ggml_type
            return tensor.ggml_type
        if tensor.rows > 1 and tensor.columns % TYPES[_IDS[self.chosen]].elems:
            self.fell.setdefault(kind.name, []).append(name)
        return kind.id


def _is_float(tensor: QuantTensor) -> bool:
    return tensor.type.dtype is None or tensor.type.dtype.is_floating_point
