"""Runs a command that must fail: with one line, and without a trace on the disk."""

from torch_dflash.cli.main import main


def refused(capsys, tmp_path, *argv):
    """Run a command that must fail with one line and leave nothing; the line."""
    before = sorted(p for p in tmp_path.rglob("*"))
    status = main([str(a) for a in argv])
    out = capsys.readouterr()
    assert status == 1
    assert out.out == ""
    assert "exploited" not in out.err
    assert out.err.startswith("torch-dflash: error: ")
    assert out.err.count("\n") == 1, out.err
    assert len(out.err) < 600
    assert sorted(p for p in tmp_path.rglob("*")) == before
    return out.err
