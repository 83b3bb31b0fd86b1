"""Every drafter in a real engine: the target's own tokens, drafts as good as the native ones."""

import dataclasses
import json

import engines
import pytest
from safetensors.torch import load_file

from torch_dflash import Session, load_drafter, load_target
from torch_dflash.gguf import GGUFFile, tokenizer_from_gguf
from torch_dflash.load import ASSETS
from torch_dflash.policies import FixedPolicy

KINDS = ("dflash", "dflash2", "dspark")
PROMPTS = [
    "def quicksort(xs):\n",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self",
    "for i in range(10):\n    print(",
    'def test_empty():\n    """',
    "    if not isinstance(value, (int, float)):\n        raise",
    "class Node:\n",
]
LENGTH = 96


@dataclasses.dataclass
class Native:
    """What the native runner does with the prompts: tokens, and per drafter (drafts, accepted)."""

    tokens: list[list[int]]
    counts: dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def native() -> Native:
    target = load_target()
    with GGUFFile.open(ASSETS / "target.gguf") as file:
        tokenizer = tokenizer_from_gguf(file)
    tokens: list[list[int]] = []
    counts = {}
    for kind in KINDS:
        drafts = accepted = 0
        tokens.clear()
        for prompt in PROMPTS:
            session = Session(target, load_drafter(kind, target), policy=FixedPolicy())
            out: list[int] = []
            # a limit further away: vLLM drafts whole blocks up to its own
            for step in session.stream(tokenizer.encode(prompt), max_new_tokens=LENGTH + 16):
                if len(out) >= LENGTH:
                    break
                out += step.tokens
                drafts += step.offered > 0
                accepted += step.accepted
            tokens.append(out[:LENGTH])
        counts[kind] = (drafts, accepted)
    return Native(tokens, counts)


def speculative(target, tmp_path_factory, kind, model=None, prompts=PROMPTS, **spec):
    return engines.run(
        "generate:generate",
        env={
            "TORCH_DFLASH_CACHE": str(tmp_path_factory.getbasetemp() / "drafters"),
            "TORCH_DFLASH_DISABLE": "adaptive",
        },
        engine={
            "model": target,
            "speculative_config": {
                "method": "dflash",
                "model": str(model or ASSETS / f"{kind}.gguf"),
                **spec,
            },
        },
        jobs=[{"prompts": prompts, "max_tokens": LENGTH}],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_target_s_and_drafts_as_good_as_native_ones(
    target, tmp_path_factory, native, kind
):
    ran = speculative(target, tmp_path_factory, kind)
    [results] = ran.value["jobs"]
    assert [r["tokens"] for r in results] == native.tokens
    metrics = ran.value["metrics"]
    drafts = metrics["vllm:spec_decode_num_drafts"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    # The same float32 values up to rounding, so the same drafts but where two tokens tie: 1 in 50.
    assert (drafts, accepted) == pytest.approx(native.counts[kind], rel=0.02)


def test_a_folder_with_its_weights_in_place_beside_fewer_tokens(
    target, tmp_path_factory, native, tmp_path
):
    from torch_dflash.drafters.checkpoint import read_checkpoint
    from torch_dflash.drafters.to_hf import write_folder

    checkpoint = read_checkpoint(ASSETS / "dflash2.gguf")
    write_folder(tmp_path / "d", checkpoint, num_target_layers=6)
    assert load_file(tmp_path / "d/model.safetensors")
    ran = speculative(target, tmp_path_factory, "dflash2", tmp_path / "d", num_speculative_tokens=3)
    assert [r["tokens"] for r in ran.value["jobs"][0]] == native.tokens
    metrics = ran.value["metrics"]
    drafts = metrics["vllm:spec_decode_num_drafts"]
    assert metrics["vllm:spec_decode_num_draft_tokens"] <= 3 * drafts
    # three of the tokens that a whole block gets right one after the other
    assert metrics["vllm:spec_decode_num_accepted_tokens"] / drafts > 1.5


def test_two_ranks_draft_and_say_the_same(target, tmp_path_factory, native):
    kind = "dflash2"  # its candidates are the best of both ranks' parts of the vocabulary
    ran = engines.run(
        "generate:generate",
        env={
            "TORCH_DFLASH_CACHE": str(tmp_path_factory.getbasetemp() / "drafters"),
            "TORCH_DFLASH_DISABLE": "adaptive",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        },
        engine={
            "model": target,
            "tensor_parallel_size": 2,
            "speculative_config": {"method": "dflash", "model": str(ASSETS / f"{kind}.gguf")},
        },
        jobs=[{"prompts": PROMPTS, "max_tokens": LENGTH, "logprobs": 2}],
    )
    for result, want in zip(ran.value["jobs"][0], native.tokens, strict=True):
        pairs = enumerate(zip(result["tokens"], want, strict=True))
        first = next((i for i, (a, b) in pairs if a != b), None)
        # Sums over ranks are rounded elsewhere: 1e-4 is 100 units in the last place of a logit.
        assert first is None or result["margins"][first] < 1e-4
    metrics = ran.value["metrics"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    drafts = metrics["vllm:spec_decode_num_drafts"]
    assert accepted / drafts == pytest.approx(
        native.counts[kind][1] / native.counts[kind][0], rel=0.1
    )


def test_a_drafter_of_another_target_never_starts(target, tmp_path_factory, tmp_path):
    from torch_dflash.testing.tiny import tiny_drafter

    other = tiny_drafter(tmp_path / "other", "dflash2")
    with pytest.raises(AssertionError) as failed:
        speculative(target, tmp_path_factory, "dflash2", other)
    assert "the drafter must match the target, got hidden size 256, target has 512" in str(
        failed.value
    )
    assert "use the drafter that was trained for this target" in str(failed.value)
    assert json.dumps("EngineCore") not in str(failed.value)
