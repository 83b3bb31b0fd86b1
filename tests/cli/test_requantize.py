"""``requantize``: the types asked for, all else to the last byte, and nothing where it fails."""

import resource
import subprocess
import sys

import pytest
import torch

import torch_dflash
from torch_dflash import load_target, requantize
from torch_dflash.cli.main import main
from torch_dflash.gguf import (
    GGUFError,
    GGUFFile,
    QuantTensor,
    Typed,
    typed_metadata,
    write_gguf,
)
from torch_dflash.load import ASSETS
from torch_dflash.testing.compare import nmse
from torch_dflash.testing.samples.quant import gguf_quantize

TARGET = ASSETS / "target.gguf"


def types(path):
    with GGUFFile.open(path) as file:
        return {n: file.tensor(n, check=False).type_name for n in file.tensors}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The embedded target as F32, with an alignment of its own and a tensor it does not know."""
    path = tmp_path_factory.mktemp("requantize") / "f32.gguf"
    with GGUFFile.open(TARGET) as file:
        tensors = [(n, QuantTensor.from_tensor(file.tensor(n).to_dense())) for n in file.tensors]
        ids = torch.arange(6, dtype=torch.int32).reshape(2, 3)
        tensors.append(("blk.0.table.weight", QuantTensor.from_tensor(ids)))
        metadata = typed_metadata(file) | {
            "general.file_type": Typed("uint32", 0),
            "x.array": Typed("array[int16]", [1, -2]),
        }
        write_gguf(path, file.architecture, metadata, tensors, alignment=128)
    return path


def test_types_metadata_alignment_and_order(dense, tmp_path):
    path = tmp_path / "q4_k.gguf"
    done = requantize(dense, path, "Q4_K")
    was, now = types(dense), types(path)
    assert done.types == {n: (was[n], now[n]) for n in was}
    assert list(now) == list(was)
    for name, kind in now.items():
        if was[name] == "I32" or name.endswith(("norm.weight", "ssm_a", "ssm_dt.bias")):
            assert kind == was[name], name
        elif any(part in name for part in ("conv1d", "ssm_alpha", "ssm_beta")):
            assert kind == "F32"
        elif name.endswith(("token_embd.weight", "attn_k.weight", "attn_v.weight")):
            assert kind == "Q6_K", name
        else:
            assert kind == "Q4_K", name
    with GGUFFile.open(dense) as before, GGUFFile.open(path) as after:
        assert after.alignment == 128
        expected = typed_metadata(before) | {"general.file_type": Typed("uint32", 15)}
        expected.setdefault("general.quantization_version", Typed("uint32", 2))
        found = typed_metadata(after)
        assert [*found] == [*expected]
        for key, value in expected.items():
            assert found[key].type == value.type
            same = [*map(list, (found[key].value, value.value))] if "array" in value.type else None
            assert same[0] == same[1] if same else found[key].value == value.value, key
        for name in was:
            a, b = before.tensor(name), after.tensor(name)
            assert a.shape == b.shape
            if now[name] == was[name]:
                assert torch.equal(a.packed, b.packed)
            else:
                assert nmse(b.to_dense(), a.to_dense()) < 0.01


def test_q8_0_is_ggml_byte_for_byte(dense, tmp_path):
    requantize(dense, tmp_path / "x.gguf", "q8_0")
    with GGUFFile.open(dense) as before, GGUFFile.open(tmp_path / "x.gguf") as after:
        for name in ("token_embd.weight", "blk.2.attn_q.weight"):
            dense_rows = before.tensor(name).to_dense()
            assert torch.equal(after.tensor(name).packed, gguf_quantize(dense_rows, 8))


def test_what_has_fewer_bits_stays(tmp_path):
    done = requantize(TARGET, tmp_path / "x.gguf", "q5_k")
    was = types(TARGET)
    fewer = [n for n, t in was.items() if t in ("Q4_K", "IQ4_XS")]
    assert len(fewer) > 10
    assert all(done.types[n] == (was[n], was[n]) for n in fewer)
    assert f"kept as they were: {len(fewer)}" in done.notes[0]
    changed = sum(a != b for a, b in done.types.values())
    assert f"both roundings add up: {changed};" in done.notes[1]


def test_plain_types_decode(tmp_path):
    done = requantize(TARGET, tmp_path / "x.gguf", "f32")
    assert {b for _, b in done.types.values()} == {"F32"}
    assert done.notes == ()
    with GGUFFile.open(TARGET) as before, GGUFFile.open(tmp_path / "x.gguf") as after:
        for name in before.tensors:
            assert torch.equal(before.tensor(name).to_dense(), after.tensor(name).to_dense())


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_drafters_keep_what_acceptance_hangs_on(kind, tmp_path):
    source = tmp_path / "f32.gguf"
    requantize(ASSETS / f"{kind}.gguf", source, "f32")
    done = requantize(source, tmp_path / "x.gguf", "q4_k")
    now = {n: b for n, (_, b) in done.types.items()}
    assert now["fc.weight"] == now["blk.0.attn_k.weight"] == now["blk.1.attn_v.weight"] == "Q8_0"
    assert now["blk.0.ffn_up.weight"] == now["blk.1.attn_q.weight"] == "Q4_K"
    assert {now[n] for n in now if "norm" in n or "conv_base" in n} == {"F32"}
    rank = {"dflash": None, "dflash2": "selector_predecessor", "dspark": "markov_w1"}[kind]
    if rank:  # 64 values a row
        assert now[f"{rank}.weight"] == "Q8_0"
        assert f"no whole quants of Q4_K, stored as Q8_0: {rank}.weight" in done.notes[0]
    else:
        assert done.notes == ()
    target = load_target()
    drafter = torch_dflash.load_drafter(tmp_path / "x.gguf", target)
    assert drafter.config.kind == kind


def test_rules_and_fallback(dense, tmp_path):
    rules = [("blk.0.", "keep"), (r"ffn_(gate|up)\.", "iq4_xs"), ("token_embd", "f16")]
    done = requantize(dense, tmp_path / "x.gguf", "q6_k", tensor_types=rules)
    now = {n: b for n, (_, b) in done.types.items()}
    assert now["blk.0.ffn_up.weight"] == "F32"
    assert now["blk.1.ffn_up.weight"] == "IQ4_XS"
    assert now["blk.1.ffn_down.weight"] == "Q6_K"
    assert now["token_embd.weight"] == "F16"


def narrow(path, columns, value=1.0):
    rows = torch.full((3, columns), value)
    keys = {"general.name": Typed("string", "x")}
    write_gguf(path, "llama", keys, [("blk.0.ffn_up.weight", QuantTensor.from_tensor(rows))])


@pytest.mark.parametrize(
    "columns, fallback, kind",
    [(96, "q8_0", "Q8_0"), (96, "q4_0", "Q4_0"), (100, "q8_0", "F16"), (512, "q8_0", "Q5_K")],
)
def test_partial_quants(tmp_path, columns, fallback, kind):
    narrow(tmp_path / "in.gguf", columns)
    done = requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q5_k", fallback=fallback)
    assert done.types == {"blk.0.ffn_up.weight": ("F32", kind)}
    note = f"rows that are no whole quants of Q5_K, stored as {kind}: blk.0.ffn_up.weight"
    assert done.notes == (() if columns == 512 else (note,))


def test_greedy_text_survives(dense, tmp_path):
    """The same arg max on most of a text: a transposed or misplaced tensor leaves none."""
    requantize(TARGET, tmp_path / "x.gguf", "q8_0")
    ids = list(range(5, 69))

    def picks(path):
        target = load_target(path)
        session = torch_dflash.Session(target)
        return session.generate(ids, max_new_tokens=12).tokens

    assert picks(tmp_path / "x.gguf") == picks(None)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["{a}", "{a}", "--type", "q4_k"], "target.gguf: must be another file than the source"),
        (["{t}/no.gguf", "{t}/x.gguf", "--type", "q4_k"], "no such file"),
        (["{a}", "{t}/no/x.gguf", "--type", "q4_k"], "no: must be a folder to write x.gguf"),
        (
            ["{a}", "{t}/x.gguf", "--type", "q4_k", "--tensor-type", "atn_q=q8_0"],
            "tensor type 'atn_q' must match a tensor, got none of 80",
        ),
        (
            ["{a}", "{t}/x.gguf", "--type", "q4_k", "--tensor-type", "attn_norm=q8_0"],
            "'blk.0.attn_norm.weight' must be a matrix with rows of a multiple of 32 values for",
        ),
        (["{a}", "{t}/x.gguf", "--type", "q4_k", "--alignment", "3"], "alignment must be a power"),
        (
            ["{t}/nan.gguf", "{t}/x.gguf", "--type", "q4_k"],
            "'blk.0.ffn_up.weight' (F32) must have finite values, got NaN or infinity in row 0",
        ),
        (
            ["{t}/big.gguf", "{t}/x.gguf", "--type", "q4_k"],
            "x must be within +-2.06438e+06 for Q4_K, got 1e+08 in row 0",
        ),
        (["{t}/big.gguf", "{t}/x.gguf", "--type", "f16"], "values must be below 65520 for F16"),
    ],
)
def test_errors_are_one_line(argv, said, tmp_path, capsys):
    narrow(tmp_path / "nan.gguf", 256, float("nan"))
    narrow(tmp_path / "big.gguf", 256, 1e8)
    before = {*tmp_path.iterdir()}
    status = main(["requantize", *(a.format(a=TARGET, t=tmp_path) for a in argv)])
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert err.startswith("torch-dflash: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "rule, said",
    [
        ("attn_q", "must be REGEX=TYPE, got 'attn_q'"),
        ("=q8_0", "must be REGEX=TYPE, got '=q8_0'"),
        ("attn_q=q9", "TYPE must be one of f32, f16, bf16, q8_0, q6_k, q5_k, q4_k, iq4_xs, q4_0, "
         "keep, got 'q9'"),
        ("(=q8_0", "REGEX must be a regular expression, got '(': missing )"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_usage_and_names_the_flag(rule, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["requantize", "a", "b", "--type", "q4_k", "--tensor-type", rule])
    assert f"error: argument --tensor-type: {said}" in capsys.readouterr().err


def test_types_are_checked_in_python(tmp_path):
    rule = {"outtype": "q4_k", "tensor_types": [("a", "q2_k")]}
    for wrong in ({"outtype": "q2_k"}, {"outtype": "q4_k", "fallback": "q2_k"}, rule):
        with pytest.raises(GGUFError, match="must be one of f32, f16, bf16, q8_0"):
            requantize(TARGET, tmp_path / "x.gguf", **wrong)
    with pytest.raises(GGUFError, match=r"tensor type '\(' must be a regular expression, got "):
        requantize(TARGET, tmp_path / "x.gguf", "q4_k", tensor_types=[("(", "q8_0")])


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the disk."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_dflash", "requantize", TARGET, tmp_path / "x.gguf",
         "--type", "f16"],
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        f"torch-dflash: error: {tmp_path / 'x.gguf'}: file too large; "
        "name another disk, nothing was left on this one\n"
    )
    assert not [*tmp_path.iterdir()]


def test_progress_counts_every_byte(dense, tmp_path):
    seen = []
    requantize(dense, tmp_path / "x.gguf", "q4_k", progress=lambda *step: seen.append(step))
    done = [d for _, d, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][2]
    assert len({name for name, _, _ in seen}) == 81
