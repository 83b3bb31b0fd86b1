"""What is written, where: never over what is read, whole or not at all, under any name."""

import os
import signal
import subprocess
import sys
import time

import pytest

from torch_dflash import convert_drafter, convert_target
from torch_dflash.cli.main import main
from torch_dflash.gguf import GGUFError, GGUFFile, Typed, write_gguf
from torch_dflash.load import ASSETS
from torch_dflash.testing.tiny import tiny_drafter

DRAFTER, TARGET = str(ASSETS / "dflash.gguf"), str(ASSETS / "target.gguf")


@pytest.fixture
def folder(tmp_path):
    return tiny_drafter(tmp_path / "drafter", "dflash")


@pytest.fixture
def run(capsys):
    def call(*argv):
        status = main([str(a) for a in argv])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("way", ["itself", "symlink", "hard link"])
def test_a_file_of_the_folder_that_is_read_is_not_written_over(folder, tmp_path, run, name, way):
    path = folder / name
    if way != "itself":
        path = tmp_path / "other.gguf"
        (path.symlink_to if way == "symlink" else path.hardlink_to)(folder / name)
    before = contents(folder)
    status, out, err = run("convert", folder, "-o", path)
    assert (status, out) == (1, "")
    assert err.endswith(f"{path}: must be another file than the source; name a new one\n")
    status, _, err = run("convert", DRAFTER, "--target", folder, "-o", path)  # as a target
    assert status == 1
    assert "must be another file than the source" in err
    with pytest.raises(GGUFError, match="must be another file than the source"):
        convert_target(folder, path)
    assert contents(folder) == before


def test_an_earlier_result_in_the_folder_is_replaced(folder, run):
    for outtype in ("bf16", "f16"):
        assert run("convert", folder, "-o", folder / "d.gguf", "--outtype", outtype)[0] == 0
    with GGUFFile.open(folder / "d.gguf") as file:
        assert file.metadata["general.file_type"] == 1


def test_a_folder_inside_the_source(folder, run):
    before = contents(folder)
    assert run("prepare", folder, "-o", folder / "inner", "--target", folder)[0] in (0, 1)
    assert run("prepare", folder, "-o", folder / "inner2")[0] == 0
    assert contents(folder) == before


