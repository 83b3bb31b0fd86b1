"""Weights to measure quantizers on; the figures of others were taken on the same values."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["WEIGHTS", "weights"]

WEIGHTS = ("gaussian", "heavy-tailed", "trained")
_ROWS, _COLUMNS = 1024, 512
_MODEL = Path(__file__).parents[1] / "assets/tiny/target.gguf"


def weights(kind: str) -> Tensor:
    """Half a million values of one kind.

    Args:
        kind: ``gaussian``; ``heavy-tailed``, Student's t with four degrees of freedom; or
            ``trained``, two matrices of the embedded target that are stored as Q8_0.

    Returns:
        float32 ``[1024, 512]``, the same at every call.

    Raises:
        ValueError: another kind.
    """
    from ..gguf import GGUFFile

    random = np.random.default_rng(7)
    if kind == "gaussian":
        return torch.from_numpy(random.standard_normal((_ROWS, _COLUMNS)).astype(np.float32))
    if kind == "heavy-tailed":
        return torch.from_numpy(random.standard_t(4, (_ROWS, _COLUMNS)).astype(np.float32))
    if kind != "trained":
        raise ValueError(f"weights: kind must be one of {', '.join(WEIGHTS)}, got {kind}")
    with GGUFFile.open(_MODEL) as file:
        parts = [file.tensor(f"blk.{layer}.ssm_out.weight").to_dense() for layer in (0, 1)]
    return torch.cat(parts)
