"""``torch-dflash generate``: text from a prompt, plain or speculative, or both compared."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from .paths import named, path

if TYPE_CHECKING:
    import torch

    from ..decoding.loop import Generation
    from ..drafters.base import Drafter
    from ..gguf.tokenizer import Tokenizer
    from ..models.decoder import Decoder

__all__ = ["add_parser"]

_MOST_THREADS = 1024  # beyond, OpenMP ends the process where it cannot allocate their stacks


def add_parser(commands: Any) -> None:
    """Register the subcommand."""
    p: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="complete a prompt",
        description="Complete a prompt with a GGUF target; the embedded one without a MODEL.",
    )
    p.add_argument(
        "model", nargs="?", type=path, help="target GGUF file (default: the embedded model)"
    )
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", "-p", help="text to complete; - reads standard input")
    source.add_argument("--file", "-f", type=path, help="file whose text is completed")
    source.add_argument(
        "--chat", metavar="MESSAGE", help="a user message, through the chat template"
    )
    p.add_argument(
        "--drafter", "-d", type=named, metavar="dflash|dflash2|dspark|none|PATH",
        help="drafter (default: dflash2 for the embedded model, none otherwise)",
    )  # fmt: skip
    p.add_argument(
        "--max-new-tokens", "-n", type=int, default=128, help="tokens at most (default: 128)"
    )
    p.add_argument("--temperature", "-t", type=float, default=0.0, help="0 is greedy")
    p.add_argument(
        "--top-k", type=int, default=0, help="sample from the k most likely tokens; 0: from all"
    )
    p.add_argument(
        "--top-p", type=float, default=1.0,
        help="sample from the fewest tokens that have this probability together; 1: from all",
    )  # fmt: skip
    p.add_argument(
        "--seed", type=int, default=0, help="the same seed samples the same text (default: 0)"
    )
    p.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop string; repeatable"
    )
    p.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    p.add_argument(
        "--policy",
        choices=("fixed", "cost", "confidence"),
        help="draft tokens per step: all, what pays (default), or what the drafter believes in",
    )
    p.add_argument(
        "--draft-tokens", type=int, metavar="N",
        help="never more draft tokens per step (default: what the drafter's block holds)",
    )  # fmt: skip
    p.add_argument(
        "--state", choices=("journal", "snapshots"), default="journal",
        help="how a hybrid's recurrent states are rolled back: rows replayed, or a state per row",
    )  # fmt: skip
    p.add_argument(
        "--kv-type", choices=("f32", "f16", "bf16"), default="f32",
        help="of the K and V caches (default: f32)",
    )  # fmt: skip
    p.add_argument(
        "--activations",
        choices=("planes", "q8_1"),
        default="planes",
        help="of the target's quantized weights: 16 bits, or 8 as llama.cpp rounds them",
    )
    p.add_argument(
        "--device", default="cpu", metavar="cpu|cuda|cuda:N", help="where the models run"
    )
    p.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    p.add_argument(
        "--reference", metavar="OP,OP", help="run these operators through their float64 reference"
    )
    p.add_argument("--compare", action="store_true", help="interleave plain and speculative runs")
    p.add_argument("--pairs", type=int, metavar="N", help="runs of each kind (default: 5)")
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, generate, print."""
    import torch

    from ..decoding.sampling import SamplingParams
    from ..gguf import GGUFFile
    from ..gguf.tokenizer import tokenizer_from_gguf
    from ..load import ASSETS, load_drafter, load_target
    from ..policies.base import check_limit
    from ..switch import use_reference

    _check(args)
    try:
        sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    except ValueError as error:  # begins with the argument's name
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {rest}") from None
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.reference is not None:
        use_reference(args.reference.split(","))
    kv = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[args.kv_type]
    model = args.model or ASSETS / "target.gguf"
    device = _device(args.device)
    target = load_target(model, state=args.state, kv_dtype=kv, activations=args.activations)
    target.to(device)
    with GGUFFile.open(model) as file:
        tokenizer = tokenizer_from_gguf(file)
    name = _drafter(args)
    drafter = None if name == "none" else load_drafter(name, target, kv_dtype=kv).to(device)
    if drafter is not None:
        check_limit(args.draft_tokens, drafter.config, "--draft-tokens")
    prompt = _encode(args, tokenizer)
    if args.compare:
        assert drafter is not None  # checked above
        return _compare(args, target, drafter, tokenizer, prompt, sampling)
    return _generate(args, target, drafter, tokenizer, prompt, sampling)