def test_an_empty_folder_behind_a_link(tmp_path, run):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert run("prepare", DRAFTER, "--target", TARGET, "-o", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert {*contents(tmp_path / "real")} == {"config.json", "model.safetensors"}


def test_folders_that_cannot_be_written(folder, tmp_path, run, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for where, said in (
        (tmp_path / "file", "must be a new or an empty folder, got a file"),
        (folder, "must not exist yet or be empty, got one that is not empty"),
        (".", "must not be the current folder; name a new one in it"),
        (tmp_path / "a/b", f"{tmp_path}/a: must be a folder to write b to"),
    ):
        status, out, err = run("prepare", DRAFTER, "--target", TARGET, "-o", where)
        assert (status, out) == (1, "")
        assert said in err
    assert {p.name for p in tmp_path.iterdir()} == {"drafter", "empty", "file"}
    assert not [*(tmp_path / "empty").iterdir()]


@pytest.mark.parametrize("name", ["spa ce ü 漢", "b\udcff", "new\nline", "x" * 250])
def test_any_name_that_the_disk_takes(tmp_path, run, name):
    source, path = tmp_path / f"{name}.gguf", tmp_path / f"{name[:-1]}y.gguf"
    source.symlink_to(DRAFTER)
    status, out, err = run("convert", source, "-o", path)
    assert (status, out.count("\n")) == (0, 1)
    assert "dflash drafter (gguf), 25 tensors" in out
    assert err == ""
    assert {p.name for p in tmp_path.iterdir()} == {source.name, path.name}
    status, out, err = run("requantize", tmp_path / f"no {name}", path, "--type", "q8_0")
    assert (status, err.count("\n")) == (1, 1)  # a line feed in a name does not cut the message
    assert "; check the path" in err


def test_a_folder_s_name_becomes_text(tmp_path):
    folder = tiny_drafter(tmp_path / "b\udcff", "dflash").rename(tmp_path / "plain")
    (tmp_path / "b\udcff.gguf").unlink(missing_ok=True)
    convert_drafter(folder, tmp_path / "d.gguf")
    with GGUFFile.open(tmp_path / "d.gguf") as file:
        assert file.metadata["general.name"] == "plain"
    with pytest.raises(GGUFError, match=r"'general.name' must be string, got 'b\\udcff'"):
        write_gguf(tmp_path / "x", "a", {"general.name": Typed("string", "b\udcff")}, [])


@pytest.mark.parametrize("alignment", ["0", "-8", "24", str(1 << 22), str(1 << 32), str(10**30)])
def test_alignments_that_are_none(tmp_path, run, alignment):
    """One of 2^30 wrote gigabytes of zeros between small tensors, one of 2^32 was a traceback."""
    for command in (
        ("convert", DRAFTER, "-o", tmp_path / "x.gguf"),
        ("requantize", DRAFTER, tmp_path / "x.gguf", "--type", "q8_0"),
    ):
        status, out, err = run(*command, "--alignment", alignment)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert "alignment must be a power of two of at least 8 and at most 2097152, got " in err
        assert err.endswith(f" {alignment}\n")
    assert not [*tmp_path.iterdir()]


def test_a_gguf_by_any_other_name(tmp_path, run):
    for name in ("UPPER.GGUF", "blob"):
        (tmp_path / name).symlink_to(DRAFTER)
        assert run("inspect", tmp_path / name)[0] == 0
        assert run("convert", tmp_path / name, "-o", tmp_path / "x.gguf")[0] == 0


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "", "-o", "x"],
        ["convert", "x", "-o", ""],
        ["prepare", "x", "-o", ""],
        ["requantize", "x", "", "--type", "f16"],
        ["inspect", ""],
        ["generate", ""],
        ["generate", "-d", ""],
    ],
)
def test_an_empty_name_is_usage(command, capsys):
    """What an unset variable of a shell leaves; no name would mean the default, or this folder."""
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "must be a name, got an empty text" in capsys.readouterr().err


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path, run):
    evil = {"general.name": Typed("string", "x"), "qwen35.nothing": Typed("string", "\x1b[2J")}
    write_gguf(tmp_path / "evil.gguf", "a\x1b]0;title\x07", evil, [])
    for command in (["inspect", tmp_path / "evil.gguf"], ["convert", tmp_path / "evil.gguf", "-o",
                    tmp_path / "x"]):  # fmt: skip
        status, out, err = run(*command)
        assert status == 1
        assert "\x1b" not in out + err
        assert "\\x1b" in out + err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_from_outside_leaves_nothing_behind(tmp_path, number):
    """As a job's time limit or Ctrl-C does, in the middle of writing."""
    code = (
        "import sys, time\nfrom torch_dflash.gguf import writer\nwhole = writer.pieces_of\n"
        "def slowly(tensor):\n"
        "    for piece in whole(tensor):\n        time.sleep(0.2)\n        yield piece\n"
        "writer.pieces_of = slowly\nfrom torch_dflash.cli.main import main\nsys.exit(main())"
    )
    command = [sys.executable, "-c", code, "requantize", TARGET, tmp_path / "x.gguf"]
    process = subprocess.Popen([*command, "--type", "f16"], stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not [*tmp_path.iterdir()] and time.monotonic() < until:
            time.sleep(0.05)
        [temporary] = tmp_path.iterdir()
        assert temporary.name.startswith(".x.gguf.")
        os.kill(process.pid, number)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert error == ("torch-dflash: interrupted\n" if number == signal.SIGINT else "")
    assert not [*tmp_path.iterdir()]
