"""doctor --bisect names the operator that is wrong, and no other."""

import pytest
import torch

from torch_dflash import ops
from torch_dflash.cli.bisect import bisect, differences
from torch_dflash.testing.tiny import tiny_hybrid


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    path = tmp_path_factory.mktemp("bisect") / "target.gguf"
    return tiny_hybrid(path, layers=3, interval=3, vocab=300)


def test_every_operator_of_a_target_is_compared_and_agrees(hybrid, capsys):
    assert bisect(hybrid) == 0
    out = capsys.readouterr().out
    assert out.endswith("every operator agrees with its reference\n")
    assert {d.operator for d in differences(hybrid)} == {
        "embed_rows", "add_rms_norm", "qmm", "qmm_glu", "ssm_conv_step", "gdn_prefill",
        "gdn_journal_step", "qk_norm_rope_store", "block_attention",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, module, scale",
    [("qmm", "layers.0.mixer.proj", 1 + 1e-4), ("block_attention", "layers.2.mixer", 1 + 1e-3)],
)
def test_a_planted_error_is_found(hybrid, capsys, monkeypatch, name, module, scale):
    kernel = getattr(ops, name)

    def wrong(*args):
        out = kernel(*args)
        if out.dtype.is_floating_point:
            return out * scale
        scales = out.view(out.shape[0], -1, 592)[..., :4]  # of packed rows
        scales.copy_((scales.contiguous().view(torch.float32) * scale).view(torch.uint8))
        return out

    monkeypatch.setattr(ops, name, wrong)
    assert bisect(hybrid) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"first to differ: {name} in {module}, NMSE ")
    assert {d.operator for d in differences(hybrid) if d.exceeds} == {name}


def test_what_an_operator_writes_is_compared(hybrid, monkeypatch):
    kernel = ops.ssm_conv_step

    def wrong(x, state, *rest):
        out = kernel(x, state, *rest)
        state *= 1.001
        return out

    monkeypatch.setattr(ops, "ssm_conv_step", wrong)
    assert {d.operator for d in differences(hybrid) if d.exceeds} == {"ssm_conv_step"}
