"""``mask_embedding.pt``: an embedding that some drafters use instead of the mask token's row."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..fields import CheckpointError

__all__ = ["MaskEmbedding", "read_mask_embedding"]

_MAX_BYTES: Final = 16 << 20


@dataclass(frozen=True, eq=False)
class MaskEmbedding:
    """What the file holds.

    Attributes:
        path: the file.
        embedding: ``[hidden]``, float32, float16 or bfloat16.
        token_id: the token it stands for, if the file says.
    """

    path: Path
    embedding: Tensor
    token_id: int | None

    def check(self, hidden_size: int, mask_token_id: int) -> None:
        """Check against the drafter.

        Raises:
            CheckpointError: another width or another token.
        """
        if tuple(self.embedding.shape) != (hidden_size,):
            raise CheckpointError(
                f"{self.path}: embedding must be [{hidden_size}], got {[*self.embedding.shape]}"
            )
        if self.token_id not in (None, mask_token_id):
            raise CheckpointError(
                f"{self.path}: mask_token_id must be the drafter's {mask_token_id}, "
                f"got {self.token_id}"
            )


def read_mask_embedding(path: Path) -> MaskEmbedding | None:
    """Read the file; None if there is none.

    It is a pickle, so only tensors and plain containers are unpickled.

    Raises:
        CheckpointError: the file is damaged, too large, holds anything else, or is not finite.
    """
    if not path.exists():
        return None
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{path}: must be a file of at most {_MAX_BYTES} bytes")
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on junk the unpickler fails with whatever it stumbles over
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: must hold a tensor or a dict, got: {first}") from None
    token_id = None
    if isinstance(value, Mapping):
        token_id, value = value.get("mask_token_id"), value.get("embedding")
        if token_id is not None and type(token_id) is not int:
            raise CheckpointError(f"{path}: mask_token_id must be an integer, got {token_id!r}")
    if not isinstance(value, Tensor) or value.dtype not in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(
            f"{path}: embedding must be a float32, float16 or bfloat16 tensor, got {got}"
        )
    if value.dim() == 2 and value.shape[0] == 1:
        value = value[0]
    if not value.isfinite().all():
        raise CheckpointError(f"{path}: embedding must be finite, got NaN or infinity")
    return MaskEmbedding(path, value.detach().contiguous(), token_id)
