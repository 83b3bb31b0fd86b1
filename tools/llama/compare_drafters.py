"""Drafters that we convert, in llama.cpp: does it load them, and accept as many tokens as we do?

    python tools/llama/compare_drafters.py FOLDER --accept BINARY [--outtype f32] [--prompts 16]

The embedded drafters become Hugging Face folders (``prepare``) and GGUF files again (``convert``).
llama.cpp decodes held-out prompts greedily with each, and so do we, with full blocks. BINARY is
``accept.cpp``, built once against llama.cpp's library and its ``common`` folder; nothing of it is a
dependency of anything. llama.cpp rounds activations to 8 bits before it multiplies by quantized
weights, so target and drafters are F32 copies of the same values unless told otherwise.

Prints one JSON object; fails if an acceptance length differs by more than 5 %.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
CLOSE = 0.05


def files(folder: Path, outtype: str) -> dict[str, Path]:
    """The target as F32, and each embedded drafter through a folder and back."""
    import torch

    from torch_dflash import convert_drafter, prepare_drafter
    from torch_dflash.gguf import GGUFFile, retyped, typed_metadata, write_gguf
    from torch_dflash.load import ASSETS, DRAFTERS

    target = folder / "target.gguf"
    with GGUFFile.open(ASSETS / "target.gguf") as file:
        tensors = [(n, retyped(file.tensor(n), 0)) for n in file.tensors]
        write_gguf(target, file.architecture, typed_metadata(file), tensors)
    out = {"target": target}
    for name in DRAFTERS:
        middle, path = folder / name, folder / f"{name}.gguf"
        if not middle.exists():
            prepare_drafter(ASSETS / f"{name}.gguf", middle, target=target, dtype=torch.float32)
        convert_drafter(middle, path, target=target, outtype=outtype)
        out[name] = path
    return out


Runs = list[tuple[list[int], list[int]]]  # per prompt: length of each step, tokens


def llama(
    binary: Path, target: Path, drafter: Path, prompts: list[list[int]], tokens: int, most: int
) -> Runs:
    """What llama.cpp generated."""
    text = "\n".join(" ".join(map(str, p)) for p in prompts)
    command = [binary, target, drafter, str(tokens), str(most), "2"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{drafter}: llama.cpp failed: {done.stderr.strip().splitlines()[-1]}")
    parts = [line.split(";") for line in done.stdout.splitlines()]
    return [([*map(int, a.split())], [*map(int, b.split())]) for a, b in parts]


def ours(target: Path, drafter: Path, prompts: list[list[int]], tokens: int) -> tuple[Runs, int]:
    """What we generated after each prompt's last token, and the drafter's full block."""
    from torch_dflash import Session, load_drafter, load_target

    model = load_target(target)
    loaded = load_drafter(drafter, model)
    runs = [Session(model, loaded).generate(p, tokens) for p in prompts]
    return [(r.stats.emitted_lengths, r.tokens) for r in runs], loaded.config.max_draft_tokens


def whole_steps(lengths: list[int], tokens: int, most: int) -> list[int]:
    """Steps that no length limit has cut or kept short: those that begin early enough."""
    out, at = [], 0
    for length in lengths:
        if at + most + 1 > tokens:
            break
        out.append(length)
        at += length
    return out


def main() -> int:
    """Compare, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the files")
    parser.add_argument("--accept", type=Path, required=True, help="accept.cpp, built")
    parser.add_argument("--outtype", default="f32", help="of the drafters")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    from benchmarks.held_out import embedded, prompts

    _, tokenizer = embedded()
    ids = [tokenizer.encode(p, add_special=True)[:256] for p in prompts()[: args.prompts]]
    args.folder.mkdir(parents=True, exist_ok=True)
    found = files(args.folder, args.outtype)
    report: dict[str, Any] = {"outtype": args.outtype, "prompts": len(ids), "tokens": args.tokens}
    apart = 0
    for name in [n for n in found if n != "target"]:
        mine, most = ours(found["target"], found[name], ids, args.tokens)
        # our anchor is the first token after the prompt, llama.cpp's the prompt's last
        longer = [p + tokens[:1] for p, (_, tokens) in zip(ids, mine, strict=True)]
        mine = [(lengths, tokens[1:]) for lengths, tokens in mine]
        theirs = llama(args.accept, found["target"], found[name], longer, args.tokens, most)
        steps = [
            [whole_steps(lengths, args.tokens, most) for lengths, _ in runs]
            for runs in (mine, theirs)
        ]
        length = [sum(map(sum, s)) / sum(map(len, s)) for s in steps]
        apart += abs(length[1] / length[0] - 1) > CLOSE
        report[name] = {
            "draft_tokens": most,
            "steps": [sum(map(len, s)) for s in steps],
            "acceptance_length": {"ours": round(length[0], 4), "llama_cpp": round(length[1], 4)},
            "ratio": round(length[1] / length[0], 4),
            "equal_texts": sum(
                a[1] == b[1][: len(a[1])] for a, b in zip(mine, theirs, strict=True)
            ),
            "equal_steps": sum(a == b for a, b in zip(*steps, strict=True)),
        }
    print(json.dumps(report, indent=2))
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
