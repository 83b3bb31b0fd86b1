"""Targets whose activations are rounded to 8 bits, as llama.cpp rounds them."""

import pytest
import torch

from torch_dflash import ops
from torch_dflash.decoding.loop import Session
from torch_dflash.load import load_drafter, load_target
from torch_dflash.nn import ACT_Q8_1, QuantGLU, QuantLinear, RMSNorm
from torch_dflash.switch import replaced
from torch_dflash.testing.compare import nmse
from torch_dflash.testing.tiny import random_quant, tiny_drafter, tiny_hybrid

PROMPT = torch.tensor([5, 17, 300, 2, 44, 9, 81])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "target.gguf", seed=1)


def test_every_product_and_every_producer_uses_them(hybrid):
    target, read = load_target(hybrid, activations="q8_1"), set()

    def reading(name):
        kernel = getattr(ops, name)
        return lambda x, *rest: read.add(x.dtype) or kernel(x, *rest)

    with replaced({name: reading(name) for name in ("qmm", "qmm_glu")}):
        target.prefill(PROMPT)
        target.verify(PROMPT[:3])
    assert read == {torch.int8}
    kinds = QuantLinear, QuantGLU, RMSNorm
    modes = [m for m in target.modules() if isinstance(m, kinds)]
    assert {getattr(m, "act_mode", ACT_Q8_1) for m in modes} == {ACT_Q8_1}
    assert {getattr(m, "out_mode", ACT_Q8_1) for m in modes} == {ACT_Q8_1}


def test_float_weights_still_read_floats():
    weight = random_quant(4, 256, 0, torch.Generator().manual_seed(0), 1.0)
    assert QuantLinear([weight], packed_mode=ACT_Q8_1).act_mode == 0


def test_logits_move_by_the_rounding(hybrid):
    planes, q8 = (load_target(hybrid, activations=a).prefill(PROMPT) for a in ("planes", "q8_1"))
    # each product errs by about 3e-5 of its energy; six layers of products, a few times that each
    assert 1e-6 < nmse(q8, planes) < 1e-2


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_drafters_share_the_ends_of_such_a_target(hybrid, kind, tmp_path):
    target = load_target(hybrid, activations="q8_1")
    plain = Session(target).generate(PROMPT.tolist(), 40)
    drafter = load_drafter(tiny_drafter(tmp_path / kind, kind, seed=3), target)
    assert Session(target, drafter).generate(PROMPT.tolist(), 40).tokens == plain.tokens


def test_errors(hybrid):
    with pytest.raises(ValueError, match="activations must be one of planes, q8_1, got q8_0"):
        load_target(hybrid, activations="q8_0")
    weight = random_quant(4, 256, 12, torch.Generator().manual_seed(0), 1.0)
    with pytest.raises(ValueError, match=r"packed_mode must be 1 \(planes\) or 2 \(Q8_1\), got 0"):
        QuantLinear([weight], packed_mode=0)
