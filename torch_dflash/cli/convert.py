"""``torch-dflash convert`` and ``prepare``: drafters between folders and GGUF files."""

import argparse
from typing import Any

from .paths import path
from .printable import printable

__all__ = ["add_parser"]

_LAYOUTS = ("upstream", "lucebox")


def add_parser(commands: Any) -> None:
    """Register both subcommands."""
    from ..drafters.outtypes import OUTTYPES

    p: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="write a drafter as a GGUF file",
        description="Write a drafter of any published layout as a GGUF file that llama.cpp loads.",
    )
    p.add_argument("source", type=path, help="Hugging Face folder, or a GGUF file of any layout")
    p.add_argument("--output", "-o", type=path, required=True, metavar="FILE", help="GGUF file")
    p.add_argument(
        "--target", type=path, metavar="MODEL",
        help="GGUF file or folder of its target: gives the tokenizer, and is checked",
    )  # fmt: skip
    p.add_argument(
        "--outtype", choices=tuple(OUTTYPES), type=str.lower,
        help="of most matrices (default: as stored)",
    )  # fmt: skip
    p.add_argument(
        "--layout", choices=_LAYOUTS, default="upstream",
        help="that llama.cpp and its forks load (default), or lucebox's",
    )  # fmt: skip
    p.add_argument(
        "--alignment",
        type=int,
        metavar="BYTES",
        help="of tensor data (default: the source's, or 32)",
    )
    p.add_argument(
        "--mask-token-id", type=int, metavar="ID", help="where the source does not say, or is wrong"
    )
    p.add_argument(
        "--causal", choices=("yes", "no"), help="of every layer, where the source is wrong"
    )
    p.set_defaults(run=run_convert)

    p = commands.add_parser(
        "prepare",
        help="write a drafter as a folder that vLLM loads",
        description="Write config.json and safetensors of a drafter, for unmodified vLLM, SGLang "
        "and z-lab's package.",
    )
    p.add_argument("source", type=path, help="GGUF file, or a folder in another layout")
    p.add_argument("--output", "-o", type=path, required=True, metavar="DIR", help="a new folder")
    p.add_argument(
        "--target", type=path, metavar="MODEL",
        help="GGUF file or folder of its target: says how deep it is, and is checked",
    )  # fmt: skip
    p.add_argument(
        "--dtype", choices=("f32", "f16", "bf16"),
        help="of the weights (default: as stored, bf16 for quantized ones)",
    )  # fmt: skip
    p.set_defaults(run=run_prepare)


def run_convert(args: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    from ..convert import convert_drafter
    from ..drafters.resolve import Overrides
    from ..inspection import summary
    from .progress import progress_bar

    causal = None if args.causal is None else args.causal == "yes"
    with progress_bar(args.output.name) as progress:
        convert_drafter(
            args.source,
            args.output,
            target=args.target,
            outtype=args.outtype,
            layout=args.layout,
            alignment=args.alignment,
            overrides=Overrides(mask_token_id=args.mask_token_id, causal=causal),
            progress=progress,
        )
    print(printable(f"{args.output}: {summary(args.output)}"))
    return 0


def run_prepare(args: argparse.Namespace) -> int:
    """Write the folder, and say what was written."""
    import torch

    from ..convert import prepare_drafter
    from ..inspection import summary
    from .progress import progress_bar

    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, None: None}
    with progress_bar(args.output.name) as progress:
        prepare_drafter(
            args.source,
            args.output,
            target=args.target,
            dtype=dtypes[args.dtype],
            progress=progress,
        )
    print(printable(f"{args.output}: {summary(args.output)}"))
    return 0
