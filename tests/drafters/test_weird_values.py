"""Any value under any key: a config, or one CheckpointError of one line. Never another exception.

Every key of a valid file is replaced by every value below, one at a time, and so is every tensor's
shape; then pairs of keys at random.
"""

import copy
import random

import pytest

from torch_dflash.drafters.config import DrafterConfig
from torch_dflash.drafters.from_gguf import config_from_gguf
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.fields import CheckpointError

VALUES = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**70, 0.5, -0.0, float("nan"), float("inf"), "", "yarn",
    "sliding_attention", [], [1], [True, False], ["sliding_attention"] * 2, [None], {}, {"a": 1},
    {"full_attention": {}}, [[1]], 1e308, 1e-320,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (64,), (64, 64), (1, 1, 1), (2**40, 64), (64, 2**40), (-1, 64)]
KINDS = ["dflash", "dflash2", "dspark"]


def outcome(resolve, *args):
    """Resolve; what came out must be usable as far as it says it is."""
    config, text = None, ""
    try:
        config = resolve(*args, where="file")
    except CheckpointError as error:
        text = str(error)
    if config is None:
        assert text.startswith("file: ")
        assert "\n" not in text
        assert len(text) < 1000
        return "refused"
    assert isinstance(config, DrafterConfig)
    assert len(config.layers) == config.num_layers
    assert 0 <= config.mask_token_id < config.vocab_size
    assert config.max_draft_tokens >= 1
    assert config.rope.inv_freq().isfinite().all()
    config.describe()
    return "resolved"


def places(tree, path=()):
    """Every key of a nested config."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def put(tree, path, value):
    changed = copy.deepcopy(tree)
    inner = changed
    for key in path[:-1]:
        inner = inner.get(key)
        if not isinstance(inner, dict):
            return changed
    inner[path[-1]] = value
    return changed


EXTRA = {
    "layer_types": None,
    "sliding_window": None,
    "use_sliding_window": None,
    "max_window_layers": None,
    "is_causal": None,
    "rope_scaling": None,
    "rope_theta": None,
    "partial_rotary_factor": None,
    "rope_is_neox_style": None,
    "aux_hidden_state_layer_ids": None,
    "target_hidden_size": None,
    "sample_from_anchor": None,
    "dspark_bonus_anchor": None,
    "draft_vocab_size": None,
    "final_logit_softcapping": None,
    "output_multiplier": None,
    "logit_scale": None,
    "text_config": None,
    "transformer_layer_config": None,
    "speculators_model_type": None,
    "projector_type": None,
    "markov_head_type": None,
    "use_swa": None,
    "causal": None,
    "use_aux_hidden_state": None,
    "attention_value_scale": None,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("yarn", [False, True])
def test_hugging_face_configs(hf, shapes_of, kind, yarn):
    config = hf(kind)
    shapes = shapes_of(config)
    if yarn:
        config["rope_parameters"] |= {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": None,
            "mscale": None,
            "mscale_all_dim": None,
            "truncate": True,
        }
    config = EXTRA | config
    paths = list(places(config))
    seen = {
        outcome(config_from_hf, put(config, path, value), shapes)
        for path in paths
        for value in VALUES
    }
    assert seen == {"refused", "resolved"}
    rng = random.Random(5)
    for _ in range(1500):
        changed = config
        for path in rng.sample(paths, 2):
            changed = put(changed, path, rng.choice(VALUES))
        outcome(config_from_hf, changed, shapes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["dflash", "qwen35-dflash-draft"])
def test_gguf_metadata(hf, gguf, shapes_of, kind, arch):
    shapes = shapes_of(hf(kind))
    meta = gguf(kind, arch)
    for name in (
        "attention.causal", "attention.sliding_window", "attention.sliding_window_pattern",
        "attention.scale", "attention.value_scale", "attention.causal_pattern", "logit_scale",
        "embedding_scale", "final_logit_softcapping", "hidden_activation", "sample_from_anchor",
        "has_confidence_head", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_ext_factor", "rope.scaling.original_context_length", "vocab_size",
        "dflash.target_layer_ids", "dflash.mask_token_id", "dflash.dspark.enabled", "decoder_arch",
        "dflash.n_target_features", "dflash.domino.enabled", "markov_rank", "markov_head_type",
    ):  # fmt: skip
        meta.setdefault(f"{arch}.{name}", None)
    seen = {
        outcome(config_from_gguf, meta | {key: value}, shapes) for key in meta for value in VALUES
    }
    assert seen == {"refused", "resolved"}
    rng = random.Random(6)
    keys = [*meta]
    for _ in range(1500):
        changed = {key: rng.choice(VALUES) for key in rng.sample(keys, 2)}
        outcome(config_from_gguf, meta | changed, shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes(hf, gguf, shapes_of, kind):
    shapes = shapes_of(hf(kind))
    for name, right in shapes.items():
        for shape in SHAPES:
            want = "resolved" if shape == right else "refused"
            assert outcome(config_from_hf, hf(kind), shapes | {name: shape}) == want
            outcome(config_from_gguf, gguf(kind), shapes | {name: shape})
