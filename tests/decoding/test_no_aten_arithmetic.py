"""A decode or verify step runs our operators, and of ATen only what cannot round.

ATen's float kernels differ between a vector body and its tail, and between row counts; one of them
in a step would make a speculative result differ from the plain one.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.sampling import SamplingParams
from torch_dflash.load import load_drafter, load_target
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

# Of any dtype: they move, cut or allocate.
MOVES = {
    "_local_scalar_dense", "_unsafe_view", "alias", "arange", "as_strided", "cat", "clone", "copy_",
    "detach_", "empty", "expand", "fill_", "full", "full_like", "index", "index_copy_",
    "index_put_", "item", "lift_fresh", "new_empty", "new_full", "new_zeros", "ones_like",
    "resolve_conj", "resolve_neg", "scatter", "select", "slice", "split", "split_with_sizes",
    "squeeze", "unsqueeze", "view", "zero_", "zeros", "zeros_like",
}  # fmt: skip
# Of integers and booleans only.
INTEGER = {"_to_copy", "add", "bitwise_xor_", "clamp", "eq", "sub"}


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ours, self.refused = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs))
                   if isinstance(a, torch.Tensor)]  # fmt: skip
        if namespace == "dflash":
            self.ours.add(name)
        elif name in INTEGER and not any(t.is_floating_point() for t in tensors):
            pass
        elif name not in MOVES:
            self.refused.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aten")
    tiny_hybrid(folder / "target.gguf", layers=3, interval=3, vocab=300)
    shape = {"vocab": 300, "num_target_layers": 3, "target_layer_ids": (0, 1)}
    for kind in ("dflash", "dflash2", "dspark"):
        tiny_drafter(folder / kind, kind, **shape)
    return folder


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, 20, 0.9)], ids=str)
@pytest.mark.parametrize("kind", ["none", "dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("state", ["journal", "snapshots"])
def test_steps_run_our_operators_only(folder, kind, state, sampling):
    target = load_target(folder / "target.gguf", state=state)
    session = Session(target, None if kind == "none" else load_drafter(folder / kind, target))
    steps = session.stream([5, 17, 2], 12, sampling)
    next(steps)  # the prompt
    with Watch() as watch:
        taken = sum(1 for _ in steps)
    assert taken >= 2
    assert watch.refused == set()
    step = "gdn_journal_step" if state == "journal" else "gdn_step"
    assert watch.ours >= {"qmm", "qmm_glu", "add_rms_norm", "block_attention", step}


def test_the_watch_sees_arithmetic():
    x = torch.ones(3)
    with Watch() as watch:
        x.view(1, 3)[:, 1:].clone()
        torch.arange(3) + 1
        assert watch.refused == set()
        x.to(torch.float16)
        x + 1
        torch.nn.functional.silu(x)
    assert watch.refused == {"aten._to_copy.default", "aten.add.Tensor", "aten.silu.default"}