def _drafter(args: argparse.Namespace) -> str:
    """A name, a path or ``none``."""
    return str(args.drafter or ("none" if args.model else "dflash2"))


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers out of range and flags that would change nothing, before anything is read."""
    for flag, value, low, high in (
        ("--max-new-tokens", args.max_new_tokens, 2 if args.compare else 1, None),
        ("--threads", args.threads, 1, _MOST_THREADS),
        ("--draft-tokens", args.draft_tokens, 1, None),
        ("--pairs", args.pairs, 1, None),
    ):
        if value is not None and value < low:
            why = " to --compare, whose first token takes no step" if low > 1 else ""
            raise ValueError(f"{flag} must be at least {low}{why}, got {value}")
        if value is not None and high is not None and value > high:
            raise ValueError(f"{flag} must be at most {high}, got {value}")
    if "" in args.stop:
        raise ValueError("--stop must not be an empty text")
    named = args.drafter or not args.model  # "none" too: who compares may change this flag alone
    for flag, given, there in (
        ("--compare", args.compare, _drafter(args) != "none"),
        ("--draft-tokens", args.draft_tokens, named),
        ("--policy", args.policy, named),
    ):
        if given and not there:
            raise ValueError(f"{flag} needs a drafter, got none; name one with --drafter")
    if args.pairs and not args.compare:
        raise ValueError("--pairs needs --compare, got none")
    if args.compare and args.stop:
        raise ValueError("--stop must be absent with --compare, which runs to a stop token")


def _device(name: str) -> "torch.device":
    """The device, if the models can run there."""
    import torch

    from .._ext import BACKENDS

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name}")
    if device.type not in BACKENDS:
        raise ValueError(
            "--device must be cpu here, got cuda: this build or this torch has no CUDA kernels; "
            "`torch-dflash doctor` says which"
        )
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device must be one of the {count} CUDA devices here, got {name}")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _encode(args: argparse.Namespace, tokenizer: "Tokenizer") -> list[int]:
    """The prompt's tokens."""
    if args.chat is not None:
        messages = [{"role": "user", "content": args.chat}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tokenizer.encode(text, add_special=False)
    if args.file is not None:
        try:
            text = args.file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.file}: must be UTF-8 text, got {error}") from error
    elif args.prompt == "-":
        if sys.stdin is None:
            raise ValueError("--prompt - must have a standard input to read, got a closed one")
        text = sys.stdin.read()
    else:
        text = args.prompt if args.prompt is not None else "def fibonacci(n):\n"
    tokens = tokenizer.encode(text, add_special=True)
    if not tokens:
        raise ValueError("the prompt must have at least one token, got an empty text")
    return tokens


def _policy(args: argparse.Namespace) -> Any:
    from ..policies import ConfidencePolicy, CostPolicy, FixedPolicy

    kinds = {"fixed": FixedPolicy, "cost": CostPolicy, "confidence": ConfidencePolicy}
    return kinds[args.policy or "cost"](draft_tokens=args.draft_tokens)


def _generate(
    args: argparse.Namespace,
    target: "Decoder",
    drafter: "Drafter | None",
    tokenizer: "Tokenizer",
    prompt: list[int],
    sampling: Any,
) -> int:
    from ..decoding.loop import Generation, Session
    from ..decoding.stop import StopChecker

    stop_ids = () if args.ignore_eos else tokenizer.eos_ids
    text = tokenizer.stream()
    stop = StopChecker(stop_ids, args.stop, text.push, text.finish)
    result = Generation()
    session = Session(target, drafter, _policy(args) if drafter else None)
    for step in session.stream(prompt, args.max_new_tokens, sampling, stop, result):
        result.tokens += step.tokens
        result.text += step.text
        if not args.json:
            print(step.text, end="", flush=True)
    if args.json:
        facts = {"text": result.text, "tokens": result.tokens}
        facts |= {"finish_reason": result.finish_reason, **result.stats.to_dict()}
        print(json.dumps(facts))
    else:
        print()
        print(_summary(result, drafter is not None), file=sys.stderr)
    return 0


def _summary(result: "Generation", speculative: bool) -> str:
    s = result.stats
    line = (
        f"{s.prompt_tokens} prompt tokens in {s.prefill_seconds:.2f} s, "
        f"{s.new_tokens} new tokens at {s.tokens_per_second:.1f} tokens/s"
    )
    if speculative:
        line += f", {s.acceptance_length:.2f} tokens a step, {s.acceptance_rate:.0%} accepted"
    return f"[{line}; {result.finish_reason}]"


def _compare(
    args: argparse.Namespace,
    target: "Decoder",
    drafter: "Drafter",
    tokenizer: "Tokenizer",
    prompt: list[int],
    sampling: Any,
) -> int:
    from ..decoding.compare import compare

    result = compare(
        target, drafter, prompt, args.max_new_tokens, pairs=args.pairs or 5, sampling=sampling,
        policy=_policy(args), stop_ids=() if args.ignore_eos else sorted(tokenizer.eos_ids),
    )  # fmt: skip
    if args.json:
        print(json.dumps({"drafter": drafter.kind, **result.to_dict()}))
    else:
        verdict = "identical tokens" if result.identical else "DIFFERENT TOKENS"
        print(
            f"{drafter.kind}: {verdict}; plain {result.plain_tok_s:.1f} tokens/s, speculative "
            f"{result.spec_tok_s:.1f} tokens/s: {result.speedup:.2f}x; "
            f"{result.acceptance_length:.2f} tokens a step, {result.acceptance_rate:.0%} accepted"
        )
    return 0 if result.identical or not sampling.greedy else 1
