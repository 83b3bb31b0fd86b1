"""``torch-dflash convert`` and ``prepare``: one line when it works, one line when it does not."""

import json
import shutil

import pytest
import torch

from torch_dflash import inspect_file
from torch_dflash.cli.main import main
from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.gguf import GGUFFile
from torch_dflash.load import ASSETS
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    tiny_hybrid(folder / "target.gguf")
    for kind in ("dflash", "dflash2", "dspark"):
        tiny_drafter(folder / kind, kind)
    return folder


def run(capsys, *argv):
    status = main([str(a) for a in argv])
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.mark.parametrize("kind, count", [("dflash", 25), ("dflash2", 36), ("dspark", 29)])
@pytest.mark.parametrize("layout", ["upstream", "lucebox"])
def test_there_and_back(files, tmp_path, capsys, kind, count, layout):
    path = tmp_path / "x.gguf"
    target = files / "target.gguf"
    status, out, err = run(
        capsys, "convert", files / kind, "-o", path, "--target", target, "--layout", layout
    )
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: {kind} drafter (gguf), {count} tensors, ")
    with GGUFFile.open(path) as file:
        assert file.metadata["general.name"] == kind
        assert ("tokenizer.ggml.tokens" in file.metadata) == (layout == "upstream")
        ids = file.metadata.get("dflash.target_layers")
        raw = file.metadata.get("qwen35-dflash-draft.dflash.target_layer_ids")
        upstream = layout == "upstream"
        assert (ids, raw) == (([1, 3, 5], None) if upstream else (None, [0, 2, 4]))
    status, out, err = run(capsys, "prepare", path, "-o", tmp_path / "d", "--target", target)
    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'd'}: {kind} drafter (hf), {count} tensors, ")
    before, after = read_checkpoint(files / kind), read_checkpoint(tmp_path / "d")
    assert after.config == before.config
    for name, tensor in before.tensors.items():
        assert torch.equal(after.tensors[name].to_dense(), tensor.to_dense()), name


def test_the_name_of_a_folder_may_have_dots(files, tmp_path, capsys):
    folder = shutil.copytree(files / "dflash", tmp_path / "Qwen3.8-27B-DFlash")
    run(capsys, "convert", folder, "-o", tmp_path / "x.gguf")
    with GGUFFile.open(tmp_path / "x.gguf") as file:
        assert file.metadata["general.name"] == "Qwen3.8-27B-DFlash"


def test_options(files, tmp_path, capsys):
    path = tmp_path / "x.gguf"
    run(capsys, "convert", files / "dflash", "-o", path, "--outtype", "F16", "--alignment", "64")
    with GGUFFile.open(path) as file:
        assert file.alignment == 64
        assert file.metadata["general.file_type"] == 1
    again = tmp_path / "y.gguf"  # the alignment of a GGUF source is kept
    status, _, _ = run(
        capsys, "convert", path, "-o", again, "--causal", "yes", "--mask-token-id", 0
    )
    assert status == 0
    with GGUFFile.open(again) as file:
        assert file.alignment == 64
        assert file.metadata["dflash.attention.causal"] is True
        assert file.metadata["tokenizer.ggml.mask_token_id"] == 0
    folder = tmp_path / "d"
    run(capsys, "prepare", path, "-o", folder, "--dtype", "f32", "--target", files / "target.gguf")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_without_a_target_it_says_so(files, tmp_path, capsys, caplog):
    run(capsys, "convert", files / "dflash", "-o", tmp_path / "x.gguf")
    assert "without a tokenizer llama.cpp does not load it; pass the target" in caplog.text
    caplog.clear()
    run(capsys, "convert", ASSETS / "dflash.gguf", "-o", tmp_path / "y.gguf")  # has one
    assert caplog.text == ""
    with GGUFFile.open(tmp_path / "y.gguf") as ours, GGUFFile.open(ASSETS / "dflash.gguf") as was:
        keys = [k for k in was.metadata if k.startswith("tokenizer.")]
        assert len(keys) > 5
        for key in keys:
            assert ours.metadata_type(key) == was.metadata_type(key)
        tokens = "tokenizer.ggml.tokens"
        assert list(ours.metadata[tokens]) == list(was.metadata[tokens])


