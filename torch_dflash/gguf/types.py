"""What a GGML type is: geometry, torch dtype of the plain ones, where the others keep scales.

Geometry and ids are gguf-py's constants. A *plain* type holds one value per unit (F32, BF16, I64);
a *quantized* type packs several values and their scales into one quant.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

__all__ = ["TYPES", "GGMLType", "ggml_type_of"]

Bytes = npt.NDArray[np.uint8]  # [quants, bytes]
Mask = npt.NDArray[np.bool_]  # [quants]

_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}

# Byte offsets of the float16 scales (d, and dmin or m) inside one quant.
_HALF_SCALES = {
    "Q1_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q8_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}

# Plain floats and Q8_K's float32 scale: (unsigned dtype, exponent mask). All ones in the exponent
# is an infinity or a NaN.
_EXPONENT = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One GGML storage type."""

    id: int
    name: str
    elems: int  # values per quant; 1 for plain types
    bytes: int  # bytes per quant
    dtype: torch.dtype | None  # of the plain types

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of ``columns`` values; ``columns`` is a multiple of ``elems``."""
        return columns // self.elems * self.bytes

    def nonfinite(self, quants: Bytes) -> Mask:
        """Which quants carry a scale (or, for plain floats, a value) that is NaN or infinite.

        Args:
            quants: uint8 ``[quants, bytes]``.

        Returns:
            bool ``[quants]``; all false for integer types.
        """
        if self.name in _EXPONENT:
            return _all_ones(quants, self.name)
        if self.name in _HALF_SCALES:
            bad = np.zeros(len(quants), dtype=np.bool_)
            for at in _HALF_SCALES[self.name]:
                bad |= _all_ones(quants[:, at : at + 2], "F16")
            return bad
        if self.name == "Q8_K":
            return _all_ones(quants[:, :4], "F32")
        if self.name == "IQ1_M":  # d is spread over the high nibbles of four 16-bit words
            high = quants[:, [49, 51, 53, 55]] >> 4
            d = high[:, 0] | high[:, 1] << 4, high[:, 2] | high[:, 3] << 4
            return _all_ones(np.stack(d, axis=1), "F16")
        if self.name == "MXFP4":  # E8M0: 255 is its NaN
            return np.asarray(quants[:, 0] == 0xFF)
        if self.name == "NVFP4":  # four E4M3 scales: seven ones are its NaN
            return np.asarray(((quants[:, :4] & 0x7F) == 0x7F).any(axis=1))
        return np.zeros(len(quants), dtype=np.bool_)


def _all_ones(values: Bytes, like: str) -> Mask:
    dtype, mask = _EXPONENT[like]
    bits = values.view(dtype)[:, 0]
    return np.asarray((bits & bits.dtype.type(mask)) == mask)


TYPES: dict[int, GGMLType] = {
    int(t): GGMLType(int(t), t.name, *GGML_QUANT_SIZES[t], _PLAIN.get(t.name))
    for t in GGMLQuantizationType
    if t in GGML_QUANT_SIZES
}

_BY_DTYPE = {t.dtype: t.id for t in TYPES.values() if t.dtype}


def ggml_type_of(dtype: torch.dtype) -> int | None:
    """The plain type that stores ``dtype`` bit for bit; None where GGML has none.

    ``bool`` is stored as I8 (0 or 1), which is how torch lays it out.
    """
    return _BY_DTYPE.get(torch.int8 if dtype == torch.bool else dtype)
