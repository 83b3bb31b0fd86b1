"""A module whose buffers and children are plain attributes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["Module"]


class Module(nn.Module):
    """``nn.Module`` without the slow attribute path.

    ``nn.Module`` finds buffers and children in ``__getattr__``, after every other look-up has
    failed; a decode step of a small model does that some three hundred times. Here they stand in
    the instance's dictionary as well, kept equal by every way of changing them.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, through ``nn.Module``'s machinery where hooks or a compiled call need it."""
        if self._forward_hooks or self._forward_pre_hooks or self._compiled_call_impl:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign as usual, then mirror; a number that changes every step takes the short way."""
        if type(value) in (int, float, bool, tuple) and name in self.__dict__:
            self.__dict__[name] = value
            return
        super().__setattr__(name, value)
        if name in self._buffers or name in self._modules:
            self.__dict__[name] = value

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register as usual, then mirror."""
        super().register_buffer(name, tensor, persistent)
        self.__dict__[name] = tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.__dict__.update(self._buffers)
        return self
