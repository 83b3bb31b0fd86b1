"""The command as a whole, on the CPU with tiny shapes."""

import json
import subprocess

import pytest
import torch

from benchmarks import run
from benchmarks.cases import matmul
from benchmarks.record import KEYS
from torch_dflash import ops

SMALL = ["--device", "cpu", "--rows", "1", "2", "--repeats", "1", "--types", "Q4_K", "IQ2_XXS"]


@pytest.fixture
def checked(monkeypatch):
    """tools/gpu_check.py as it would end."""
    answer = {"exit": 0, "stages": {"equality": {"exit": 0, "seconds": 1.0, "result": {}}}}

    def fake(command, **_):
        if "tools/gpu_check.py" in command:
            assert command[command.index("--only") + 1] == run.CHECKS
            out = command[command.index("--out") + 1]
            with open(out, "w") as file:
                json.dump({"stages": answer["stages"]}, file)
            return subprocess.CompletedProcess(command, answer["exit"], "what it printed")
        return subprocess.CompletedProcess(command, 0, "abc")

    monkeypatch.setattr(run.subprocess, "run", fake)
    return answer


def test_a_run_writes_figures_with_their_origin(tmp_path, checked, capsys):
    out = tmp_path / "out.json"
    assert run.main([*SMALL, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["failed"] == {}
    assert result["left_out"] == []
    assert result["checks"] == {"equality": {"exit": 0, "seconds": 1.0}}
    assert result["environment"]["torch"] == torch.__version__
    assert result["commit"]
    assert result["protocol"]["read_gbps"] > 0
    for record in result["records"]:
        assert set(KEYS) <= set(record)
        assert record["us"] > 0
        assert record["spread"][0] <= record["us"] <= record["spread"][1]
    ops_ = {r["op"] for r in result["records"]}
    assert ops_ == {
        "read", "copy", "step", "gdn_step", "gdn_journal_step", "ssm_conv_step", "add_rms_norm",
        "quant_act", "block_attention", "head_topk", "qmm", "qmm_glu",
    }  # fmt: skip
    products = [r for r in result["records"] if r["op"] == "qmm"]
    assert len(products) == 3 * 2 * 2
    for r in products:
        rows, columns = map(int, r["case"].split()[1].split("x"))
        ours, theirs = r["nbytes"] / r["us"], 2 * rows * columns / r["stream"]["us"]
        assert r["stream_ratio"] == pytest.approx(ours / theirs, rel=0.01, abs=1e-4)
        assert set(r["peers"]) == {"vLLM", "llama.cpp", "fla-core"}
        assert all("absent" in p for p in r["peers"].values())
    step = next(r for r in result["records"] if r["op"] == "step")
    assert step["floor_us"] == pytest.approx(step["us"] * step["stream_ratio"], rel=0.05)
    last = capsys.readouterr().out.strip().splitlines()
    assert last[-len(result["records"]) - 1].startswith("operator, case")


@pytest.mark.parametrize(
    "change",
    [
        {"exit": 1},
        {"stages": {}},
        {"stages": {"equality": {"exit": 0, "seconds": 1.0,
                                 "result": {"qmm": {"samples": 3, "equal": 2}}}}},
        {"stages": {"rows": {"exit": 0, "seconds": 1.0, "result": {"gdn": {"equal": False}}}}},
    ],
)  # fmt: skip
def test_no_numbers_where_a_check_fails(tmp_path, checked, change):
    checked.update(change)
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="no numbers"):
        run.main([*SMALL, "--out", str(out)])
    assert not out.exists()


def test_a_profile_names_what_a_step_runs(tmp_path):
    out = tmp_path / "out.json"
    run.main([*SMALL, "--unchecked", "--families", "steps", "--profile", "--out", str(out)])
    result = json.loads(out.read_text())
    cases = [s["case"] for s in result["records"]]
    assert list(result["kernels"]) == [c for c in cases if "Python" not in c]
    for found in result["kernels"].values():
        assert any("qmm" in k["kernel"] for k in found)
        times = [k["us"] for k in found]
        assert times == sorted(times, reverse=True)


def test_unchecked_figures_say_so(tmp_path, capsys):
    out = tmp_path / "out.json"
    run.main([*SMALL, "--unchecked", "--families", "norm", "--out", str(out)])
    assert json.loads(out.read_text())["checks"] == "skipped"
    assert "not checked first" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["value", "row"])
def test_a_product_that_is_wrong_has_no_figure(tmp_path, monkeypatch, wrong):
    def qmm(x, weight, types, rows, columns, bias=None):
        y = ops.qmm(x, weight, types, rows, columns, bias)
        if wrong == "value":
            return y * 1.001  # NMSE 1e-6
        return y + 1e-6 if x.shape[0] == 1 else y  # other bits alone than among others

    monkeypatch.setattr(matmul, "ops", type("Ops", (), {**vars(ops), "qmm": staticmethod(qmm)}))
    out = tmp_path / "out.json"
    assert run.main([*SMALL, "--unchecked", "--families", "qmm", "--out", str(out)]) == 1
    result = json.loads(out.read_text())
    assert result["records"] == []
    assert set(result["failed"]) == {
        f"qmm {name} {kind}" for name in ("gate+up", "down", "qkv") for kind in ("Q4_K", "IQ2_XXS")
    }
    assert all(reason.startswith("Wrong: ") for reason in result["failed"].values())


def test_a_picture(tmp_path, checked):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "out.png"
    run.main([*SMALL, "--families", "norm", "qmm", "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