@pytest.mark.parametrize(
    "argv, said",
    [
        (["convert", "{d}/none", "-o", "{t}/x.gguf"], "none: a drafter must be a folder"),
        (["convert", "{d}/dflash", "-o", "{t}/no/x.gguf"], "no: must be a folder to write x.gguf"),
        (["convert", "{d}/dflash", "-o", "{t}/x", "--alignment", "3"], "alignment must be a power"),
        (
            ["convert", "{d}/dflash", "-o", "{t}/x.gguf", "--mask-token-id", "512"],
            "must be a token of the vocabulary of 512, got 512",
        ),
        (
            ["convert", "{d}/dflash", "-o", "{t}/x.gguf", "--target", "{a}/target.gguf"],
            "hidden size 256, target has 512",
        ),
        (["prepare", "{d}/target.gguf", "-o", "{t}/x"], "general.architecture must be dflash"),
        (["prepare", "{a}/dflash.gguf", "-o", "{t}/x"], "num_target_layers must be known"),
        (["prepare", "{d}/dflash", "-o", "{d}"], "must not exist yet or be empty"),
    ],
)
def test_errors_are_one_line(files, tmp_path, capsys, argv, said):
    argv = [a.format(d=files, t=tmp_path, a=ASSETS) for a in argv]
    status, out, err = run(capsys, *argv)
    assert status == 1
    assert out == ""
    assert said in err
    assert err.startswith("torch-dflash: error: ")
    assert err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("written", ["source", "target", "link"])
def test_what_is_read_is_never_written_over(tmp_path, capsys, written):
    paths = {name: tmp_path / f"{name}.gguf" for name in ("source", "target", "link")}
    shutil.copy(ASSETS / "dflash.gguf", paths["source"])
    shutil.copy(ASSETS / "target.gguf", paths["target"])
    paths["link"].hardlink_to(paths["source"])
    before = {name: path.read_bytes() for name, path in paths.items()}
    argv = ["convert", paths["source"], "-o", paths[written], "--target", paths["target"]]
    assert main([*map(str, argv), "--outtype", "q4_0"]) == 1
    error = capsys.readouterr().err.strip()
    assert error.endswith(f"{written}.gguf: must be another file than the source; name a new one")
    assert {name: path.read_bytes() for name, path in paths.items()} == before
    assert len([*tmp_path.iterdir()]) == 3


def test_a_terminal_sees_a_bar(files, tmp_path, monkeypatch):
    from torch_dflash.cli import progress

    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    with progress.progress_bar("x.gguf") as step:
        step("blk.0.attn_q.weight", 10, 100)
        step("blk.0.attn_q.weight", 100, 100)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    with progress.progress_bar("x.gguf") as step:
        assert step is None


def test_inspect_a_config_alone(files, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((files / "dspark/config.json").read_bytes())
    for path in (tmp_path, tmp_path / "config.json"):
        facts = inspect_file(path)
        assert facts["kind"] == "dspark drafter (config)"
        assert facts["usable"] == "yes, once its weights are there"
        assert facts["tensors"] == 27  # the config does not promise a confidence head
    assert facts["target layers"] == {
        "output of layer (from 0)": [0, 2, 4],
        "input of layer, as in GGUF": [1, 3, 5],
    }
    assert facts["layers"] == ["full attention, not causal"] * 2


def test_inspect_against_a_target(files, capsys):
    status, out, err = run(
        capsys, "inspect", files / "dflash2", "--target", ASSETS / "target.gguf", "--json"
    )
    assert status == 1
    facts = json.loads(out)
    assert "hidden size 256, target has 512" in facts["usable"]
    assert err == f"torch-dflash: error: {facts['usable']}\n"
    status, out, _ = run(capsys, "inspect", files / "dflash2", "--target", files / "target.gguf")
    assert status == 0
    assert "target layers" in out


def test_inspect_holds_no_target_against_a_target(files, capsys):
    path = files / "target.gguf"
    status, out, err = run(capsys, "inspect", path, "--target", path)
    assert (status, out) == (1, "")
    assert err.endswith(f"{path}: must be a drafter to hold against a target, got a target\n")


def test_inspect_says_what_others_leave_out(files, tmp_path, capsys):
    config = json.loads((files / "dflash/config.json").read_text())
    config |= {"final_logit_softcapping": 20.0, "is_causal": None, "sliding_window": 64}
    config["layer_types"] = ["sliding_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, _ = run(capsys, "inspect", tmp_path)
    assert status == 0
    assert "layers                 0: window 64, causal; 1: full attention, not causal" in out
    assert "elsewhere: llama.cpp has one causality for all layers" in out
    assert "elsewhere: vLLM without the torch-dflash plugin ignores final_logit_softcapping" in out
    assert "note: layers: neither is_causal nor causal is set" in out
    config["architectures"] = ["DominoDraftModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = inspect_file(tmp_path)
    assert "is Domino, which is not supported" in facts["usable"]
