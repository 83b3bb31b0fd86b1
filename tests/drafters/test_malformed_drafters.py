"""Drafters that must be refused: one line that names the file, the key or tensor, and what came."""

import pytest

from torch_dflash.drafters.from_gguf import config_from_gguf
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.names import logical_names
from torch_dflash.fields import CheckpointError

Q, CONV = "layers.1.self_attn.q_proj.weight", "layers.1.mlp_conv.kernel_projection.weight"
PRED, SUCC = (f"candidate_selector.{n}_codebook" for n in ("predecessor", "successor"))
W1, W2 = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
CONF = "confidence_head.proj.weight"

# id, kind, changes to config.json, changes to the tensors (None removes), message
CONFIGS = [
    ("no_hidden_norm", "dflash", {}, {"hidden_norm.weight": None}, "must hold hidden_norm.weight"),
    ("no_norm", "dflash", {}, {"norm.weight": None}, "all but 1: norm.weight"),
    ("missing_layer_part", "dflash", {}, {Q: None}, f"25 tensors, got all but 1: {Q}"),
    ("unknown_tensor", "dflash", {}, {"foo.weight": (3,)}, "1 unknown: foo.weight"),
    ("layer_gap", "dflash", {}, {"layers.90.foo": (3,)}, "must not skip layers, got layer 90"),
    ("wrong_shape", "dflash", {}, {Q: (64, 63)}, rf"'{Q}' must be \[64, 64\], got \[64, 63\]"),
    ("scalar_tensor", "dflash", {}, {"norm.weight": ()}, r"must have 1 dimensions, got \[\]"),
    ("empty_tensor", "dflash", {}, {"norm.weight": (0,)}, r"must have 1 dimensions, got \[0\]"),
    ("hidden_size", "dflash", {"hidden_size": 48}, {}, "hidden_size must agree with tensor norm"),
    ("head_dim", "dflash", {"head_dim": 32}, {}, "head_dim must agree .* got 32 where .* says 16"),
    ("heads", "dflash", {"num_attention_heads": 8}, {}, "num_attention_heads must agree"),
    ("heads_text", "dflash", {"num_attention_heads": "4"}, {}, "must be an integer, got '4'"),
    ("heads_bool", "dflash", {"num_attention_heads": True}, {}, "must be an integer, got True"),
    ("eps_nan", "dflash", {"rms_norm_eps": float("nan")}, {}, "must be a finite number, got nan"),
    ("eps_negative", "dflash", {"rms_norm_eps": -1e-6}, {}, "rms_norm_eps must be at least 0"),
    ("act", "dflash", {"hidden_act": "gelu_pytorch_tanh"}, {}, "hidden_act must be silu"),
    ("no_theta", "dflash", {"rope_parameters": {}}, {}, "rope_theta must be present"),
    ("rope_list", "dflash", {"rope_parameters": [1]}, {}, r"must be a mapping, got \[1\]"),
    ("no_mask", "dflash", {"d_mask_token_id": None}, {}, "mask_token_id .* must be present"),
    ("mask_high", "dflash", {"d_mask_token_id": 32}, {}, "vocabulary of 32, got 32"),
    ("mask_negative", "dflash", {"d_mask_token_id": -1}, {}, "vocabulary of 32, got -1"),
    ("block_zero", "dflash", {"d_block_size": 0}, {}, "block_size must be at least 1, got 0"),
    ("block_one", "dflash", {"d_block_size": 1}, {}, "must be at least 2"),
    ("anchor", "dflash", {"sample_from_anchor": True}, {}, "must be false for dflash, got true"),
    ("both_anchors", "dspark", {"sample_from_anchor": True, "dspark_bonus_anchor": True}, {},
     "must be the opposite of dspark_bonus_anchor"),
    ("scale_zero", "dflash", {"d_output_multiplier": 0}, {}, "must be above 0, got 0.0"),
    ("nested_list", "dflash", {"dflash_config": []}, {}, r"dflash_config must be a mapping"),
    ("sinks", "dflash", {"d_attention_sink_bias": True}, {}, "attention_sink_bias is true, so"),
    ("aux", "dflash", {"d_use_aux_hidden_state": False}, {}, "so fc.weight must be absent"),
    ("promise_dflash2", "dflash", {"architectures": ["DFlash2DraftModel"]}, {}, "tensors must be"),
    ("promise_dspark", "dflash", {"d_markov_rank": 4}, {}, "describes dspark"),
    ("taps_above_block", "dflash2", {"d_block_size": 2}, {}, None),
    ("top_k_missing", "dflash2", {"d_selector_top_k": None}, {}, "selector_top_k must be present"),
    ("top_k_high", "dflash2", {"d_selector_top_k": 33}, {}, "at most the vocabulary of 32, got 33"),
    ("half_selector", "dflash2", {}, {SUCC: None}, f"selector must be whole, got all but {SUCC}"),
    ("succ_rows", "dflash2", {}, {SUCC: (31, 6)}, "where the tensor says 31"),
    ("succ_rank", "dflash2", {}, {SUCC: (32, 5)}, r"must be \[32, 6\], got \[32, 5\]"),
    ("projection_rows", "dflash2", {}, {CONV.replace("1.mlp", "0.attention"): (17, 64)}, "17"),
    ("w1_without_w2", "dspark", {}, {W2: None}, f"must be whole, got all but {W2}"),
    ("w2_without_w1", "dspark", {}, {W1: None}, f"must be whole, got all but {W1}"),
    ("only_confidence", "dspark", {}, {W1: None, W2: None}, f"must come with '{W1}'"),
    ("confidence_lost", "dspark", {}, {CONF: None}, "confidence head is promised"),
    ("confidence_width", "dspark", {}, {CONF: (1, 70)}, r"\[1, 64\] or \[1, 74\], got \[1, 70\]"),
    ("confidence_kind", "dspark", {"d_confidence_head_with_markov": False}, {}, "must agree with"),
    ("head_type", "dspark", {"d_markov_head_type": "lstm"}, {}, "gated or rnn, got 'lstm'"),
    ("head_type_tensor", "dspark", {"d_markov_head_type": "vanilla"},
     {"markov_head.gate_proj.weight": (10, 74)}, "must agree with tensor markov_head.gate_proj"),
    ("dspark_cap", "dspark", {"d_final_logit_softcapping": 20}, {}, "must be absent for DSpark"),
    ("two_heads", "dspark", {}, {PRED: (32, 6)}, "cannot be in one drafter"),
    ("reduced_without_head", "dspark", {"draft_vocab_size": 20}, {}, "draft_vocab_size must agree"),
    ("draft_above", "dflash", {"draft_vocab_size": 40}, {}, "at most vocab_size 32, got 40"),
    ("d2t_without_head", "dflash", {}, {"d2t": (32,)}, "d2t must come with lm_head.weight"),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind,changes,tensors,message", [c[1:] for c in CONFIGS], ids=[c[0] for c in CONFIGS]
)
def test_malformed(hf, shapes_of, kind, changes, tensors, message):
    shapes = shapes_of(hf(kind)) | tensors
    shapes = {k: v for k, v in shapes.items() if v is not None}
    config = hf(kind, **changes)
    if message is None:  # the control: two taps in a block of two are legal
        config_from_hf(config, shapes)
        return
    with pytest.raises(CheckpointError, match=message) as error:
        config_from_hf(config, shapes, where="a/config.json")
    assert str(error.value).startswith("a/config.json: ")
    assert "\n" not in str(error.value)


