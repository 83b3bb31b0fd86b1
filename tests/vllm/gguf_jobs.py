"""What a child process does with GGUF targets: engines beside the native runner, refusals."""

from typing import Any

from generate import build, counters, sample

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def native(path: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens of the native runner."""
    from torch_dflash import Session, load_target

    target = load_target(path)
    return [Session(target).generate(p, tokens).tokens for p in prompts]


def beside_native(
    engines: list[dict[str, Any]], prompts: list[list[int]], tokens: int
) -> list[dict[str, Any]]:
    """Greedy tokens of one engine after the other, and the native runner's on the same file.

    Args:
        engines: arguments of ``LLM``, ``model`` a GGUF file.
        prompts: token ids.
        tokens: per prompt.

    Returns:
        per engine: ``engine`` and ``native``, and how many draft tokens were ``accepted``.
    """
    out = []
    for engine in engines:
        llm = build(engine)
        before = counters(llm).get(ACCEPTED, 0)
        got = sample(llm, prompts, max_tokens=tokens, ignore_eos=True, logprobs=2)
        out.append(
            {
                "engine": got,
                "native": native(engine["model"], prompts, tokens),
                "accepted": counters(llm).get(ACCEPTED, 0) - before,
            }
        )
        del llm
    return out


def words(engine: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """What an engine makes of text: ids, chat, end tokens; and the file's own tokenizer of it."""
    from vllm import SamplingParams

    from torch_dflash.gguf import GGUFFile, tokenizer_from_gguf

    llm = build(engine)
    results = llm.generate(texts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    with GGUFFile.open(engine["model"]) as file:
        own = tokenizer_from_gguf(file)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    [chat] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    prompt = own.apply_chat_template(messages)
    model = llm.llm_engine.model_config
    params = SamplingParams()  # as vLLM completes every request's
    ends = model.try_get_generation_config()
    params.update_from_generation_config(ends, llm.get_tokenizer().eos_token_id)
    return {
        "ids": [list(r.prompt_token_ids) for r in results],
        "own": [own.encode(t) for t in texts],
        "texts": [r.outputs[0].text for r in results],
        "decoded": [own.decode(r.outputs[0].token_ids) for r in results],
        "chat": list(chat.prompt_token_ids),
        "own_chat": own.encode(prompt, add_special=False),
        "ends": sorted(params.all_stop_token_ids),
        "own_ends": sorted(own.eos_ids),
        "served": model.served_model_name,
        "dtype": str(model.dtype),
    }


def refusals(cases: list[dict[str, Any]]) -> list[str]:
    """Message of each set of engine arguments that vLLM must not accept; empty if it did."""
    from vllm.engine.arg_utils import EngineArgs

    messages = []
    for case in cases:
        try:
            EngineArgs(**case).create_engine_config()
            messages.append("")
        except Exception as error:  # whatever a user would see
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def beside_other_plugin(
    folder: str, ours: dict[str, Any], theirs: dict[str, Any], other_first: bool
) -> dict[str, Any]:
    """An engine of ours while vllm-gguf-plugin is loaded too, and a config of theirs.

    Its kernels are Triton's and CUDA's, and it does not load without Triton: vLLM's placeholder
    stands in for that. So its model is resolved here, not run.

    Args:
        folder: where the other plugin is.
        ours: arguments of an engine that runs.
        theirs: arguments of one that does not.
        other_first: order in which the plugins register.
    """
    import sys

    from vllm.engine.arg_utils import EngineArgs
    from vllm.triton_utils.importing import TritonLanguagePlaceholder, TritonPlaceholder

    stand_ins = {"triton": TritonPlaceholder(), "triton.language": TritonLanguagePlaceholder()}
    sys.modules.update(stand_ins)
    sys.path.append(folder)
    import vllm_gguf_plugin

    for name in stand_ins:
        del sys.modules[name]
    import torch_dflash_vllm

    plugins = [torch_dflash_vllm.register, vllm_gguf_plugin.register]
    for register in reversed(plugins) if other_first else plugins:
        register()
    llm = build(ours)
    [got] = sample(llm, [[271, 300, 17, 5]], max_tokens=16, ignore_eos=True)
    config = EngineArgs(**theirs).create_engine_config().model_config
    return {
        "tokens": got["tokens"],
        "native": native(ours["model"], [[271, 300, 17, 5]], 16)[0],
        "ours": llm.llm_engine.model_config.quantization,
        "theirs": [config.quantization, config.model_weights],
    }


def gemm_rows(
    engine: dict[str, Any],
    prompts: list[list[int]],
    tokens: int,
    later: list[int] | None = None,
) -> dict[str, Any]:
    """Which row counts went through a library's product, and which through the operators'."""
    from torch_dflash_vllm.gguf import product
    from vllm import SamplingParams

    llm = build(engine)
    seen: dict[str, set[int]] = {}

    def watch(name: str) -> None:
        call, rows = getattr(product, name), seen.setdefault(name, set())

        def watched(x: Any, *rest: Any) -> Any:
            rows.add(x.shape[0])
            return call(x, *rest)

        setattr(product, name, watched)

    watch("_gemm")
    watch("multiply")
    got = sample(llm, prompts, max_tokens=tokens, ignore_eos=True, logprobs=2)
    if later is not None:  # another prompt is prefilled while these are decoded
        for i, prompt in enumerate([*prompts, later]):
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            llm.llm_engine.add_request(f"later{i}", {"prompt_token_ids": prompt}, params)
            if i == len(prompts) - 1:
                for _ in range(3):
                    llm.llm_engine.step()
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    return {
        "engine": got,
        "native": native(engine["model"], prompts, tokens),
        "gemm": sorted(seen["_gemm"]),
        "operators": sorted(seen["multiply"]),
    }
