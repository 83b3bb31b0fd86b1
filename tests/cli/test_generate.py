"""``torch-dflash generate``: text to stdout, statistics to stderr, errors in one line."""

import json
import subprocess
import sys

import pytest
import torch

from torch_dflash.cli.main import main
from torch_dflash.decoding.loop import Session
from torch_dflash.gguf import GGUFFile
from torch_dflash.gguf.tokenizer import tokenizer_from_gguf
from torch_dflash.load import ASSETS, load_target
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

KINDS = ("dflash", "dflash2", "dspark")
PROMPT = "hello"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    tiny_hybrid(folder / "target.gguf", seed=1, layers=3)
    for kind in KINDS:
        tiny_drafter(folder / kind, kind, num_target_layers=3, target_layer_ids=(0, 1))
    tiny_drafter(folder / "deeper", "dflash")
    tiny_drafter(
        folder / "larger", "dflash", vocab=600, num_target_layers=3, target_layer_ids=(0, 1)
    )
    return folder


@pytest.fixture(scope="module")
def expected(files):
    """(text, tokens) of 12 tokens after the prompt."""
    with GGUFFile.open(files / "target.gguf") as file:
        tokenizer = tokenizer_from_gguf(file)
    prompt = tokenizer.encode(PROMPT)
    tokens = Session(load_target(files / "target.gguf")).generate(prompt, 12).tokens
    return tokenizer.decode(tokens), tokens


@pytest.fixture
def run(files, capsys):
    def call(*args, model="target.gguf"):
        status = main(["generate", str(files / model), *map(str, args)])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


def test_activations_are_those_asked_for(run, files):
    with GGUFFile.open(files / "target.gguf") as file:
        prompt = tokenizer_from_gguf(file).encode(PROMPT)
    target = load_target(files / "target.gguf", activations="q8_1")
    tokens = Session(target).generate(prompt, 40).tokens
    asked = "-p", PROMPT, "-n", 40, "--ignore-eos", "--json", "--activations"
    for drafter in ("none", files / "dflash"):
        status, out, _ = run(*asked, "q8_1", "-d", drafter)
        assert status == 0
        assert json.loads(out)["tokens"] == tokens
    assert json.loads(run(*asked, "planes")[1])["tokens"] != tokens
    with pytest.raises(SystemExit, match="2"):
        run(*asked, "q8_0")


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_text_and_statistics_go_apart(run, files, expected, kind):
    drafter = "none" if kind == "none" else files / kind
    status, out, err = run("-p", PROMPT, "-n", 12, "-d", drafter)
    assert status == 0
    assert out == expected[0] + "\n"
    assert err.count("\n") == 1
    assert "5 prompt tokens in" in err
    assert "12 new tokens at" in err
    assert err.endswith("; length]\n")
    assert ("tokens a step" in err) == (kind != "none")


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_json(run, files, expected, kind):
    drafter = "none" if kind == "none" else files / kind
    status, out, err = run("-p", PROMPT, "-n", 12, "-d", drafter, "--json", "--policy", "fixed")
    facts = json.loads(out)
    assert (status, err) == (0, "")
    assert (facts["text"], facts["tokens"]) == expected
    assert facts["finish_reason"] == "length"
    assert facts["new_tokens"] == 12
    assert facts["prompt_tokens"] == 5
    assert sum(facts[k] for k in ("accepted", "steps")) >= 11  # the last step may be cut
    assert (facts["offered"] > 0) == (kind != "none")


