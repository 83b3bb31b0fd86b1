"""What a child process does with an engine on a GPU: the same prompts in several positions."""

from typing import Any

from generate import build, counters, features, sample


def _run(llm: Any, runner: Any, prompts: list[list[int]]) -> dict[str, Any]:
    manager, replays = runner.cudagraph_manager, 0

    def counted(desc: Any) -> Any:
        nonlocal replays
        replays += 1
        return type(manager).run_fullgraph(manager, desc)

    manager.run_fullgraph = counted
    before = counters(llm)
    results = sample(llm, prompts, logprobs=2)
    grown = {k: v - before.get(k, 0) for k, v in counters(llm).items()}
    del manager.run_fullgraph
    return {"results": results, "replays": replays, "metrics": grown}


def positions(engine: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """As the engine starts, once more, without its graphs, and on vLLM's own recurrent kernels."""
    from torch_dflash_vllm.gdn_layer import DFlashGDN
    from vllm.v1.worker.workspace import unlock_workspace

    llm = build(engine)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = [m for m in runner.model.modules() if isinstance(m, DFlashGDN)]
    out = {"started": _run(llm, runner, prompts), "again": _run(llm, runner, prompts)}
    unlock_workspace()  # capturing locked it
    runner.cudagraph_manager.release_graphs()
    if runner.speculator is not None and runner.speculator.query_cudagraph_manager is not None:
        runner.speculator.query_cudagraph_manager.release_graphs()
    out["eager"] = _run(llm, runner, prompts)
    for layer in layers:
        layer._ours = False
    out["vLLM's"] = _run(llm, runner, prompts)
    return {"positions": out, "layers": len(layers), "features": features()}
