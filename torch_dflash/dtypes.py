"""Which GGML types a model's tensors may have."""

from collections.abc import Iterable, Mapping
from typing import Final

from .gguf import QuantTensor
from .hf import CheckpointError

__all__ = ["INTEGERS", "PLAIN", "WEIGHTS", "bits_per_weight", "check_types", "low_bit_note"]

PLAIN: Final = frozenset(["F32", "F16", "BF16"])
INTEGERS: Final = frozenset(["I32", "I64"])
# everything gguf-py can decode, so that each has an oracle
WEIGHTS: Final = PLAIN | frozenset(
    [
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ1_S",
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ4_NL",
        "IQ4_XS",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
        "NVFP4",
    ]
)


def check_types(
    where: str, tensors: Mapping[str, QuantTensor], integers: Iterable[str] = ()
) -> None:
    """Check the type of every tensor: vectors are plain floats, the rest any weight type.

    Args:
        where: the file, for messages.
        tensors: name -> tensor.
        integers: names of index tables.

    Raises:
        CheckpointError: a tensor has another type; the message names it.
    """
    tables = set(integers)
    for name, tensor in tensors.items():
        allowed = WEIGHTS if len(tensor.shape) > 1 else PLAIN
        if name in tables:
            allowed = INTEGERS
        if tensor.type_name not in allowed:
            raise CheckpointError(
                f"{where}: tensor {name!r} must be of type {' '.join(sorted(allowed))}, "
                f"got {tensor.type_name}"
            )


def bits_per_weight(tensor: QuantTensor) -> float:
    """Stored bits per value, scales included."""
    return 8 * tensor.type.bytes / tensor.type.elems


def low_bit_note(tensors: Mapping[str, QuantTensor]) -> str | None:
    """A line about a drafter quantized so low that it is known to cost acceptance, or None."""
    low = {t.type_name for t in tensors.values() if bits_per_weight(t) < 5}
    if not low:
        return None
    return (
        f"weights in {' '.join(sorted(low))}: below 5 bits a drafter's proposals are accepted "
        "measurably less; compare with Q8_0"
    )
