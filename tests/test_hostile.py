"""Hostile use of the public API: one clear error, or the same tokens; never a quiet wrong one."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.sampling import GREEDY, SamplingParams
from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import GGUFError
from torch_dflash.load import load_drafter, load_target
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

KINDS = ("dflash", "dflash2", "dspark")
PROMPT = [5, 17, 300, 2]
SHAPE = {"num_target_layers": 3, "target_layer_ids": (0, 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    tiny_hybrid(folder / "target.gguf", seed=1, layers=3)
    for kind in KINDS:
        tiny_drafter(folder / kind, kind, **SHAPE)
    return folder


@pytest.fixture(params=["journal", "snapshots"])
def target(request, folder):
    return load_target(folder / "target.gguf", state=request.param)


def resident():
    """Bytes of memory in use now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestTarget:
    def test_too_many_rows(self, target):
        target.prefill(torch.tensor(PROMPT))
        with pytest.raises(ValueError, match=r"verify: tokens must be \[1..32\], got \[33\]"):
            target.verify(torch.zeros(33, dtype=torch.int64))
        for wrong in (torch.zeros(0, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)):
            with pytest.raises(ValueError, match="verify: tokens must be"):
                target.verify(wrong)
        assert target.verify(torch.zeros(32, dtype=torch.int64)).logits.shape == (32, 512)

    def test_commit_needs_a_verification(self, target):
        with pytest.raises(ValueError, match=r"commit: rows must be 1..0 \(verified\), got 1"):
            target.commit(1)
        target.prefill(torch.tensor(PROMPT))
        target.verify(torch.tensor([1, 2, 3]))
        for rows in (0, 4, -1):
            with pytest.raises(ValueError, match=rf"commit: rows must be 1..3 .*, got {rows}"):
                target.commit(rows)
        target.commit(3)
        with pytest.raises(ValueError, match=r"commit: rows must be 1\.\.0"):
            target.commit(1)

    def test_two_verifications_in_a_row(self, target):
        """A journal would be replayed twice, a snapshot overwritten."""
        target.prefill(torch.tensor(PROMPT))
        want = target.verify(torch.tensor([1, 2])).logits
        with pytest.raises(ValueError, match="verify: the last verification of 2 rows must be co"):
            target.verify(torch.tensor([1, 2]))
        with pytest.raises(ValueError, match="prefill: the last verification of 2 rows must be"):
            target.prefill(torch.tensor([1, 2]))
        target.reset()
        target.prefill(torch.tensor(PROMPT))
        assert torch.equal(target.verify(torch.tensor([1, 2])).logits, want)

    @pytest.mark.parametrize("ids", [[2], [0, 5], [-1]])
    def test_capture_ids(self, target, ids):
        with pytest.raises(ValueError, match=r"target_layer_ids must be in 0..1 for a target of 3"):
            target.capture(ids)

    @pytest.mark.parametrize("token", [-1, 512, 2**40])
    def test_tokens_out_of_range(self, target, token):
        with pytest.raises(RuntimeError, match="embed_rows: ids"):
            target.verify(torch.tensor([token]))
        target.reset()
        with pytest.raises(RuntimeError, match="embed_rows: ids"):
            target.prefill(torch.tensor([3, token]))
        target.reset()
        assert target.prefill(torch.tensor(PROMPT)).shape == (1, 512)
        assert target.verify(torch.tensor([1])).logits.shape == (1, 512)

    @pytest.mark.parametrize(
        "changes, text",
        [
            ({"state": "copies"}, "state must be one of journal, snapshots, got copies"),
            ({"kv_dtype": torch.int8}, "kv_dtype must be one of"),
            ({"state_dtype": torch.float16}, "state_dtype must be one of"),
        ],
    )
    def test_options(self, folder, changes, text):
        with pytest.raises(ValueError, match=text):
            load_target(folder / "target.gguf", **changes)


