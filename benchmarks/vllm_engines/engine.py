"""One engine in this process: what its steps cost, this package's parts on and off.

Off means the same layers on vLLM's own kernels: the switch is thrown in the running engine and its
graphs are captured again, so nothing else differs. Needs vLLM's V2 runner with full graphs.
"""

import fcntl
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["measure"]

CONTEXT = 512  # tokens of a prompt
STEPS = 48  # tokens that a throughput run generates
REPLAYS = 40


def build(model: str, drafter: str, drafts: int, batches: list[int]) -> Any:
    """An engine whose graphs hold whole steps of ``batches`` requests."""
    from vllm import LLM

    sizes = sorted(b * (1 + drafts) for b in batches)
    spec = {
        "method": "dflash",
        "model": drafter,
        "num_speculative_tokens": drafts,
        "draft_load_config": {"load_format": "auto"},  # not the target's
    }
    return LLM(
        model=model,
        load_format="dummy" if not model.endswith(".gguf") else "auto",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=max(batches),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        seed=0,
        gpu_memory_utilization=0.2,  # several start together
        kv_cache_memory_bytes=14 << 30,
        speculative_config=spec,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        },
        additional_config={"gdn_prefill_backend": "triton"},
        kernel_config={"enable_jit_warmup": False},  # everything runs before it is timed
    )


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def switch(runner: Any, on: bool) -> None:
    """Layers and norms to this package's operators or to vLLM's; graphs are captured anew."""
    from torch_dflash_vllm.gdn_layer import DFlashGDN
    from torch_dflash_vllm.norm_layer import DFlashGemmaRMSNorm
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm
    from vllm.v1.worker.workspace import unlock_workspace

    for module in runner.model.modules():
        if isinstance(module, DFlashGDN):
            module._ours = on
        elif isinstance(module, DFlashGemmaRMSNorm):
            kind = DFlashGemmaRMSNorm if on else GemmaRMSNorm
            module._forward_method = kind.forward_cuda.__get__(module)
    unlock_workspace()  # capturing locks it
    runner.cudagraph_manager.release_graphs()
    if runner.speculator is not None:
        runner.speculator.query_cudagraph_manager.release_graphs()
    runner.capture_model()


def median_us(call: Callable[[], Any], repeats: int = REPLAYS) -> float:
    """Median time of a call on the device."""
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for before, after in pairs:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3


def throughput(llm: Any, batch: int, vocab: int) -> dict[str, float]:
    """``batch`` requests at once: tokens a second, and milliseconds a step."""
    from vllm import SamplingParams

    g = torch.Generator().manual_seed(batch)
    prompts = [
        {"prompt_token_ids": torch.randint(2, vocab - 1, (CONTEXT,), generator=g).tolist()}
        for _ in range(batch)
    ]
    steps = runner_steps(runner_of(llm))
    times = []
    for count in (1, STEPS):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)  # warm
        with steps as seen:
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append((time.perf_counter() - start, len(seen)))
    seconds, decode_steps = times[1][0] - times[0][0], times[1][1] - times[0][1]
    tokens = batch * (STEPS - 1)
    return {"tokens_per_s": tokens / seconds, "ms_per_step": seconds / max(1, decode_steps) * 1e3}


class runner_steps:
    """Counts the steps of a runner inside a ``with``."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def __enter__(self) -> list[int]:
        seen: list[int] = []
        execute = type(self.runner).execute_model

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return execute(self.runner, *args, **kwargs)

        self.runner.execute_model = counted
        return seen

    def __exit__(self, *_: object) -> None:
        del self.runner.execute_model


def verify_us(runner: Any, batch: int, rows: int) -> float:
    """The target's graph for ``batch`` requests of ``rows`` each behind the context."""
    for group in (g for groups in runner.attn_groups for g in groups):
        builder = group.get_metadata_builder()
        if hasattr(builder, "spec_state_indices_tensor"):  # what a step of that size would stage
            indices = builder.spec_state_indices_tensor[:batch]
            indices.copy_(torch.arange(1, 1 + indices.numel()).view(indices.shape))
            offsets = torch.arange(0, batch * rows + 1, rows)
            builder.spec_query_start_loc[: batch + 1].copy_(offsets)
            builder.num_accepted_tokens[:batch].fill_(rows)
    runner.input_buffers.seq_lens[:batch].fill_(CONTEXT + STEPS)
    for desc, graph in runner.cudagraph_manager.graphs.items():
        if desc.num_tokens == batch * rows and desc.uniform_token_count == rows:
            return median_us(graph.replay)
    raise LookupError(f"no graph for {batch} requests of {rows} rows")


