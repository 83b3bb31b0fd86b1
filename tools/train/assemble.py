"""Checkpoint pieces -> Hugging Face folders (config.json, model.safetensors, tokenizer files).

python tools/train/assemble.py --pieces RUN --trained OUT --tokenizer DIR --kind target python
tools/train/assemble.py --pieces RUN --trained OUT --kind dflash dflash2 dspark
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from common import load_pieces
from drafter import DrafterConfig
from model import TargetConfig
from safetensors.torch import save_file

# The mask token never occurs in the corpus, so training only pushed its row away from every
# hidden state and
# made it the longest of all. As a drafter's input it is a constant; a tenth of it lets the
# block's rows start near
# zero, and its logit stays far below any real token's.
MASK_ROW_SCALE = 0.1


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--pieces", type=Path, required=True)
    p.add_argument("--trained", type=Path, required=True)
    p.add_argument("--tokenizer", type=Path)
    p.add_argument("--kind", nargs="+", required=True)
    a = p.parse_args()
    for kind in a.kind:
        out = a.trained / kind
        out.mkdir(parents=True, exist_ok=True)
        state = {k: v.float().contiguous() for k, v in load_pieces(a.pieces, kind).items()}
        if kind == "target":
            config = TargetConfig()
            state["model.embed_tokens.weight"][config.vocab_size - 1] *= MASK_ROW_SCALE
            published = config.to_hf({"<|endoftext|>": config.vocab_size - 4})
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(a.tokenizer / name, out / name)
        else:
            published = DrafterConfig.tiny(kind).to_hf()
        (out / "config.json").write_text(json.dumps(published, indent=1) + "\n")
        save_file(state, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