class TestDrafters:
    @pytest.mark.parametrize("kind", KINDS)
    def test_draft_tokens_out_of_range(self, folder, kind):
        drafter = load_drafter(folder / kind, load_target(folder / "target.gguf"))
        most = drafter.config.max_draft_tokens
        for count in (0, most + 1, -1):
            with pytest.raises(ValueError, match=rf"draft_tokens must be 1..{most} for this dr"):
                drafter.propose(torch.tensor([1]), count, GREEDY)

    @pytest.mark.parametrize("kind", KINDS)
    def test_target_hidden_of_another_width(self, folder, kind):
        drafter = load_drafter(folder / kind, load_target(folder / "target.gguf"))
        with pytest.raises(
            RuntimeError, match=r"float32 x must be \[rows, 512\] .*, got shape \[3, 256\]"
        ):
            drafter.commit(torch.zeros(3, 256))
        assert drafter.length == 0

    @pytest.mark.parametrize(
        "changes, text",
        [
            ({"vocab": 600}, "vocabulary 600, target has 512"),
            ({"hidden": 512}, "hidden size 512, target has 256"),
            ({"num_target_layers": 6}, "num_target_layers must be that of the target, got 6"),
            ({"target_layer_ids": (0, 2)}, "target_layer_ids must be below 2"),
            ({"vocab": 512, "dflash_config": {"mask_token_id": 512, "target_layer_ids": [0, 1]}},
             "mask_token_id"),
        ],
    )  # fmt: skip
    def test_of_another_target(self, folder, tmp_path, changes, text):
        target = load_target(folder / "target.gguf")
        wrong = tiny_drafter(tmp_path / "wrong", "dflash", **(SHAPE | changes))
        with pytest.raises(CheckpointError, match=text):
            load_drafter(wrong, target)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("name", ["hidden_norm.weight", "layers.1.mlp.up_proj.weight"])
    def test_weights_that_are_no_numbers(self, folder, tmp_path, name, value):
        target = load_target(folder / "target.gguf")
        broken = tiny_drafter(tmp_path / "nan", "dflash", **SHAPE)
        tensors = load_file(broken / "model.safetensors")
        tensors[name].view(-1)[3] = value
        save_file(tensors, broken / "model.safetensors")
        with pytest.raises((CheckpointError, GGUFError), match=name):
            load_drafter(broken, target)

    def test_scales_that_are_no_numbers(self, folder, tmp_path):
        from torch_dflash.gguf import GGUFFile

        path = tmp_path / "nan.gguf"
        content = bytearray((folder / "target.gguf").read_bytes())
        with GGUFFile.open(folder / "target.gguf") as file:
            packed = bytes(file.tensor("blk.1.ffn_down.weight").packed[7].numpy())
        at = content.index(packed)
        content[at + 34 : at + 36] = b"\x00\x7e"  # the half scale of the second quant: NaN
        path.write_bytes(content)
        with pytest.raises(GGUFError, match=r"blk.1.ffn_down.weight.*(nan|NaN|finite)"):
            load_target(path)

    def test_row_20_failed_loads_leave_nothing(self, folder, tmp_path):
        """40 loads that fail at the end: neither open files nor memory add up."""
        target = load_target(folder / "target.gguf")
        content = (folder / "target.gguf").read_bytes()
        (tmp_path / "cut.gguf").write_bytes(content[:-100])
        wrong = tiny_drafter(tmp_path / "wrong", "dflash2", vocab=600, **SHAPE)

        def fail():
            with pytest.raises(GGUFError):
                load_target(tmp_path / "cut.gguf")
            with pytest.raises(CheckpointError):
                load_drafter(wrong, target)

        for _ in range(3):
            fail()
        gc.collect()
        files = len(os.listdir("/proc/self/fd"))
        memory = resident()
        for _ in range(40):
            fail()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == files
        # each file is about 2 MB; 40 of each would be 160 MB
        assert resident() - memory < 20 * 2**20


CHILD = """
import json, sys, torch
from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.sampling import GREEDY
from torch_dflash.load import load_drafter, load_target
folder, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)
target = load_target(folder + "/target.gguf")
out = [Session(target).generate([5, 17, 300, 2], 24).tokens]
for kind in ("dflash", "dflash2", "dspark"):
    drafter = load_drafter(f"{folder}/{kind}", target)
    session = Session(target, drafter)
    out.append(session.generate([5, 17, 300, 2], 24).tokens)
    session._flush()
    out.append(drafter.propose(torch.tensor([9]), 6, GREEDY).tokens[0].tolist())
print(json.dumps(out))
"""


def test_threads_and_instruction_sets_give_the_same_tokens(folder):
    """Also of the drafts themselves, which the loop would hide."""

    def run(threads, isa=None):
        env = {k: v for k, v in os.environ.items() if k != "DFLASH_ISA"}
        env |= {"DFLASH_ISA": isa} if isa else {}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), str(threads)],
            capture_output=True, text=True, env=env, check=True,
        )  # fmt: skip
        return done.stdout

    first = run(1)
    assert first.count("[") == 8
    assert run(2) == first
    assert run(2, "avx2") == first


