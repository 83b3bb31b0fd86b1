import json
import shutil

import pytest
import torch

from torch_dflash.convert import convert_drafter, convert_target
from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.gguf import GGUFFile, tokenizer_from_gguf
from torch_dflash.hf import CheckpointError


@pytest.fixture
def target(fixtures, tmp_path):
    """hybrid/nk2_nv4 with the tokenizer that the converter gave its GGUF."""
    folder = tmp_path / "Nk2_Nv4"
    shutil.copytree(fixtures / "hybrid/nk2_nv4", folder)
    folder.chmod(0o755)
    with GGUFFile.open(fixtures / "gguf/target_nk2_nv4.gguf") as file:
        tokens = list(file.metadata["tokenizer.ggml.tokens"])
        types = list(file.metadata["tokenizer.ggml.token_type"])
    split = {"pattern": {"Regex": QWEN2}, "type": "Split", "behavior": "Isolated", "invert": False}
    tokenizer = {
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate(tokens) if types[i] == 1},
            "merges": [["t", "h"], ["i", "n"]],
        },
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]},
        "added_tokens": [
            {"id": i, "content": t, "special": True} for i, t in enumerate(tokens) if types[i] == 3
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_target(fixtures, target, tmp_path):
    """The whole file: metadata, tokenizer and tensors as llama.cpp's converter wrote them."""
    convert_target(target, tmp_path / "x.gguf")
    with (
        GGUFFile.open(tmp_path / "x.gguf") as ours,
        GGUFFile.open(fixtures / "gguf/target_nk2_nv4.gguf") as theirs,
    ):
        want = dict(theirs.metadata)
        del want["general.size_label"]
        got = dict(ours.metadata)
        assert got.pop("tokenizer.ggml.add_bos_token") is False
        assert got == want
        for key in want:
            assert ours.metadata_type(key) == theirs.metadata_type(key)
        assert ours.tensors.keys() == theirs.tensors.keys()
        assert tokenizer_from_gguf(ours).encode("thin <|im_end|>") == [97, 98, 95, 101]
    convert_target(target, tmp_path / "f32.gguf", dtype=torch.float32)
    with GGUFFile.open(tmp_path / "f32.gguf") as file:
        assert file.metadata["general.file_type"] == 0
        assert {t.ggml_type for t in file.tensors.values()} == {0}


def test_another_model(target, tmp_path):
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    with pytest.raises(CheckpointError, match="model_type must be qwen3_5 or qwen3_5_text, got"):
        convert_target(target, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("case", ["dflash2", "dspark_speculators_d2t"])
def test_drafter(fixtures, tmp_path, case):
    folder, path = fixtures / "gguf" / case, tmp_path / "x.gguf"
    convert_drafter(folder, path, target=fixtures / "gguf/target_nk2_nv4.gguf")
    with GGUFFile.open(path) as ours, GGUFFile.open(folder / "model.gguf") as theirs:
        assert ours.metadata["dflash.context_length"] == 4096
        assert ours.metadata["tokenizer.ggml.mask_token_id"] == 102
        assert ours.metadata["general.file_type"] == 32
        assert theirs.metadata.keys() - ours.metadata.keys() == {"general.size_label"}
        for name in theirs.tensors:
            assert torch.equal(ours.tensor(name).packed, theirs.tensor(name).packed)
    convert_drafter(folder, path, outtype="f16")  # without a tokenizer
    assert read_checkpoint(path).config.vocab_size == 112
    with GGUFFile.open(path) as file:
        assert file.metadata["general.file_type"] == 1
        assert "tokenizer.ggml.tokens" not in file.metadata


def test_drafter_errors(fixtures, tmp_path):
    convert_drafter(fixtures / "gguf/dflash", tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"x\.gguf: a target must hold token_embd"):
        convert_drafter(fixtures / "gguf/dflash", tmp_path / "y.gguf", target=tmp_path / "x.gguf")
