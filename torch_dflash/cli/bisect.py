"""``torch-dflash doctor --bisect``: every operator of a target beside its reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Difference", "bisect", "differences"]

PROMPT, ROWS = 7, 3  # tokens before, and in each of the two verifications
# float32: sums of tens of thousands of terms err by about 1e-6 of their size, and some cancel.
# 16 bits: half an ulp on each side. Packed: a code of 1/32385 of the largest value of 256.
BOUNDS = {torch.float32: 1e-10, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
PACKED_BOUND = 1e-8


@dataclass(frozen=True)
class Difference:
    """The largest error of one operator in one part of the model.

    Attributes:
        module: dotted name of the module that called the operator.
        operator: its name.
        nmse: squared error of what it returned or wrote, over the squared size.
        bound: what rounding alone explains.
    """

    module: str
    operator: str
    nmse: float
    bound: float

    @property
    def exceeds(self) -> bool:
        """Whether rounding does not explain it; NaN counts."""
        return not self.nmse <= self.bound


class _Recorder:
    """Runs operators twice on the same arguments; the model goes on with the kernel's results."""

    def __init__(self) -> None:
        self.module = [""]
        self.found: dict[tuple[str, str], Difference] = {}

    def both(self, name: str) -> Callable[..., Any]:
        from .. import ops
        from ..switch import reference_of

        kernel, reference = getattr(ops, name), reference_of(name)

        def run(*args: Any) -> Any:
            copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
            expected = reference(*copies)
            actual = kernel(*args)
            pairs = [*zip(_tensors(actual), _tensors(expected), strict=True)]
            pairs += zip(_tensors(args), _tensors(copies), strict=True)  # what it wrote
            self._note(name, pairs)
            return actual

        return run

    def _note(self, name: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        worst = max((self._difference(name, *pair) for pair in pairs), key=_severity)
        key = (self.module[-1], name)
        self.found[key] = max(self.found.get(key, worst), worst, key=_severity)

    def _difference(self, name: str, actual: Tensor, expected: Tensor) -> Difference:
        from ..testing.compare import nmse

        bound = BOUNDS.get(actual.dtype, 0.0)
        if torch.equal(actual, expected):
            return Difference(self.module[-1], name, 0.0, bound)
        if actual.dtype == torch.uint8:
            from ..testing.samples.matmul import unpack_activations

            columns = actual.shape[1] // 592 * 256
            actual, expected = (unpack_activations(t, columns) for t in (actual, expected))
            bound = PACKED_BOUND
        return Difference(self.module[-1], name, nmse(actual, expected), bound)


def _severity(d: Difference) -> tuple[bool, float]:
    return d.exceeds, d.nmse


def _tensors(values: Any) -> list[Tensor]:
    values = values if isinstance(values, tuple | list) else [values]
    return [v for v in values if isinstance(v, Tensor)]


@contextmanager
def _named(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Within the block, ``stack[-1]`` is the name of the innermost module that is running."""
    handles = []
    for name, module in model.named_modules():

        def enter(_: nn.Module, __: Any, name: str = name) -> None:
            stack.append(name)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def differences(path: str | Path | None) -> list[Difference]:
    """Run a short prompt and two verifications, every operator with its reference beside it.

    Args:
        path: target file; None is the embedded model.

    Returns:
        one entry per module and operator, in the order in which they first ran.

    Raises:
        GGUFError, CheckpointError, OSError: the file cannot be used.
    """
    from ..load import load_target
    from ..switch import replaced, switchable

    target, recorder = load_target(path), _Recorder()
    tokens = (torch.arange(PROMPT + 2 * ROWS) * 7919 + 1) % target.vocab_size
    with (
        torch.inference_mode(),
        replaced({name: recorder.both(name) for name in switchable()}),
        _named(target, recorder.module),
    ):
        target.prefill(tokens[:PROMPT])
        for first in (PROMPT, PROMPT + ROWS):
            target.verify(tokens[first : first + ROWS])
            target.commit(ROWS - 1)
    return list(recorder.found.values())


def bisect(path: str | Path | None) -> int:
    """Print the differences; the exit status is 1 if one is larger than rounding explains."""
    found = differences(path)
    print(f"{'module':28} {'operator':20} {'NMSE':>9} {'bound':>9}")
    for d in found:
        print(f"{d.module:28} {d.operator:20} {d.nmse:9.1e} {d.bound:9.1e}")
    first = next((d for d in found if d.exceeds), None)
    if first is None:
        print("every operator agrees with its reference")
        return 0
    print(
        f"first to differ: {first.operator} in {first.module}, NMSE {first.nmse:.1e}, "
        f"at most {first.bound:.1e} is rounding"
    )
    return 1