def test_row_06_codebook_shorter_than_the_vocabulary(hf, shapes_of):
    shapes = shapes_of(hf("dflash2")) | {PRED: (31, 6), SUCC: (31, 6)}
    with pytest.raises(CheckpointError, match=f"vocab_size must agree with tensor {PRED}, got 32"):
        config_from_hf(hf("dflash2"), shapes)


def test_row_07_predecessor_rows_against_vocabulary(hf, gguf, shapes_of):
    shapes = shapes_of(hf("dflash2")) | {PRED: (17, 6)}
    with pytest.raises(CheckpointError, match="got 32 where the tensor says 17"):
        config_from_hf(hf("dflash2"), shapes)
    with pytest.raises(CheckpointError, match="got 32 where the tensor says 17"):
        config_from_gguf(gguf("dflash2"), shapes)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"d_conv_group_size": 0}, "conv_group_size must be at least 1, got 0"),
        ({"d_conv_group_size": 7}, "conv_group_size must divide the hidden size 64, got 7"),
        ({"d_conv_kernel_size": 0}, "conv_kernel_size must be at least 1, got 0"),
        ({"d_conv_kernel_size": 9}, "conv_kernel_size must be at most the block size 8, got 9"),
    ],
)
def test_row_10_group_size_and_taps(hf, gguf, shapes_of, changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_hf(hf("dflash2", **changes))
    keys = {k.removeprefix("d_"): v for k, v in changes.items()}
    with pytest.raises(CheckpointError, match=r"must (agree|be at least 1)"):
        config_from_gguf(gguf("dflash2", **keys), shapes_of(hf("dflash2")))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("conv", ["attention_conv", "mlp_conv"])
@pytest.mark.parametrize("part", ["base_kernel", "kernel_projection.weight"])
def test_row_11_every_convolution_tensor_of_every_layer(hf, shapes_of, layer, conv, part):
    name = f"layers.{layer}.{conv}.{part}"
    shapes = shapes_of(hf("dflash2"))
    wrong = (*shapes[name][:-1], 63)
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' must be .*, got .*63\]"):
        config_from_hf(hf("dflash2"), shapes | {name: wrong})
    del shapes[name]
    with pytest.raises(CheckpointError, match=f"convolutions must be whole, got all but {name}"):
        config_from_hf(hf("dflash2"), shapes)


def test_row_51_unknown_tensors_are_listed(hf, shapes_of):
    shapes = shapes_of(hf()) | {f"layers.0.extra_{i}.weight": (1,) for i in range(23)}
    with pytest.raises(CheckpointError, match=r"got 23 unknown: layers.0.extra_0.weight, .* more"):
        config_from_hf(hf(), shapes)


def test_row_51_unknown_architecture(gguf, hf, shapes_of):
    meta = gguf() | {"general.architecture": "qwen35"}
    with pytest.raises(CheckpointError, match=r"must be dflash, .*, got 'qwen35'.*as the target"):
        config_from_gguf(meta, shapes_of(hf()))


REFUSED = [
    ("mtp.2.markov_head.markov_w1.weight", False, "DeepSeek-V4 DSpark"),
    ("blk.0.attn_q_a.weight", True, "DeepSeek-V4 DSpark"),
    ("output_hc_base.weight", True, "DeepSeek-V4 DSpark"),
    ("dflash.domino.start", True, "Domino"),
    ("domino_head.weight", False, "Domino"),
    ("prefix_gru.weight_ih_l0", False, "Domino"),
    ("model.layers.0.self_attn.qkv_proj.weight", False, "Laguna DFlash"),
    ("layers.0.self_attn.g_proj.weight", False, "Laguna DFlash"),
    ("aux_hidden_norms.0.weight", False, "Laguna DFlash"),
    ("dflash.aux_hidden_norm.0.weight", True, "Laguna DFlash"),
    ("blk.0.attn_gate.weight", True, "Laguna DFlash"),
    ("log_snr_fc1.weight", True, "log-SNR conditioned DFlash"),
    ("rope_freqs.weight", True, "Gemma 4 DSpark"),
    ("blk.0.layer_output_scale.weight", True, "Gemma 4 DSpark"),
    ("blk.0.post_ffw_norm.weight", True, "Gemma 4 DSpark"),
    ("fc.scale", True, "per-tensor scales"),
    ("layers.0.mlp.up_proj.weight_scale", False, "per-tensor scales"),
    ("mask_hidden", False, "mask_hidden"),
]


@pytest.mark.parametrize("name,gguf,what", REFUSED, ids=[r[0] for r in REFUSED])
def test_tensors_of_other_drafters_are_refused_by_name(name, gguf, what):
    with pytest.raises(CheckpointError, match=f"x: tensor '{name}' belongs to .*") as error:
        logical_names("x", ["norm.weight", name], gguf)
    assert what in str(error.value)
    assert "not supported" in str(error.value)


@pytest.mark.parametrize(
    "changes,what",
    [
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        ({"architectures": ["DominoDraftModel"]}, "Domino"),
        ({"d_projector_type": "domino"}, "Domino"),
        ({"architectures": ["Qwen3XPressModel"]}, "XPress"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna DFlash"),
        ({"architectures": ["Gemma4DSparkModel"]}, "a Gemma drafter"),
        ({"model_type": "deepseek_v4"}, "DeepSeek-V4 DSpark"),
        ({"d_log_snr_conditioning": True}, "log_snr_conditioning"),
        ({"mup_multiplier": 4.0}, "mup_multiplier"),
    ],
)
def test_configs_of_other_drafters_are_refused_by_name(hf, changes, what):
    with pytest.raises(CheckpointError, match=f"{what}.* not supported"):
        config_from_hf(hf(**changes))


@pytest.mark.parametrize(
    "keys,message",
    [
        ({"embedding_length": None}, None),  # the control: the tensors say it
        ({"embedding_length": 65}, "dflash.embedding_length must agree with tensor norm.weight"),
        ({"attention__value_length": 8}, "value_length must equal key_length 16, got 8"),
        ({"attention__scale": 1.0}, "attention.scale must be absent or 0.25, got 1.0"),
        ({"attention__scale": 0.25}, None),
        ({"attention__layer_norm_rms_epsilon": None}, "rms_epsilon must be present"),
        ({"rope__freq_base": None}, "dflash.rope.freq_base must be present"),
        ({"hidden_activation": "gelu"}, "dflash.hidden_activation must be silu, got 'gelu'"),
        ({"tokenizer__ggml__tokens": None}, "pass the target, or vocab_size="),
        ({"target_layers": None}, "target_layers or .* must be present"),
        ({"target_layers": [0, 5, 10]}, r"must be at least 0, got \[-1, 4, 9\]"),
        ({"target_layers": [2, 5, 10, 11, 12]}, "must fill the 192 columns"),
        ({"sample_from_anchor": True}, "must be false or absent for dflash, got true"),
        ({"decoder_arch": "laguna"}, "Laguna DFlash"),
        ({"log_snr_conditioning": True}, "log-SNR"),
        ({"dflash__domino__enabled": 1}, "Domino"),
        ({"hyper_connection__count": 4}, "DeepSeek-V4 DSpark"),
        ({"rope__scaling__type": "yarn"}, "rope.scaling.factor must be present"),
    ],
)
def test_malformed_gguf(hf, gguf, shapes_of, keys, message):
    shapes = shapes_of(hf())
    if message is None:
        config_from_gguf(gguf(**keys), shapes)
        return
    with pytest.raises(CheckpointError, match=message) as error:
        config_from_gguf(gguf(**keys), shapes, where="x.gguf")
    assert str(error.value).startswith("x.gguf: ")
    assert "\n" not in str(error.value)


def test_unknown_keys_are_noted(hf, gguf, shapes_of):
    notes = config_from_hf(hf(d_new_idea=3)).notes
    assert notes == ("dflash_config.new_idea = 3 is not a key we know: ignored",)
    notes = config_from_gguf(gguf(dflash__yarn_factor=32.0), shapes_of(hf())).notes
    assert notes == ("dflash.dflash.yarn_factor = 32.0 is not a key we know: ignored",)


def test_gguf_zero_means_unset(hf, gguf, shapes_of):
    keys = {"logit_scale": 0.0, "embedding_scale": 0.0, "attention__value_scale": 0.0}
    config = config_from_gguf(gguf(**keys), shapes_of(hf()))
    assert config.output_multiplier == config.input_embedding_scale == config.value_scale == 1.0


def test_post_attention_norm_conflict():
    lucebox = ["blk.0.post_attention_norm.weight", "blk.1.post_attention_norm.weight"]
    names = logical_names("x", lucebox, gguf=True)
    assert names["layers.0.post_attention_layernorm.weight"] == lucebox[0]
    with pytest.raises(CheckpointError, match="beside ffn_norm belongs to Gemma 4 DSpark"):
        logical_names("x", [*lucebox, "blk.1.ffn_norm.weight"], gguf=True)


def test_two_names_for_one_tensor():
    with pytest.raises(CheckpointError, match=r"both mean 'fc.weight'"):
        logical_names("x", ["fc.weight", "encoder.fc.weight"], gguf=False)