def test_standard_input_and_file_give_the_same(run, files, expected, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert run("-f", tmp_path / "prompt.txt", "-n", 12)[1] == expected[0] + "\n"
    done = subprocess.run(
        [sys.executable, "-m", "torch_dflash", "generate", str(files / "target.gguf"), "-p", "-",
         "-n", "12"],
        input=PROMPT.encode(), capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.decode() == expected[0] + "\n"
    assert done.stderr.startswith(b"[5 prompt tokens")


def test_a_reader_that_leaves_is_no_traceback(files):
    command = f"{sys.executable} -m torch_dflash generate {files}/target.gguf -p x -n 400"
    done = subprocess.run(f"{command} | head -c 1", shell=True, capture_output=True, check=True)
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


def test_options_reach_the_loop(run, files, expected):
    stop = expected[0][4:9]
    assert (
        run("-p", PROMPT, "-n", 12, "--stop", stop)[1]
        == expected[0][: expected[0].index(stop)] + "\n"
    )
    sampled = [
        run("-p", PROMPT, "-n", 12, "-t", 2.0, "--seed", seed, "--top-k", 50, "--top-p", 0.95)[1]
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert run("-p", PROMPT, "-n", 12, "-t", 5.0, "--top-k", 1)[1] == expected[0] + "\n"
    snapshots = run("-p", PROMPT, "-n", 12, "-d", files / "dspark", "--state", "snapshots")
    assert snapshots[1] == expected[0] + "\n"
    facts = json.loads(
        run("-p", PROMPT, "-n", 12, "-d", files / "dflash", "--draft-tokens", 2, "--policy",
            "fixed", "--json")[1]
    )  # fmt: skip
    assert len(facts["acceptance_at"]) == 2
    threads = torch.get_num_threads()
    try:
        assert run("-p", PROMPT, "-n", 12, "--threads", 1)[1] == expected[0] + "\n"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_compare(run, files, kind):
    args = ("-p", PROMPT, "-n", 12, "-d", files / kind, "--compare", "--pairs", 2)
    status, out, _ = run(*args, "--json")
    facts = json.loads(out)
    assert status == 0
    assert {*facts} == {
        "drafter", "identical", "plain_tok_s", "spec_tok_s", "speedup", "acceptance_length",
        "acceptance_rate", "tokens",
    }  # fmt: skip
    assert facts["drafter"] == kind
    assert facts["identical"] is True
    assert facts["tokens"] == 12
    assert facts["speedup"] == pytest.approx(facts["spec_tok_s"] / facts["plain_tok_s"], abs=2e-3)
    status, out, _ = run(*args)
    assert status == 0
    assert out.startswith(f"{kind}: identical tokens; plain ")


@pytest.mark.parametrize(
    "args, text",
    [
        (("-p", ""), "the prompt must have at least one token, got an empty text"),
        (("-p", "x", "-n", "0"), "--max-new-tokens must be at least 1, got 0"),
        (("-p", "x", "-t", "-1"), "--temperature must be finite and >= 0, got -1.0"),
        (("-p", "x", "-t", "nan"), "temperature must be finite and >= 0, got nan"),
        (("-p", "x", "--top-p", "0"), "--top-p must be in (0, 1], got 0.0"),
        (("-p", "x", "--top-k", "-2"), "--top-k must be an integer >= 0 (0 keeps all), got -2"),
        (("-p", "x", "--seed", "-1"), "seed must be an integer in [0, 2^63), got -1"),
        (("-p", "x", "--top-k", str(10**30), "-t", "1"), "--top-k must be below 2^63, got 1000000"),
        (("-p", "x", "--device", "tpu"), "--device must be cpu, cuda or cuda:N, got tpu"),
        (("-p", "x", "--device", "cuda:99"), "--device must be "),
        (("-p", "x", "--threads", "0"), "--threads must be at least 1, got 0"),
        (("-p", "x", "--threads", str(2**31 - 1)), "--threads must be at most 1024, got 214748"),
        (("-p", "x\udcff"), "text must be Unicode, got the surrogate '\\udcff' at 1; was it read"),
        (("-p", "x", "--stop", ""), "--stop must not be an empty text"),
        (("-p", "x", "--draft-tokens", "0", "-d", "dflash"), "--draft-tokens must be at least 1, "),
        (("-p", "x", "--draft-tokens", "8", "-d", "FILES/dflash"), "--draft-tokens must be 1..7, "
         "what a block of this dflash drafter holds, got 8"),
        (("-p", "x", "--draft-tokens", "2"), "--draft-tokens needs a drafter, got none; name one"),
        (("-p", "x", "--policy", "cost"), "--policy needs a drafter, got none; name one with"),
        (("-p", "x", "--compare"), "--compare needs a drafter, got none; name one with --drafter"),
        (("-p", "x", "--pairs", "3"), "--pairs needs --compare, got none"),
        (("-p", "x", "--compare", "--pairs", "0", "-d", "dflash"), "--pairs must be at least 1, "),
        (("-p", "x", "--compare", "-n", "1", "-d", "dflash"), "--max-new-tokens must be at least 2 "
         "to --compare, whose first token takes no step, got 1"),
        (("-p", "x", "--compare", "--stop", "y", "-d", "dflash"), "--stop must be absent with"),
        (("-p", "x", "-d", "dflahs"), "drafter must be dflash, dflash2, dspark or the path of a "
         "folder or .gguf file, got 'dflahs', where nothing is"),
        (("-p", "x", "-d", "z-lab/Qwen3.5-9B-DFlash"), "check the path, or fetch a model of this "
         "name first: hf download z-lab/Qwen3.5-9B-DFlash --local-dir Qwen3.5-9B-DFlash"),
        (("--chat", "hi"), "tokenizer.chat_template must be there to chat, got none; give a plain"),
        (("-f", "FILES/nothing.txt"), "FILES/nothing.txt: no such file or directory; check the"),
        (("-p", "x", "-d", "FILES/nothing"), "FILES/nothing: a drafter must be a folder with"),
        (("-p", "x", "-d", "FILES/nothing.gguf"), "FILES/nothing.gguf: no such file or directory"),
        (("-p", "x", "-d", "FILES/target.gguf"), "this is not a drafter; give it as the target"),
        (("-p", "x", "-d", "FILES/deeper"), "use the drafter trained for this target"),
        (("-p", "x", "-d", "FILES/larger"), "vocabulary 600, target has 512"),
    ],
)  # fmt: skip
def test_row_43_errors_are_one_line(run, files, args, text):
    status, out, err = run(*(a.replace("FILES", str(files)) for a in args))
    assert (status, out) == (1, "")
    assert err.startswith("torch-dflash: error: ")
    assert err.count("\n") == 1
    assert text.replace("FILES", str(files)) in err


@pytest.mark.parametrize(
    "model, text",
    [
        ("nothing.gguf", "nothing.gguf: no such file or directory; check the path"),
        ("dflash", "dflash: must be a regular file, got a folder or device"),
        ("junk.gguf", "junk.gguf: "),
        ("cut.gguf", "cut.gguf: "),
    ],
)
def test_models_that_are_none(run, files, model, text):
    (files / "junk.gguf").write_bytes(b"junk" * 100)
    (files / "cut.gguf").write_bytes((files / "target.gguf").read_bytes()[:5000])
    status, out, err = run("-p", "x", model=model)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert text in err


def test_a_closed_standard_input(run, files, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    status, out, err = run("-p", "-")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "--prompt - must have a standard input to read, got a closed one" in err


def test_a_file_that_is_not_text(run, files, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    status, _, err = run("-f", tmp_path / "binary")
    assert status == 1
    assert f"{tmp_path}/binary: must be UTF-8 text" in err


def test_the_command_itself():
    done = subprocess.run(
        [sys.executable, "-m", "torch_dflash", "generate", "/nothing.gguf", "-p", "x"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "torch-dflash: error: /nothing.gguf: no such file or directory; check the path\n"
    )
    usage = subprocess.run(
        [sys.executable, "-m", "torch_dflash"], capture_output=True, text=True, check=False
    )
    assert usage.returncode == 2
    assert "usage: torch-dflash" in usage.stderr


@pytest.mark.skipif(not (ASSETS / "target.gguf").exists(), reason="no embedded model")
class TestEmbedded:
    def test_the_default(self, capsys):
        """No arguments at all: the embedded target, DFlash2, its own prompt."""
        assert main(["generate", "-n", "24", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert main(["generate", "-n", "24", "--json", "-d", "none"]) == 0
        plain = json.loads(capsys.readouterr().out)
        assert facts["tokens"] == plain["tokens"]
        assert plain["offered"] == 0 < facts["offered"]

    def test_a_drafter_of_the_embedded_target_elsewhere(self, run):
        status, _, err = run("-p", "x", "-d", "dspark")
        assert status == 1
        assert "target_layer_ids must be below 2 (the target has 3 layers" in err

    def test_chat(self, capsys):
        with GGUFFile.open(ASSETS / "target.gguf") as file:
            has = tokenizer_from_gguf(file).chat_template is not None
        status = main(["generate", "--chat", "hi", "-n", "4"])
        err = capsys.readouterr().err
        assert status == (0 if has else 1)
        assert ("new tokens" in err) if has else ("give a plain prompt" in err)
