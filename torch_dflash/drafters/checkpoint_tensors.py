"""A drafter's tensors as its modules take them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..gguf.tensor import QuantTensor

__all__ = ["Tensors"]


class Tensors:
    """A checkpoint's tensors, taken once each, so that none is forgotten or used twice."""

    def __init__(self, tensors: Mapping[str, QuantTensor], prefix: str = "") -> None:
        self._tensors, self._prefix = tensors, prefix

    def scope(self, prefix: str) -> "Tensors":
        """The tensors whose names begin with ``prefix``."""
        return Tensors(self._tensors, self._prefix + prefix)

    def weight(self, name: str) -> QuantTensor:
        """The tensor as it lies in the file."""
        return self._tensors[self._prefix + name]

    def optional(self, name: str) -> QuantTensor | None:
        """The tensor, or None if the checkpoint has none of that name."""
        return self._tensors.get(self._prefix + name)

    def floats(self, name: str) -> Tensor:
        """A small tensor (a norm, a bias) as float32."""
        return self.weight(name).to_dense().float()

    def optional_floats(self, name: str) -> Tensor | None:
        """The same, or None."""
        return self.floats(name) if self._prefix + name in self._tensors else None

    def bias(self, *names: str) -> Tensor | None:
        """Biases side by side; None if there are none."""
        found = [self.optional_floats(n) for n in names]
        if all(b is None for b in found):
            return None
        return torch.cat([b for b in found if b is not None])