def draft_us(runner: Any, batch: int) -> float | None:
    """The drafter's graph for ``batch`` requests."""
    for desc, graph in runner.speculator.query_cudagraph_manager.graphs.items():
        if desc.num_reqs == batch:
            return median_us(graph.replay)
    return None


@contextmanager
def core_context(runner: Any, layers: list[Any], batch: int, rows: int) -> Iterator[None]:
    """A step of ``batch`` requests of ``rows`` rows each, all of the last one accepted."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    columns = 1 + runner.num_speculative_steps

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device="cuda")

    metadata = GDNAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=batch,
        num_spec_decode_tokens=batch * rows,
        num_actual_tokens=batch * rows,
        spec_query_start_loc=ints(range(0, batch * rows + 1, rows)),
        spec_state_indices_tensor=ints(range(1, 1 + batch * columns)).view(batch, columns),
        spec_sequence_masks=torch.ones(batch, dtype=torch.bool, device="cuda"),
        spec_token_indx=ints(range(batch * rows)),
        non_spec_token_indx=ints([]),
        num_accepted_tokens=torch.full((batch,), rows, dtype=torch.int32, device="cuda"),
    )
    named = {layer.prefix: metadata for layer in layers}
    with set_forward_context(named, runner.vllm_config, num_tokens=batch * rows):
        yield


def core_us(runner: Any, on: bool, batch: int, rows: int) -> float:
    """Convolution, delta rule and gated norm of one layer; all layers in turn, states cold."""
    from torch_dflash_vllm.gdn_layer import DFlashGDN

    layers = [m for m in runner.model.modules() if isinstance(m, DFlashGDN)]
    first = layers[0]
    tokens = batch * rows
    width = 2 * (first.key_dim + first.value_dim)
    g = torch.Generator("cuda").manual_seed(0)
    mixed = torch.randn(tokens, width, device="cuda", generator=g).bfloat16()
    ba = torch.randn(tokens, 2 * first.num_v_heads, device="cuda", generator=g).bfloat16()
    core = mixed.new_zeros(tokens, first.num_v_heads, first.head_v_dim)
    before = [layer._ours for layer in layers]

    def step() -> None:
        for layer in layers:
            layer._forward_core_fused_norm_packed(mixed, ba, core)

    try:
        for layer in layers:
            layer._ours = on
        with torch.inference_mode(), core_context(runner, layers, batch, rows):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
                step()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        return median_us(graph.replay) / len(layers)
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._ours = was


def measure(
    model: str,
    drafter: str,
    drafts: int,
    batches: list[int],
    switched: bool,
    core: bool,
    lock: str,
    answer: str,
) -> None:
    """Start an engine and time it, alone on the device.

    Args:
        model: folder for dummy weights, or a ``.gguf`` file.
        drafter: folder.
        drafts: draft tokens per step.
        batches: requests at once.
        switched: this package on, off, and on again; else only on.
        core: the recurrent layers' core alone as well.
        lock: file that engines share while they start and one has alone while it is timed.
        answer: JSON file, written after every figure: ``start_s``; ``core_us``, one layer's by
            batch and rows, on and off; ``runs``, per switch position and batch ``verify_us``,
            ``draft_us``, ``tokens_per_s`` and ``ms_per_step``; ``complete``.
    """
    turn = open(lock, "w")  # noqa: SIM115, its lock ends with the process
    fcntl.flock(turn, fcntl.LOCK_SH)
    start = time.perf_counter()
    llm = build(model, drafter, drafts, batches)
    out: dict[str, Any] = {"start_s": time.perf_counter() - start, "core_us": {}, "runs": []}
    out["complete"] = False

    def note(*line: Any) -> None:
        print(*line, flush=True)
        Path(answer).write_text(json.dumps(out))

    note("started", out["start_s"])
    fcntl.flock(turn, fcntl.LOCK_UN)
    fcntl.flock(turn, fcntl.LOCK_EX)
    runner = runner_of(llm)
    vocab = runner.vllm_config.model_config.get_vocab_size()
    if core:
        for batch in batches:
            for rows in (1, 1 + drafts):
                key = f"batch {batch}, {rows} rows"
                out["core_us"][key] = {
                    name: core_us(runner, on, batch, rows)
                    for name, on in (("on", True), ("off", False), ("on again", True))
                }
                note("core", key, out["core_us"][key])
    for position in ("on", "off", "on again") if switched else ("on",):
        if position != "on":
            switch(runner, position != "off")
        for batch in batches:
            figures: dict[str, Any] = {"position": position, "batch": batch}
            figures |= throughput(llm, batch, vocab)
            figures["verify_us"] = verify_us(runner, batch, 1 + drafts)
            figures["draft_us"] = draft_us(runner, batch)
            out["runs"].append(figures)
            note(figures)
    out["complete"] = True
    note("complete")
