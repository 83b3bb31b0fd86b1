import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from torch_dflash.drafters.rope import RopeConfig, neox_order
from torch_dflash.drafters.rope_keys import rope_from_gguf, rope_from_hf
from torch_dflash.fields import CheckpointError, Fields

RADIX = RopeConfig(
    theta=1e7, rotary_dim=128, type="yarn", factor=32.0, original_max_position_embeddings=8192
)


def from_hf(config, head_dim=128, layer_types=()):
    return rope_from_hf(Fields("config.json", [("", config)]), head_dim, layer_types)


def from_gguf(head_dim=128, **keys):
    meta = {f"dflash.rope.{k.replace('__', '.')}": v for k, v in keys.items()}
    return rope_from_gguf(Fields("x.gguf", [("", meta)]), "dflash", head_dim)


def test_frequencies_match_golden_values():
    # published to 16 digits; float32 rounds to half an ulp, 6e-8 relative
    want = {
        0: 1.0,
        14: 0.029427271762092817,
        15: 0.02139834097797833,
        20: 0.003977462493404294,
        25: 0.0005338245748851383,
        28: 8.29882476553396e-05,
        29: 2.103657445045307e-05,
        63: 4.019990452928046e-09,
    }
    inv = RADIX.inv_freq()
    assert inv.dtype == torch.float32
    assert inv.shape == (64,)
    for k, value in want.items():
        assert inv[k].item() == pytest.approx(value, rel=6e-8)
    assert RADIX.attention_scaling == pytest.approx(1.3465735902799727, rel=1e-15)


def test_frequencies_match_transformers(fixtures):
    tensors = load_file(fixtures / "rope/rope.safetensors")
    for case in json.loads((fixtures / "rope/rope.json").read_text()):
        rope = from_hf({"rope_parameters": case["rope_parameters"]}, case["head_dim"])
        inv, scaling = rope.inv_freq(), rope.attention_scaling
        assert scaling == pytest.approx(case["attention_scaling"], rel=1e-12)
        want = tensors[f"{case['key']}.inv_freq"]
        torch.testing.assert_close(inv, want, rtol=1e-6, atol=0)
        angle = tensors["positions"].float()[:, None] * inv
        # the fixtures' float32 angle differs from ours in its last bit
        bound = scaling * (2e-6 + 2.4e-7 * angle)
        for name, f in (("cos", torch.cos), ("sin", torch.sin)):
            error = (f(angle) * scaling - tensors[f"{case['key']}.{name}"].view_as(angle)).abs()
            assert (error <= bound).all()


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    "theta,original,fast,slow",
    [
        (1e4, 1 << 30, 1e6, 0.01),  # the ramp ends beyond the last dimension
        (1e6, 64, 32.0, 1.0),  # and begins before the first
        (1e4, 4096, 4.0, 4.0),  # and has no length
        (1e7, 8192, 8.0, 0.5),
    ],
)
def test_yarn_ramp_and_its_ends(theta, original, fast, slow, truncate):
    """The published formula in plain Python, pair by pair."""
    d, factor = 32, 8.0

    def corrected(turns):
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = corrected(fast), corrected(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    want = []
    for k in range(d // 2):
        ramp = min(max((k - low) / (high - low), 0.0), 1.0)
        inv = theta ** (-2 * k / d)
        want.append(inv / factor * ramp + inv * (1 - ramp))
    rope = RopeConfig(
        theta, d, "yarn", factor, original, beta_fast=fast, beta_slow=slow, truncate=truncate
    )
    # one rounding to float32
    torch.testing.assert_close(
        rope.inv_freq().double(), torch.tensor(want, dtype=torch.float64), rtol=6e-8, atol=0
    )


def test_row_01_legacy_type_yarn():
    rope = from_hf(
        {
            "rope_theta": 1e7,
            "rope_scaling": {
                "type": "yarn",
                "factor": 32,
                "original_max_position_embeddings": 8192,
            },
        }
    )
    assert rope == RADIX
    assert rope.attention_scaling == pytest.approx(1.34657, abs=1e-5)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["yarn", "YaRN", "YARN"])
def test_yarn_by_any_spelling(key, name):
    scaling = {key: name, "factor": 32.0, "original_max_position_embeddings": 8192}
    assert from_hf({"rope_theta": 1e7, "rope_scaling": scaling}) == RADIX


def test_row_02_nested_rope_parameters():
    plain = RopeConfig(theta=1e7, rotary_dim=128)
    assert from_hf({"rope_parameters": {"rope_theta": 1e7}}) == plain
    entry = {"rope_type": "default", "rope_theta": 1e7}
    keyed = {"rope_parameters": {"full_attention": entry, "sliding_attention": dict(entry)}}
    assert from_hf(keyed) == plain
    with pytest.raises(CheckpointError, match=r"rope_theta must be present, got nothing"):
        from_hf({"rope_parameters": {"rope_type": "default"}})


def test_rope_keyed_by_layer_type_takes_the_types_in_use():
    a, b = {"rope_theta": 1e6}, {"rope_theta": 1e4}
    config = {"rope_parameters": {"full_attention": a, "sliding_attention": b}}
    assert from_hf(config, layer_types=["sliding_attention"]).theta == 1e4
    with pytest.raises(CheckpointError, match="must be the same for every layer type"):
        from_hf(config, layer_types=["full_attention", "sliding_attention"])
    del config["rope_parameters"]["full_attention"]
    with pytest.raises(CheckpointError, match="must have an entry for layer type 'full_attention'"):
        from_hf(config, layer_types=["full_attention"])


def test_null_scaling_and_top_level_theta():
    assert from_hf({"rope_theta": 1e6, "rope_scaling": None}) == RopeConfig(1e6, 128)


def test_partial_rotary_factor():
    for config in (
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}},
        {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ):
        assert from_hf(config, head_dim=256).rotary_dim == 64


