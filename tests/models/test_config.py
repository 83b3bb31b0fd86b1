import json
import logging
from dataclasses import fields

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

from torch_dflash.drafters.rope import RopeConfig
from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import GGUFFile, QuantTensor
from torch_dflash.models.config import DenseConfig, Qwen35Config
from torch_dflash.models.from_gguf import read_target_config, target_config_from_gguf
from torch_dflash.models.rows import grouped_v_heads, neox_qk, split_qkv
from torch_dflash.models.tensors import target_table


def metadata(arch="qwen35", **changes):
    keys = {
        "block_count": 4,
        "context_length": 2048,
        "embedding_length": 32,
        "feed_forward_length": 40,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 16,
    }
    if arch == "qwen35":
        keys |= {
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 8,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 32,
            "full_attention_interval": 4,
        }
    keys |= {k.replace("__", "."): v for k, v in changes.items()}
    meta = {f"{arch}.{k}": v for k, v in keys.items() if v is not None}
    meta["general.architecture"] = arch
    meta["tokenizer.ggml.tokens"] = [str(i) for i in range(48)]
    return meta


FFN = {"ffn_gate.weight": (40, 32), "ffn_up.weight": (40, 32), "ffn_down.weight": (32, 40)}


def shapes(arch="qwen35"):
    """Written out by hand: the table under test must not describe itself."""
    out = {"token_embd.weight": (48, 32), "output_norm.weight": (32,), "output.weight": (48, 32)}
    for i in range(4):
        layer = dict(FFN) | {"attn_norm.weight": (32,)}
        full = arch != "qwen35" or i == 3
        if full:
            gates = 2 if arch == "qwen35" else 1
            layer |= {
                "attn_q.weight": (gates * 64, 32),
                "attn_k.weight": (32, 32),
                "attn_v.weight": (32, 32),
                "attn_output.weight": (32, 64),
            }
            if arch != "llama":
                layer |= {"attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,)}
        else:
            layer |= {
                "attn_qkv.weight": (64, 32),
                "attn_gate.weight": (32, 32),
                "ssm_alpha.weight": (4, 32),
                "ssm_beta.weight": (4, 32),
                "ssm_a": (4,),
                "ssm_dt.bias": (4,),
                "ssm_conv1d.weight": (64, 4),
                "ssm_norm.weight": (8,),
                "ssm_out.weight": (32, 32),
            }
        layer["post_attention_norm.weight" if arch == "qwen35" else "ffn_norm.weight"] = (32,)
        out |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return out


HYBRIDS = ["nk2_nv6", "nk2_nv4", "nk3_nv3_tied", "types_nk2_nv4"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_reference_hybrids(fixtures, name):
    """A file of upstream's converter says what the config.json it came from says."""
    hf = json.loads((fixtures / "hybrid" / name / "config.json").read_text())
    hf = hf.get("text_config", hf)
    with GGUFFile.open(fixtures / "gguf" / f"target_{name}.gguf") as file:
        c = read_target_config(file)
        assert target_table(c).num_parameters == sum(
            torch.Size(t.shape).numel() for t in file.tensors.values()
        )
    for field, key in {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "conv_kernel": "linear_conv_kernel_dim",
        "num_key_heads": "linear_num_key_heads",
        "num_value_heads": "linear_num_value_heads",
        "key_head_dim": "linear_key_head_dim",
        "value_head_dim": "linear_value_head_dim",
    }.items():
        assert getattr(c, field) == hf[key], field
    assert c.rms_norm_eps == pytest.approx(hf["rms_norm_eps"], rel=6e-8)
    assert c.tied == hf["tie_word_embeddings"] == (name == "nk3_nv3_tied")
    kinds = {"linear_attention": "gdn", "full_attention": "full"}
    assert c.layer_kinds == tuple(kinds[t] for t in hf["layer_types"])
    rope = hf["rope_parameters"]
    rotary = int(hf["head_dim"] * rope["partial_rotary_factor"])
    assert c.rope == RopeConfig(rope["rope_theta"], rotary)
    assert c.rope_sections == (*rope["mrope_section"], 0)
    assert (c.notes, c.num_nextn_layers, c.fused_qkv) == ((), 0, ())


def test_nextn_layers_are_skipped_with_a_line(fixtures, caplog):
    path = fixtures / "gguf/target_mtp_bf16.gguf"
    with (
        caplog.at_level(logging.WARNING, logger="torch_dflash"),
        GGUFFile.open(path) as file,
    ):
        config = read_target_config(file)
    assert (config.num_layers, config.num_nextn_layers) == (4, 1)
    assert config.layer_kinds == ("gdn", "gdn", "gdn", "full")
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: skipping 1 NextN layer (blk.4..4)"
    ]


def test_fused_qkv_means_another_tensor_on_full_layers(fixtures):
    with (
        GGUFFile.open(fixtures / "gguf/target_fused_qkv_f16.gguf") as fused,
        GGUFFile.open(fixtures / "gguf/target_nk2_nv4.gguf") as plain,
    ):
        config = read_target_config(fused)
        assert config.fused_qkv == (3,)
        got = split_qkv(config, fused.tensor("blk.3.attn_qkv.weight"))
        want = [plain.tensor(f"blk.3.attn_{n}.weight") for n in "qkv"]
    assert [t.shape for t in got] == [(128, 32), (32, 32), (32, 32)]
    for a, b in zip(got, want, strict=True):
        # bf16 weights of magnitude 0.1 and above 2^-24 are exact in float16
        assert torch.equal(a.to_dense().float(), b.to_dense().float())


def test_recurrent_layers_win_over_the_interval():
    meta = metadata(attention__recurrent_layers=[True, True, True, False])
    meta["qwen35.full_attention_interval"] = 2
    config = target_config_from_gguf(meta, shapes())
    assert config.layer_kinds == ("gdn", "gdn", "gdn", "full")
    assert config.sources["layer_kinds"] == "qwen35.attention.recurrent_layers"
    meta = metadata()
    assert target_config_from_gguf(meta, shapes()).layer_kinds == config.layer_kinds


def test_qwen35_from_keys():
    c = target_config_from_gguf(metadata(), shapes())
    assert isinstance(c, Qwen35Config)
    assert (c.key_size, c.value_size, c.conv_channels) == (16, 32, 64)
    assert (c.q_size, c.kv_size) == (64, 32)
    assert c.rope_sections == (2, 1, 1, 0)
    assert dict(target_table(c).items()) == shapes()


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_dense_from_keys(arch):
    c = target_config_from_gguf(metadata(arch), shapes(arch))
    assert isinstance(c, DenseConfig)
    assert (c.rope_is_neox, c.qk_norm) == ((True, True) if arch == "qwen3" else (False, False))
    assert c.layer_kinds == ("full",) * 4
    assert dict(target_table(c).items()) == shapes(arch)
    assert (c.attention_bias, c.output_bias, c.rope_freqs, c.tied) == (False,) * 4


def test_llama_defaults():
    meta = metadata("llama", attention__key_length=None, attention__value_length=None)
    meta["llama.attention.head_count"] = 2
    for name in ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv"):
        del meta[f"llama.{name}"]
    tensors = shapes("llama")
    for i in range(4):
        tensors |= {f"blk.{i}.attn_{n}.weight": (32, 32) for n in ("q", "k", "v", "output")}
    c = target_config_from_gguf(meta, tensors)
    assert (c.head_dim, c.num_kv_heads, c.rope) == (16, 2, RopeConfig(1e4, 16))
    assert c.sources["rope.theta"] == "default of llama"


def test_llama_biases_and_rope_freqs():
    tensors = shapes("llama") | {"rope_freqs.weight": (8,)}
    for i in range(4):
        tensors |= {f"blk.{i}.attn_{n}.bias": (r,) for n, r in (("q", 64), ("k", 32), ("v", 32))}
    c = target_config_from_gguf(metadata("llama"), tensors)
    assert c.attention_bias
    assert c.rope_freqs
    assert not c.output_bias
    del tensors["blk.2.attn_k.bias"]
    with pytest.raises(CheckpointError, match=r"got all but 1: blk.2.attn_k.bias"):
        target_config_from_gguf(metadata("llama"), tensors)


def test_llama_linear_scaling():
    meta = metadata("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    rope = target_config_from_gguf(meta, shapes("llama")).rope
    assert (rope.type, rope.factor) == ("linear", 4.0)


def test_llama_rows_return_to_neox_order():
    """The converter's permutation, written as its formula, is undone exactly."""
    config = target_config_from_gguf(metadata("llama"), shapes("llama"))

    def convert(weight, heads):
        rows = weight.reshape(heads, 2, -1, *weight.shape[1:])
        return rows.transpose(1, 2).reshape(weight.shape).contiguous()

    q, k = torch.randn(64, 32), torch.randn(32, 32)
    stored = [QuantTensor.from_tensor(convert(w, n)) for w, n in ((q, 4), (k, 2))]
    got = neox_qk(config, *stored)
    assert torch.equal(got[0].to_dense(), q)
    assert torch.equal(got[1].to_dense(), k)
    assert not torch.equal(stored[0].to_dense(), q)
    plain = target_config_from_gguf(metadata("qwen3"), shapes("qwen3"))
    assert neox_qk(plain, *stored)[0] is stored[0]


def test_grouped_v_heads(fixtures):
    # tiled head j = rho * nk + kappa holds grouped head kappa * r + rho
    order = grouped_v_heads(3, 6)
    for kappa in range(3):
        for rho in range(2):
            assert order[kappa * 2 + rho] == rho * 3 + kappa
    # against upstream's converter: ssm_a = -exp(A_log), reordered
    hf = load_file(fixtures / "hybrid/nk2_nv6/model.safetensors")
    name = next(n for n in hf if n.endswith("layers.0.linear_attn.A_log"))
    with GGUFFile.open(fixtures / "gguf/target_nk2_nv6.gguf") as file:
        tiled = file.tensor("blk.0.ssm_a").to_dense()
    torch.testing.assert_close(tiled[grouped_v_heads(2, 6)], -hf[name].float().exp())


def write(path, arch, tensors=None, q8_0=()):
    """A file of ones by gguf-py; ``tensors`` replaces some, the names in ``q8_0`` are quantized."""
    writer = GGUFWriter(path, arch)
    for key, value in metadata(arch).items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    ones = {name: torch.ones(shape) for name, shape in shapes(arch).items()}
    for name, data in (ones | (tensors or {})).items():
        if name in q8_0:
            packed = quantize(data.numpy(), GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path):
    with GGUFFile.open(path) as file:
        return read_target_config(file)


def test_row_42_gate_and_up_of_different_types(tmp_path):
    """Types are not part of the shape table: a Q8_0 gate beside an F16 up is a legal file."""
    half = {"blk.0.ffn_up.weight": torch.ones(40, 32).half()}
    path = write(tmp_path / "x.gguf", "qwen3", half, q8_0=["blk.0.ffn_gate.weight"])
    assert read(path).intermediate_size == 40
    with GGUFFile.open(path) as file:
        types = [file.tensor(f"blk.0.ffn_{n}.weight").type_name for n in ("gate", "up", "down")]
    assert types == ["Q8_0", "F16", "F32"]


def test_llama_rope_freqs_are_read(tmp_path):
    factors = torch.linspace(1, 8, 8)
    path = write(tmp_path / "x.gguf", "llama", {"rope_freqs.weight": factors})
    rope = read(path).rope
    assert rope.freq_factors == tuple(factors.tolist())
    torch.testing.assert_close(rope.inv_freq() * factors, RopeConfig(1e7, 16).inv_freq())


@pytest.mark.parametrize(
    "name,data,q8_0,message",
    [
        ("output_norm.weight", torch.ones(32), True, "type BF16 F16 F32, got Q8_0"),
        ("ssm_conv1d.weight", torch.ones(64, 4).int(), False, "got I32"),
        ("ffn_up.weight", torch.ones(40, 32).double(), False, "got F64"),
    ],
)
def test_types_that_do_not_run(tmp_path, name, data, q8_0, message):
    full = name if name.startswith("output") else f"blk.0.{name}"
    path = write(tmp_path / "x.gguf", "qwen35", {full: data}, q8_0=[full] if q8_0 else [])
    with pytest.raises(CheckpointError, match=f"tensor '{full}' must be .*{message}"):
        read(path)


REFUSED = [
    ("qwen35moe", "mixture of experts, which comes with its own issue"),
    ("qwen3moe", "mixture of experts"),
    ("qwen3next", "Qwen3-Next"),
    ("qwen4exp", "Flash-Next"),
    ("gemma3", "must be one of qwen35, qwen3, llama, got 'gemma3'"),
    ("dflash", "is a drafter's; give it as the drafter"),
    ("qwen35-dflash-draft", "is a drafter's"),
]


@pytest.mark.parametrize("arch,message", REFUSED)
def test_row_51_other_architectures_are_refused_by_name(arch, message):
    meta = metadata() | {"general.architecture": arch}
    with pytest.raises(CheckpointError, match=message):
        target_config_from_gguf(meta, shapes())


MALFORMED = [
    ("qwen35", {"block_count": None}, {}, "qwen35.block_count must be present"),
    ("qwen35", {"block_count": "4"}, {}, "must be an integer, got '4'"),
    ("qwen35", {"rope__dimension_sections": None}, {}, "dimension_sections must be present"),
    ("qwen35", {"rope__dimension_sections": [2, 1, 0, 0]}, {}, "must add up to half of"),
    ("qwen35", {"rope__dimension_count": None}, {}, "must add up to half of"),
    ("qwen35", {"rope__dimension_count": 32}, {}, "dimension_count must be at most 16, got 32"),
    ("qwen35", {"rope__freq_base": None}, {}, "freq_base must be present"),
    ("qwen35", {"ssm__state_size": None}, {}, "ssm.state_size must be present"),
    ("qwen35", {"ssm__group_count": 3}, {}, "time_step_rank 4 must be a multiple of group_count 3"),
    ("qwen35", {"ssm__inner_size": 30}, {}, "inner_size 30 must be a multiple"),
    ("qwen35", {"ssm__conv_kernel": 1}, {}, "conv_kernel must be at least 2"),
    ("qwen35", {"full_attention_interval": None}, {}, "recurrent_layers or .* must be present"),
    ("qwen35", {"full_attention_interval": 0}, {}, "full_attention_interval must be at least 1"),
    ("qwen35", {"attention__recurrent_layers": [True]}, {}, "must have 4 entries, got 1"),
    ("qwen35", {"attention__recurrent_layers": [True] * 4}, {}, "unknown: blk.3.attn_q.weight"),
    ("qwen35", {"nextn_predict_layers": 4}, {}, "nextn_predict_layers must be at most 3"),
    ("qwen35", {"nextn_predict_layers": 1}, {}, "blk.3 must be a NextN layer, got one without"),
    ("qwen35", {"attention__head_count_kv": 3}, {}, "must be a multiple of head_count_kv 3"),
    ("qwen35", {"attention__value_length": 8}, {}, "value_length must equal key_length 16"),
    ("qwen35", {"expert_count": 8}, {}, "expert_count must be absent, got 8"),
    ("qwen35", {"vocab_size": 47}, {}, "got 47 and 48"),
    ("qwen35", {}, {"blk.1.attn_qkv.weight": (192, 32)}, r"must be \[64, 32\], got \[192, 32\]"),
    ("qwen35", {}, {"blk.0.ssm_a": (5,)}, r"'blk.0.ssm_a' must be \[4\], got \[5\]"),
    ("qwen35", {}, {"blk.0.ssm_a": None}, "got all but 1: blk.0.ssm_a"),
    ("qwen35", {}, {"blk.4.attn_norm.weight": (32,)}, "1 unknown: blk.4.attn_norm.weight"),
    ("qwen35", {}, {"blk.0.ffn_up.scale": (1,)}, "per-tensor scales .* not read yet"),
    ("qwen35", {}, {"blk.0.ffn_gate_inp.weight": (8, 32)}, "mixture-of-experts"),
    ("qwen35", {}, {"rope_freqs.weight": (4,)}, "unknown: rope_freqs.weight"),
    ("qwen35", {}, {"token_embd.weight": (47, 32)}, r"must be \[48, 32\], got \[47, 32\]"),
    ("qwen3", {}, {"blk.0.attn_q_norm.weight": None}, "all but 1: blk.0.attn_q_norm.weight"),
    ("qwen3", {"rope__dimension_count": 8}, {}, "must be the head dimension 16, got 8"),
    ("qwen3", {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, {}, "'longrope'"),
    ("llama", {"attention__sliding_window": 4096}, {}, "sliding_window must be absent, got 4096"),
    ("llama", {"logit_scale": 8.0}, {}, "logit_scale must be absent, got 8.0"),
    ("llama", {}, {"blk.0.attn_q_norm.weight": (16,)}, "1 unknown: blk.0.attn_q_norm.weight"),
    ("llama", {}, {"rope_freqs.weight": (16,)}, r"must be \[8\], got \[16\]"),
]


@pytest.mark.parametrize("arch,changes,tensors,message", MALFORMED)
def test_malformed(arch, changes, tensors, message):
    found = {k: v for k, v in (shapes(arch) | tensors).items() if v is not None}
    with pytest.raises(CheckpointError, match=message) as error:
        target_config_from_gguf(metadata(arch, **changes), found, where="x.gguf")
    assert str(error.value).startswith("x.gguf: ")
    assert "\n" not in str(error.value)


def test_missing_tokens():
    meta = metadata()
    del meta["tokenizer.ggml.tokens"]
    with pytest.raises(CheckpointError, match="tokens must be a list of tokens, got None"):
        target_config_from_gguf(meta, shapes())


def test_describe_names_every_field_and_its_source():
    config = target_config_from_gguf(metadata(), shapes())
    rows = {name: (value, source) for name, value, source in config.describe()}
    assert rows["hidden_size"] == (32, "qwen35.embedding_length")
    assert rows["vocab_size"] == (48, "length of tokenizer.ggml.tokens")
    assert rows["rope.rotary_dim"] == (8, "qwen35.rope.dimension_count")
    assert {f.name for f in fields(Qwen35Config)} - set(rows) == {"rope", "sources", "notes"}
    for name, (_, source) in rows.items():
        assert source != "default" or name.startswith("rope.") or name == "num_nextn_layers", name


def test_unknown_keys_are_noted():
    config = target_config_from_gguf(metadata(new_idea=3), shapes())
    assert config.notes == ("qwen35.new_idea = 3 is not a key we know: ignored",)


VALUES = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**70, 0.5, float("nan"), float("inf"), "", "yarn", [],
    [1], [True, False], [True] * 4, [None], {}, [[1]], 1e308,
]  # fmt: skip


@pytest.mark.parametrize("arch", ["qwen35", "qwen3", "llama"])
def test_any_value_under_any_key(arch):
    """A config, or one CheckpointError of one line. Never another exception, never a hang."""
    meta, tensors = metadata(arch), shapes(arch)
    for name in (
        "nextn_predict_layers",
        "attention.recurrent_layers",
        "rope.scaling.type",
        "rope.scaling.factor",
        "vocab_size",
        "expert_count",
        "attention.scale",
    ):
        meta.setdefault(f"{arch}.{name}", None)
    for key in meta:
        for value in VALUES:
            config, text = None, "file: "
            try:
                config = target_config_from_gguf(meta | {key: value}, tensors, where="file")
            except CheckpointError as error:
                text = str(error)
            assert text.startswith("file: ")
            assert "\n" not in text
            assert len(text) < 1000
            assert config is None or len(config.layer_kinds) == config.num_layers == 4
    for name in tensors:
        for shape in ((), (0,), (1,), (2**40, 32), (32, 32, 1)):
            with pytest.raises(CheckpointError):
                target_config_from_gguf(meta, tensors | {name: shape})
