"""Which GGML type each tensor of a written drafter gets."""

import re
from typing import Final

from ..gguf import QuantTensor
from ..gguf.types import TYPES

__all__ = ["FILE_TYPES", "OUTTYPES", "storage_type"]

_IDS: Final = {t.name: t.id for t in TYPES.values()}

# what a user asks for -> the type of most matrices
OUTTYPES: Final = {
    name.lower(): name
    for name in ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q4_0")
}
# general.file_type, a hint for people, by the type of most matrices
FILE_TYPES: Final = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q8_0": 7,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "IQ4_XS": 30,
    "BF16": 32,
}

_PLAIN: Final = ("F32", "F16", "BF16")
# Small beside the rest, and what a drafter's acceptance hangs on: everything it knows of the
# context goes through fc, K and V; tables are read one row at a time.
_CAREFUL: Final = re.compile(
    r"fc\.weight|.*\.self_attn\.[kv]_proj\.weight|.*_conv\.kernel_projection\.weight|"
    r"candidate_selector\..*|markov_head\..*|embed_tokens\.weight|lm_head\.weight"
)


def storage_type(logical: str, tensor: QuantTensor, outtype: str | None) -> int:
    """Type id that a tensor is written as.

    Vectors and bases of convolutions are F32 and integers stay. Below Q8_0, ``fc``, K, V, tables
    and heads are Q8_0. A row that is no whole quant is Q8_0 if it can, else F16; a matrix of one
    row is F32, which costs nothing.

    Args:
        logical: its name.
        tensor: as read.
        outtype: value of :data:`OUTTYPES`; None keeps the types of matrices.

    >>> import torch
    >>> def of(name, columns, outtype, rows=4):
    ...     tensor = QuantTensor.from_tensor(torch.zeros(rows, columns))
    ...     return TYPES[storage_type(name, tensor, outtype)].name
    >>> of("layers.0.mlp.up_proj.weight", 512, "Q4_K"), of("fc.weight", 512, "Q4_K")
    ('Q4_K', 'Q8_0')
    >>> of("layers.0.mlp.up_proj.weight", 96, "Q4_K"), of("lm_head.weight", 10, "Q6_K")
    ('Q8_0', 'F16')
    """
    dtype = tensor.type.dtype
    if dtype is not None and not dtype.is_floating_point:
        return tensor.ggml_type
    if len(tensor.shape) == 1 or logical.endswith(".base_kernel"):
        return _IDS["F32"]
    if outtype is None:
        return tensor.ggml_type
    if outtype in _PLAIN:
        return _IDS[outtype]
    if tensor.rows == 1:
        return _IDS["F32"]
    if _CAREFUL.fullmatch(logical):
        outtype = "Q8_0"
    for name in (outtype, "Q8_0"):
        if tensor.columns % TYPES[_IDS[name]].elems == 0:
            return _IDS[name]
    return _IDS["F16"]
