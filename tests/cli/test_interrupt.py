"""Ctrl-C while ``generate`` runs: the text so far, one line, status 130."""

import signal
import subprocess
import sys
import time

import pytest

from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupt")
    tiny_hybrid(folder / "target.gguf", seed=1, layers=3)
    tiny_drafter(folder / "drafter", "dflash", num_target_layers=3, target_layer_ids=(0, 1))
    return folder


@pytest.mark.parametrize("drafter", ["none", "drafter"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_text_so_far_is_there(files, drafter, number):
    command = [sys.executable, "-m", "torch_dflash", "generate", str(files / "target.gguf")]
    command += ["-p", "hello", "-n", "4000", "--ignore-eos"]
    if drafter != "none":
        command += ["-d", str(files / drafter)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        begun = process.stdout.read(20)  # it streams; a pipe is no reason to hold text back
        process.send_signal(number)
        sent = time.monotonic()
        rest, error = process.communicate(timeout=60)
        assert time.monotonic() - sent < 30
    finally:
        process.kill()
    assert process.returncode == 128 + number
    lines = [
        x for x in error.decode().splitlines() if "goes beyond" not in x and "go beyond" not in x
    ]
    assert lines == (["torch-dflash: interrupted"] if number == signal.SIGINT else [])
    (begun + rest).decode()  # no character is cut


def test_before_anything_was_printed():
    code = (
        "import os, signal, sys, torch_dflash.load as load\n"
        "load.load_target = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
        "from torch_dflash.cli.main import main\n"
        "sys.exit(main(['generate', 'target.gguf', '-p', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "torch-dflash: interrupted\n"
