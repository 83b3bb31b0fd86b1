"""Folder to GGUF to folder: every kind and option, both layouts, bit for bit and field by field."""

import hf_craft as craft
import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_dflash import convert_drafter, prepare_drafter
from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.target_ends import with_target_ends
from torch_dflash.gguf import GGUFFile, Typed, typed_metadata, write_gguf
from torch_dflash.hf import CheckpointError
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

S, F = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e7,
    "factor": 32.0,
    "original_max_position_embeddings": 128,
}
ENDS = ("embed_tokens.weight", "lm_head.weight")
REDUCED = {"draft_vocab_size": 96}

# name -> (config, names of optional tensors)
CASES = {
    "dflash": (craft.config("dflash"), ()),
    "dflash2": (craft.config("dflash2"), ()),
    "dspark": (craft.config("dspark"), ("confidence_head.proj.bias",)),
    "gated": (craft.config("dspark", {"markov_head_type": "gated"}), ()),
    "rnn": (craft.config("dspark", {"markov_head_type": "rnn"}), ()),
    "no confidence": (craft.config("dspark", {"enable_confidence_head": False}), ()),
    "confidence on hidden": (craft.config("dspark", {"confidence_head_with_markov": False}), ()),
    "bonus anchor": (craft.config("dspark", sample_from_anchor=False), ()),
    "logit scale": (craft.config("dspark", logit_scale=0.25), ()),
    "own ends": (craft.config("dflash"), ENDS),
    "own head": (craft.config("dflash2"), ENDS[1:]),
    "d2t": (craft.config("dspark", **REDUCED), ("embed_tokens.weight",)),
    "d2t of dflash": (craft.config("dflash", **REDUCED), ()),
    "biases": (craft.config("dflash", attention_bias=True), ()),
    "sinks": (craft.config("dflash", {"attention_sink_bias": True}), ()),
    "value scale": (craft.config("dflash", {"attention_value_scale": 0.7}), ()),
    "scales": (
        craft.config(
            "dflash2",
            {
                "output_multiplier": 0.196,
                "final_logit_softcapping": 20.0,
                "input_embedding_scale": 8.0,
            },
        ),
        (),
    ),
    "mask token 0": (craft.config("dflash", {"mask_token_id": 0}), ()),
    "ids out of order": (craft.config("dflash", {"target_layer_ids": [4, 1, 9]}), ()),
    "one id": (craft.config("dflash", {"target_layer_ids": [7]}), ()),
    "another width": (craft.config("dflash", target_hidden_size=48), ()),
    "eps": (craft.config("dflash", rms_norm_eps=1e-5), ()),
    "causal": (craft.config("dflash", is_causal=True), ()),
    "causal by dflash_config": (craft.config("dflash", {"causal": True}, is_causal=None), ()),
    "all slide": (craft.config("dflash2", layer_types=[S, S], sliding_window=24), ()),
    "legacy mixed": (
        craft.config("dflash", layer_types=[S, F], sliding_window=24, is_causal=None),
        (),
    ),
    "mixed, not causal": (craft.config("dflash", layer_types=[F, S], sliding_window=24), ()),
    "use_swa": (craft.config("dflash", {"use_swa": True, "swa_window_size": 12}), ()),
    "yarn": (craft.config("dspark", rope_parameters=YARN), ()),
    "yarn legacy type": (
        craft.config(
            "dspark",
            rope_parameters=None,
            rope_theta=1e7,
            rope_scaling={
                "type": "YaRN",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        ),
        (),
    ),
    "yarn betas": (
        craft.config("dflash", rope_parameters=YARN | {"beta_fast": 4.0, "beta_slow": 0.25}),
        (),
    ),
    "attention factor": (
        craft.config("dflash", rope_parameters=YARN | {"attention_factor": 1.1}),
        (),
    ),
    "not truncated": (craft.config("dflash", rope_parameters=YARN | {"truncate": False}), ()),
    "linear": (
        craft.config(
            "dflash", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
        ),
        (),
    ),
    "partial": (
        craft.config(
            "dflash",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        ),
        (),
    ),
    "rope by layer type": (
        craft.config(
            "dflash",
            layer_types=[S, F],
            sliding_window=24,
            rope_parameters={S: YARN, F: YARN},
        ),
        (),
    ),
    "rope for one layer type": (
        craft.config(
            "dflash", rope_parameters={F: YARN, S: {"rope_type": "default", "rope_theta": 1.5e4}},
            layer_types=[F, F],
        ),
        (),
    ),
    "interleaved": (craft.config("dflash", rope_is_neox_style=False), ()),
    "speculators dspark": (craft.speculators("dspark", sample_from_anchor=True), ()),
    "speculators without anchor": (craft.speculators("dspark", draft_vocab_size=96), ENDS[:1]),
    "speculators dflash": (craft.speculators("dflash"), ()),
    "speculators dflash2": (craft.speculators("dflash2", block_size=6), ()),
}  # fmt: skip


def check_same(before, after):
    assert after.config == before.config
    assert after.tensors.keys() == before.tensors.keys()
    for name, tensor in before.tensors.items():
        got, want = after.tensors[name].to_dense(), tensor.to_dense()
        assert torch.equal(got.to(want.dtype), want), name
        if want.is_floating_point():  # and nothing was rounded on the way
            assert torch.equal(got.double(), want.double()), name


def there_and_back(tmp_path, source, **options):
    """Folder to GGUF to folder: the GGUF and the folder."""
    path, out = tmp_path / "x.gguf", tmp_path / "out"
    width = read_checkpoint(source).config.target_hidden_size
    convert_drafter(source, path, **options)
    prepare_drafter(path, out, target=craft.target_folder(tmp_path / "target", hidden=width))
    return path, out


@pytest.mark.parametrize("layout, alignment", [("upstream", 32), ("lucebox", 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_option(tmp_path, case, dtype, layout, alignment):
    made, extra = CASES[case]
    source = craft.folder(tmp_path / "in", made, dtype=dtype, extra=extra)
    path, out = there_and_back(tmp_path, source, layout=layout, alignment=alignment)
    before = read_checkpoint(source)
    check_same(before, read_checkpoint(out))
    with GGUFFile.open(path) as file:
        assert file.alignment == alignment
        assert all(t.offset % alignment == 0 for t in file.tensors.values())
        assert file.architecture == ("dflash" if layout == "upstream" else "qwen35-dflash-draft")
    written = {t.type_name for t in read_checkpoint(out).tensors.values()} - {"I64"}
    assert written == {"F32" if dtype == torch.float32 else "BF16"}


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_are_one_checkpoint(tmp_path, shards):
    made, extra = CASES["dspark"]
    one = craft.folder(tmp_path / "one", made, extra=extra)
    many = craft.folder(tmp_path / "many", made, extra=extra, shards=shards)
    convert_drafter(one, tmp_path / "one.gguf")
    convert_drafter(many, tmp_path / "many.gguf")
    check_same(read_checkpoint(tmp_path / "one.gguf"), read_checkpoint(tmp_path / "many.gguf"))


@pytest.mark.parametrize("layout", ["upstream", "lucebox"])
@pytest.mark.parametrize("kind", ["int32", "uint32", "int64", "uint64", "uint16"])
def test_ids_of_any_integer_type(tmp_path, layout, kind):
    source = craft.folder(tmp_path / "in", craft.config("dflash", {"mask_token_id": 0}))
    path = tmp_path / "x.gguf"
    convert_drafter(source, path, layout=layout)
    with GGUFFile.open(path) as file:
        keys = typed_metadata(file)
        names = [k for k in keys if k.split(".")[-1] in ("target_layers", "target_layer_ids")]
        assert len(names) == 1
        keys[names[0]] = Typed(f"array[{kind}]", keys[names[0]].value)
        tensors = [(n, file.tensor(n)) for n in file.tensors]
        write_gguf(tmp_path / "y.gguf", file.architecture, keys, tensors)
    got = read_checkpoint(tmp_path / "y.gguf").config
    assert got.target_layer_ids == (1, 4, 9)
    assert got.mask_token_id == 0


def test_one_layout_becomes_the_other(tmp_path):
    """A GGUF is a source as well; nothing is lost on a way through both layouts."""
    source = craft.folder(tmp_path / "in", CASES["scales"][0])
    a, b, c = (tmp_path / f"{n}.gguf" for n in "abc")
    convert_drafter(source, a, layout="lucebox", alignment=64)
    convert_drafter(a, b)
    convert_drafter(source, c, alignment=64)
    check_same(read_checkpoint(b), read_checkpoint(c))
    with GGUFFile.open(b) as ours, GGUFFile.open(c) as direct:
        assert ours.alignment == 64
        assert typed_metadata(ours) == typed_metadata(direct)


@pytest.mark.parametrize("outtype", ["f16", "bf16"])
def test_a_smaller_type_is_one_rounding(tmp_path, outtype):
    source = craft.folder(tmp_path / "in", craft.config("dflash2"), dtype=torch.float32)
    convert_drafter(source, tmp_path / "x.gguf", outtype=outtype)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[outtype]
    got = read_checkpoint(tmp_path / "x.gguf").tensors
    for name, tensor in read_checkpoint(source).tensors.items():
        want = tensor.to_dense()
        vector = want.dim() == 1 or name.endswith("base_kernel")
        assert torch.equal(got[name].to_dense(), want if vector else want.to(dtype)), name


class TestTargetEnds:
    """What a GGUF must bring along of its target's embedding and head."""

    @pytest.fixture
    def target(self, tmp_path):
        return tiny_hybrid(tmp_path / "target.gguf", hidden=256, vocab=512, layers=3)

    @pytest.fixture
    def source(self, tmp_path):
        return tiny_drafter(
            tmp_path / "in", "dflash", hidden=256, vocab=512, num_target_layers=3,
            target_layer_ids=(0, 1),
        )  # fmt: skip

    def test_an_embedding_without_a_head(self, tmp_path, target, source):
        """llama.cpp would tie them; the head is the target's."""
        tensors = load_file(source / "model.safetensors")
        tensors["embed_tokens.weight"] = torch.randn(512, 256).bfloat16()
        save_file(tensors, source / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"x\.gguf: embed_tokens must come with lm_head"):
            convert_drafter(source, tmp_path / "x.gguf")
        convert_drafter(source, tmp_path / "x.gguf", target=target)
        got = read_checkpoint(tmp_path / "x.gguf").tensors
        assert torch.equal(got["embed_tokens.weight"].to_dense(), tensors["embed_tokens.weight"])
        with GGUFFile.open(target) as file:
            want = file.tensor("output.weight")
        assert got["lm_head.weight"].ggml_type == want.ggml_type
        assert torch.equal(got["lm_head.weight"].packed, want.packed)

    def test_a_mask_embedding(self, tmp_path, target, source):
        """It becomes one row of the target's embedding; every other row stays."""
        row = torch.randn(256).bfloat16()
        torch.save({"mask_token_id": 511, "embedding": row}, source / "mask_embedding.pt")
        with pytest.raises(CheckpointError, match=r"mask_embedding\.pt becomes a row .* target"):
            convert_drafter(source, tmp_path / "x.gguf")
        convert_drafter(source, tmp_path / "x.gguf", target=target, outtype="f32")
        got = read_checkpoint(tmp_path / "x.gguf").tensors
        with GGUFFile.open(target) as file:
            want = file.tensor("token_embd.weight").to_dense()
            head = file.tensor("output.weight").to_dense()
        want[511] = row.float()
        assert torch.equal(got["embed_tokens.weight"].to_dense(), want)
        assert torch.equal(got["lm_head.weight"].to_dense(), head)
        assert "mask_embedding" not in got

    def test_a_folder_as_target(self, tmp_path, source):
        """Tied, and with the names of a multimodal model."""
        folder = craft.target_folder(tmp_path / "t", vocab=512, hidden=256, layers=3)
        ends = torch.randn(512, 256).bfloat16()
        save_file({"model.language_model.embed_tokens.weight": ends}, folder / "model.safetensors")
        torch.save(torch.ones(256), source / "mask_embedding.pt")
        checkpoint = with_target_ends(read_checkpoint(source), folder)
        for name in ENDS:
            assert torch.equal(checkpoint.tensors[name].to_dense(), ends)
        save_file({"other": ends}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"must hold token_embd\.weight or embed_tokens"):
            with_target_ends(read_checkpoint(source), folder)
        save_file({"embed_tokens.weight": ends[:9].clone()}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"must be \[512, 256\], got \[9, 256\]"):
            with_target_ends(read_checkpoint(source), folder)
