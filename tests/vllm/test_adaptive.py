"""Adaptive speculation in a real engine: lengths change at every step, tokens never."""

import json
import re
import urllib.request

import engines
import pytest
from server import serve

from torch_dflash import Session, load_target
from torch_dflash.gguf import GGUFFile, tokenizer_from_gguf
from torch_dflash.load import ASSETS

PROMPTS = ["def quicksort(xs):\n", "class Node:\n", "for i in range(10):\n    print("]
LENGTH = 160
JOBS = [{"prompts": [p], "max_tokens": LENGTH, "ignore_eos": True} for p in PROMPTS]
JOBS.append({"prompts": PROMPTS, "max_tokens": LENGTH, "ignore_eos": True})


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    target = load_target()
    with GGUFFile.open(ASSETS / "target.gguf") as file:
        tokenizer = tokenizer_from_gguf(file)
    return [Session(target).generate(tokenizer.encode(p), LENGTH).tokens for p in PROMPTS]


def run(target, tmp_path_factory, disable="", **engine):
    return engines.run(
        "adaptive_jobs:rows",
        env={
            "TORCH_DFLASH_CACHE": str(tmp_path_factory.getbasetemp() / "drafters"),
            "TORCH_DFLASH_DISABLE": disable,
        },
        engine={
            "model": target,
            "speculative_config": {"method": "dflash", "model": str(ASSETS / "dspark.gguf")},
            **engine,
        },
        jobs=JOBS,
    )


def test_lengths_change_tokens_do_not(target, tmp_path_factory, plain):
    ran = run(target, tmp_path_factory)
    out = ran.value
    assert out["tokens"] == [*([t] for t in plain), plain]
    assert out["scheduler"] == "AdaptiveSyncScheduler"
    assert "adaptive speculation chooses among 0, 1, 2, 4, 7 draft tokens" in ran.log
    rows = {int(n): count for n, count in out["rows"].items()}
    # every length that is timed, for one request and for three
    assert all(rows[n] >= 8 for n in (0, 1, 4, 7)), rows
    metrics = out["metrics"]
    assert (
        sum(n * count for n, count in rows.items()) == metrics["vllm:spec_decode_num_draft_tokens"]
    )
    assert sum(rows.values()) - rows[0] == metrics["vllm:spec_decode_num_drafts"]
    emitted = 6 * LENGTH
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    # a row emits its accepted tokens and one more, a prompt its first token; the last row of each
    # request may hold up to 7 that nobody wanted, and plain rows wait for drafts to be counted
    assert emitted - 6 - 40 <= sum(rows.values()) + accepted <= emitted - 6 + 6 * 7


def test_one_switch_turns_it_off(target, tmp_path_factory, plain):
    ran = run(target, tmp_path_factory, disable="adaptive")
    assert ran.value["tokens"][-1] == plain
    assert ran.value["scheduler"] == "Scheduler"
    assert "adaptive speculation" not in ran.log.replace("off: adaptive", "")


def test_the_scheduler_by_name_without_what_it_needs_is_refused(target, tmp_path_factory):
    name = "torch_dflash_vllm.scheduler.AdaptiveScheduler"
    with pytest.raises(AssertionError, match="feature adaptive is not on: TORCH_DFLASH_DISABLE"):
        run(target, tmp_path_factory, disable="adaptive", scheduler_cls=name)


def test_a_server_of_two_gguf_files_shows_its_decisions(tmp_path_factory, plain):
    folder = tmp_path_factory.mktemp("serve")
    spec = {"method": "dflash", "model": str(ASSETS / "dflash2.gguf")}
    options = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    options += ["--enforce-eager", "--served-model-name", "tiny"]
    options += ["--speculative-config", json.dumps(spec)]
    env = {"TORCH_DFLASH_CACHE": str(folder / "cache")}
    with serve(folder, ASSETS / "target.gguf", *options, env=env) as server:
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": LENGTH, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            server.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            [choice] = json.load(answer)["choices"]
        assert choice["token_ids"] == plain[0]
        found = re.findall(
            r'^vllm:spec_decode_rows_total\{.*draft_tokens="(\d)".*\} (\S+)$',
            server.get("/metrics"),
            re.M,
        )
    rows = {int(n): float(count) for n, count in found}
    assert sorted(rows) == [*range(8)]
    assert all(rows[n] >= 4 for n in (0, 1, 4, 7)), rows
    assert rows[3] == rows[5] == rows[6] == 0