def test_sampling_params_are_frozen():
    with pytest.raises(AttributeError):
        GREEDY.temperature = 1.0
    assert SamplingParams() == GREEDY


def test_one_drafter_cannot_serve_two_sessions(folder):
    target, other = load_target(folder / "target.gguf"), load_target(folder / "target.gguf")
    drafter = load_drafter(folder / "dflash", target)
    running = Session(target, drafter).stream(PROMPT, 20)
    next(running)
    Session(other, drafter).generate(PROMPT, 3)
    with pytest.raises(RuntimeError, match="used by another session or stream in the meantime"):
        next(running)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_two_streams_of_one_session(folder, kind):
    """The second takes the state; the first may not go on with it, the second may."""
    target = load_target(folder / "target.gguf")
    other = [9, 8, 7]
    want = Session(target).generate(other, 20).tokens
    session = Session(target, load_drafter(folder / kind, target) if kind else None)
    first = session.stream(PROMPT, 20)
    next(first)
    second = session.stream(other, 20)
    got = list(next(second).tokens)
    with pytest.raises(RuntimeError, match="used by another session or stream in the meantime"):
        next(first)
    assert got + [t for step in second for t in step.tokens] == want


def test_a_stream_that_extends_ends_the_one_before(folder):
    target = load_target(folder / "target.gguf")
    session = Session(target)
    first = session.stream(PROMPT, 20)
    known = [t for _ in range(5) for t in next(first).tokens]
    want = Session(load_target(folder / "target.gguf")).generate([*PROMPT, *known, 3], 9).tokens
    assert session.generate([*PROMPT, *known, 3], 9).tokens == want
    with pytest.raises(RuntimeError, match="used by another session or stream in the meantime"):
        next(first)


def test_threads_on_one_target_fail_cleanly_or_are_right(folder):
    """Whoever is not told that the target was taken has exactly the tokens of plain decoding."""
    target = load_target(folder / "target.gguf")
    prompts = (PROMPT, [9, 8, 7])
    want = [Session(target).generate(p, 12).tokens for p in prompts]
    wrong, other = [], []

    def work(which):
        for _ in range(12):
            try:
                for n, step in enumerate(Session(target).stream(prompts[which], 12)):
                    if step.tokens != want[which][n : n + 1]:
                        wrong.append((which, n))
            except RuntimeError as error:
                if "used by another session or stream" not in str(error):
                    other.append(str(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not other


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_has_a_state_of_its_own(folder, copy_of):
    """Made after passes were recorded, used in turn with the original."""
    target = load_target(folder / "target.gguf")
    drafter = load_drafter(folder / "dflash2", target)
    prompts = (PROMPT, [9, 8, 7])
    want = [Session(target, drafter).generate(p, 20) for p in prompts]
    pairs = [(target, drafter), (copy_of(target), copy_of(drafter))]
    streams = [Session(*pair).stream(p, 20) for pair, p in zip(pairs, prompts, strict=True)]
    seen = [([], []), ([], [])]
    for _ in range(20):
        for stream, (tokens, accepted) in zip(streams, seen, strict=True):
            step = next(stream, None)
            if step is not None:
                tokens += step.tokens
                accepted.append(step.accepted)
    for (tokens, accepted), plain in zip(seen, want, strict=True):
        assert tokens == plain.tokens
        assert sum(accepted) == plain.stats.accepted  # the drafter's state is right as well


@pytest.fixture(params=["float64", "bfloat16", "meta", "inference"])
def surroundings(request):
    """What other libraries leave switched on while models are loaded and run."""
    if request.param == "meta":
        context = torch.device("meta")
    elif request.param == "inference":
        context = torch.inference_mode()
    else:
        context = nullcontext()
        torch.set_default_dtype(getattr(torch, request.param))
    try:
        yield context
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_of_torch_change_nothing(folder, kind, surroundings):
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=3)

    def run():
        target = load_target(folder / "target.gguf")
        drafter = load_drafter(folder / kind, target)
        out = [Session(target, drafter).generate(PROMPT, 20, s) for s in (GREEDY, sampling)]
        return target, [(g.tokens, g.stats.accepted) for g in out]

    with surroundings:
        target, got = run()
    torch.set_default_dtype(torch.float32)
    assert got == run()[1]
    target.reset()  # outside of the mode it was loaded in
    target.prefill(torch.tensor(PROMPT))
    for _ in range(2):
        target.verify(torch.tensor([1, 2]))
        target.commit(2)
    assert target.length == len(PROMPT) + 4
