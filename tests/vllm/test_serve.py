"""`vllm serve target.gguf` with DSpark: a stream to an OpenAI client, acceptance in the metrics."""

import json
import re

import pytest
from openai import OpenAI
from reference import TEXTS, native, tokenizer
from server import serve


@pytest.fixture(scope="module")
def server(tmp_path_factory, gguf):
    engine, env = gguf("dspark")
    options = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"]
    options += ["--enforce-eager", "--served-model-name", "tiny"]
    options += ["--speculative-config", json.dumps(engine["speculative_config"])]
    folder = tmp_path_factory.mktemp("serve")
    with serve(folder, engine["model"], *options, env=env) as running:
        yield running


def expected(text, count=64):
    return tokenizer().decode(native(tokenizer().encode(text), count))


def test_streams_the_native_runners_text(server):
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    stream = client.completions.create(
        model="tiny", prompt=TEXTS[0], max_tokens=64, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    assert len(pieces) > 5
    assert "".join(pieces) == expected(TEXTS[0])


def test_answers_at_once_and_with_sampling(server):
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    answer = client.completions.create(
        model="tiny", prompt=TEXTS[1], max_tokens=64, temperature=0.7, top_p=0.9, n=2,
        extra_body={"top_k": 1},
    )  # fmt: skip
    assert [c.text for c in answer.choices] == [expected(TEXTS[1])] * 2


def test_metrics_show_acceptance(server):
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    client.completions.create(model="tiny", prompt=TEXTS[2], max_tokens=32, temperature=0)
    metrics = server.get("/metrics")
    found = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_total\{[^}]*\} (\S+)$", metrics, re.M))
    accepted, drafted = float(found["accepted_tokens"]), float(found["draft_tokens"])
    assert 0 < accepted < drafted
    per_position = re.findall(
        r'accepted_tokens_per_pos_total\{.*position="(\d)".*\} (\S+)', metrics
    )
    assert sum(float(v) for _, v in per_position) == accepted
    assert len(per_position) == 7


def test_says_once_what_the_plugin_did(server):
    assert server.log().count("torch-dflash on vLLM 0.32") == 1