def test_yarn_fills_in_what_transformers_fills_in():
    scaling = {"rope_theta": 1e7, "rope_type": "yarn", "factor": 4.0}
    rope = from_hf({"rope_parameters": scaling, "max_position_embeddings": 4096})
    assert rope.original_max_position_embeddings == 4096
    del scaling["factor"]
    scaling["original_max_position_embeddings"] = 1024
    assert from_hf({"rope_parameters": scaling, "max_position_embeddings": 4096}).factor == 4.0


def test_linear_divides_every_frequency():
    scaling = {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}
    rope = from_hf({"rope_parameters": scaling})
    torch.testing.assert_close(rope.inv_freq() * 4, RopeConfig(1e4, 128).inv_freq())
    assert rope.attention_scaling == 1.0


def test_freq_factors_divide():
    factors = torch.linspace(1, 8, 64)
    rope = RopeConfig(5e5, 128)
    torch.testing.assert_close(
        rope.with_freq_factors(factors).inv_freq() * factors, rope.inv_freq()
    )


@pytest.mark.parametrize("name", ["llama3", "dynamic", "longrope", "proportional"])
def test_other_rope_types_are_refused_by_name(name):
    with pytest.raises(CheckpointError, match=f"must be default, linear or yarn, got '{name}'"):
        from_hf({"rope_parameters": {"rope_theta": 1e7, "rope_type": name}})
    with pytest.raises(CheckpointError, match=f"got '{name}'"):
        from_gguf(freq_base=1e7, scaling__type=name, scaling__factor=2.0)


GGUF_YARN = {
    "freq_base": 1e7,
    "scaling__type": "yarn",
    "scaling__factor": 32.0,
    "scaling__original_context_length": 8192,
}


def test_row_54_gguf_and_hf_yarn_magnitude():
    plain = 0.1 * math.log(32) + 1
    assert from_gguf(**GGUF_YARN) == RADIX
    # attn_factor multiplies llama.cpp's own magnitude: 1 changes nothing, m / (0.1 ln f + 1) is m
    for factor, want in ((1.0, plain), (1.1 / plain, 1.1)):
        rope = from_gguf(**GGUF_YARN, scaling__attn_factor=factor)
        assert rope.attention_scaling == pytest.approx(want, rel=1e-12)
    # yarn_attn_factor is Hugging Face's attention_factor, unless it is 1 or attn_factor is there
    for keys, want in (
        ({"scaling__yarn_attn_factor": 1.1}, 1.1),
        ({"scaling__yarn_attn_factor": 1.0}, plain),
        ({"scaling__yarn_attn_factor": 1.1, "scaling__attn_factor": 1.0}, plain),
    ):
        rope = from_gguf(**GGUF_YARN, **keys)
        assert rope.attention_scaling == pytest.approx(want, rel=1e-12)


def test_gguf_betas_and_dimension_count():
    rope = from_gguf(
        **GGUF_YARN, scaling__yarn_beta_fast=4.0, scaling__yarn_beta_slow=0.25, dimension_count=64
    )
    assert rope == replace(RADIX, beta_fast=4.0, beta_slow=0.25, rotary_dim=64)


def test_gguf_without_a_base_is_an_error():
    with pytest.raises(CheckpointError, match=r"dflash.rope.freq_base must be present"):
        from_gguf()


def test_gguf_factor_without_a_type_is_linear():
    assert from_gguf(freq_base=1e4, scaling__factor=4.0) == RopeConfig(
        1e4, 128, type="linear", factor=4.0
    )
    assert from_gguf(freq_base=1e4, scaling__factor=0.0) == RopeConfig(1e4, 128)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"theta": 1.0}, "theta must be above 1"),
        ({"rotary_dim": 7}, "rotary_dim must be even"),
        ({"factor": 0.5}, "factor must be at least 1"),
        ({"original_max_position_embeddings": None}, "must be at least 1 for yarn"),
        ({"beta_fast": 0.5}, "beta_fast must be at least beta_slow"),
        ({"freq_factors": (1.0,)}, "freq_factors must be 64 numbers"),
    ],
)
def test_impossible_ropes(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RADIX, **change)


@pytest.mark.parametrize("heads,head_dim,rotary", [(1, 8, 8), (3, 16, 16), (2, 16, 8)])
def test_reordered_rows_rotate_alike(heads, head_dim, rotary):
    """Interleaved rope on the rows of a file equals NeoX rope on the reordered rows."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, head_dim, dtype=torch.float64, generator=generator)
    k = torch.randn(heads, head_dim, dtype=torch.float64, generator=generator)
    angle = 7 * RopeConfig(1e4, rotary).inv_freq().double()
    cos, sin = angle.cos(), angle.sin()

    def interleaved(x):
        even, odd = x[:, 0:rotary:2], x[:, 1:rotary:2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(1)
        return torch.cat((turned, x[:, rotary:]), 1)

    def neox(x):
        first, second = x[:, : rotary // 2], x[:, rotary // 2 : rotary]
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*turned, x[:, rotary:]), 1)

    order = neox_order(heads, head_dim, rotary)
    moved = [neox(x.reshape(-1)[order].view_as(x)) for x in (q, k)]
    want = (interleaved(q) * k).sum(1)  # one side rotated: a phase that does not cancel
    got = (moved[0] * k.reshape(-1)[order].view_as(k)).sum(1)
    # the same products in another order: float64 rounding of 16 terms of magnitude 3
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    assert sorted(order.tolist()) == list(range(heads * head_dim))
