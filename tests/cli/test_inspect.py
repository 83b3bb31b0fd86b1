"""``torch-dflash inspect``: what a file is, and whether it can be used."""

import json

import pytest

from torch_dflash import inspect_file as inspect
from torch_dflash.cli.main import main
from torch_dflash.load import ASSETS
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    tiny_hybrid(folder / "target.gguf", layers=3)
    for kind in ("dflash", "dflash2", "dspark"):
        tiny_drafter(folder / kind, kind, num_target_layers=3, target_layer_ids=(0, 1))
    return folder


def test_target(files):
    facts = inspect(files / "target.gguf")
    assert facts["kind"] == "qwen35 target (gguf)"
    assert facts["usable"] == "yes"
    assert facts["config"]["num_layers"] == [3, "qwen35.block_count"]
    assert facts["config"]["tied"] == [False, "output.weight"]
    # 2 GDN layers of 14 tensors, 1 full one of 11, embedding, norm, head
    assert facts["tensors"] == 2 * 14 + 11 + 3
    assert facts["types"].keys() == {"F32", "Q8_0"}
    # head and embedding: 512 rows of 256
    listed = inspect(files / "target.gguf", tensors=True)["tensor list"]
    assert listed["output.weight"] == "Q8_0 [512, 256]"
    assert len(listed) == facts["tensors"]


@pytest.mark.parametrize("kind, drafts", [("dflash", 7), ("dflash2", 7), ("dspark", None)])
def test_drafter_folder(files, kind, drafts):
    facts = inspect(files / kind)
    assert facts["kind"] == f"{kind} drafter (hf)"
    assert facts["usable"] == "yes"
    assert facts["config"]["target_layer_ids"][0] == [0, 1]
    if drafts is not None:
        assert facts["draft tokens per step"] == drafts


def test_a_head_whose_tensors_are_missing(tmp_path, capsys):
    folder = tiny_drafter(tmp_path / "rnn", "dspark", num_target_layers=6)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["markov_head_type"] = "gated"
    (folder / "config.json").write_text(json.dumps(config))
    status = main(["inspect", str(folder)])
    out = capsys.readouterr()
    # its tensors are missing here, and that is what is said, in one line
    assert status == 1
    assert "markov_head.gate_proj" in out.err
    assert out.err.count("\n") == 1


def test_printed_and_json(files, capsys):
    assert main(["inspect", str(files / "target.gguf"), "--json", "--tensors"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(inspect(files / "target.gguf", tensors=True))
    )
    assert main(["inspect", str(files / "dflash2")]) == 0
    out = capsys.readouterr().out
    assert "dflash2 drafter (hf)" in out
    assert "selector_top_k" in out


@pytest.mark.parametrize(
    "name, content, text",
    [
        ("nothing.gguf", None, "no such file or directory; check the path"),
        ("junk.gguf", b"not a model at all", "junk.gguf: "),
        ("empty.gguf", b"", "empty.gguf: "),
    ],
)
def test_broken_files(tmp_path, capsys, name, content, text):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["inspect", str(tmp_path / name)]) == 1
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_cut_anywhere(files, tmp_path, capsys):
    whole = (files / "target.gguf").read_bytes()
    for size in (4, 30, 1000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert main(["inspect", str(tmp_path / "cut.gguf")]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"torch-dflash: error: {tmp_path}/cut.gguf: ")
        assert err.count("\n") == 1


@pytest.mark.skipif(not (ASSETS / "target.gguf").exists(), reason="no embedded model")
@pytest.mark.parametrize("name", ["target", "dflash", "dflash2", "dspark"])
def test_embedded(name):
    facts = inspect(ASSETS / f"{name}.gguf")
    assert facts["usable"] == "yes"
    kind = "qwen35 target (gguf)" if name == "target" else f"{name} drafter (gguf)"
    assert facts["kind"] == kind


BACKBONE = {
    "model_type": "qwen3",
    "is_causal": False,
    "hidden_size": 5120,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "num_target_layers": 64,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
}
IDS = {"mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61], "block_size": 8}
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
MARKOV = {"markov_rank": 256, "enable_confidence_head": True, "projector_type": "dspark"}
PUBLISHED = {
    # z-lab/Qwen3.8-27B-DFlash2
    "DFlash2DraftModel": (17408, 32, SELECTOR, 81, 1_924_404_480),
    # RadixArk/Qwen3.8-27B-DSpark
    "DSparkDraftModel": (10240, 40, MARKOV, 62, 1_359_284_737),
    # z-lab/Qwen3.6-27B-DFlash: 3.46 GB of bfloat16
    "DFlashDraftModel": (17408, 32, {}, 58, 1_730_213_120),
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_counts_from_the_config_alone(tmp_path, architecture):
    ffn, heads, head, tensors, values = PUBLISHED[architecture]
    config = BACKBONE | {"architectures": [architecture], "intermediate_size": ffn}
    config |= {"num_attention_heads": heads, "dflash_config": IDS | head}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = inspect(tmp_path)
    assert (facts["tensors"], facts["parameters"]) == (tensors, values)
    assert facts["usable"] == "yes, once its weights are there"
