"""``torch-dflash doctor``: facts that hold on every machine, in both forms."""

import json

import torch

import torch_dflash
from torch_dflash.cli.doctor import report
from torch_dflash.cli.main import main


def test_report():
    facts = report()
    assert facts["torch-dflash"] == torch_dflash.__version__
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert "_C" in facts["libraries"]
    have, _, all_of_them, _ = facts["backends"]["cpu"].split()
    assert have == all_of_them
    assert int(have) >= 24
    assert facts["instruction set"] in ("avx2", "avx512")


def test_the_instruction_set_that_was_asked_for(monkeypatch):
    monkeypatch.setenv("DFLASH_ISA", "avx2")
    assert report()["instruction set"] == "avx2"
    monkeypatch.setenv("DFLASH_ISA", "sse")
    expected = "none: DFLASH_ISA must be avx2 or avx512, got sse"
    assert report()["instruction set"] == expected


def test_printed_and_json(capsys):
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report()))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch            {torch.__version__}\n" in out
