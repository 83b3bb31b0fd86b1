"""Trains the 4096-token byte-level BPE of the embedded model and encodes the corpus.

    python tools/train/tokenizer.py train  --corpus OUT --out TARGET_DIR
    python tools/train/tokenizer.py encode --corpus OUT --tokenizer TARGET_DIR/tokenizer.json

The pre-tokenizer is Qwen3.5's, so that GGUF readers know it as `qwen35`. `encode` writes
OUT/train.u16: uint16 little-endian ids, each file followed by <|endoftext|>.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB = 4096
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
)  # the last four rows of the vocabulary
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def new_tokenizer() -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    return tok


def train(corpus: Path, out: Path, sample_bytes: int) -> None:
    texts = (corpus / "train.bin").read_bytes().decode().split("\0")
    size, sample = 0, []
    for t in texts:  # already shuffled
        sample.append(t)
        size += len(t)
        if size > sample_bytes:
            break
    tok = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(sample, trainer)
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    if tok.get_vocab_size() != VOCAB:
        raise ValueError(
            f"tokenizer: vocabulary must have {VOCAB} rows, got {tok.get_vocab_size()}"
        )
    out.mkdir(parents=True, exist_ok=True)
    tok.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "eos_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>",
                "mask_token": "<|mask|>",
                "bos_token": None,
                "unk_token": None,
                "add_prefix_space": False,
                "model_max_length": 2048,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
    )


def encode(corpus: Path, tokenizer: Path) -> None:
    tok = Tokenizer.from_file(str(tokenizer))
    end = tok.token_to_id("<|endoftext|>")
    texts = (corpus / "train.bin").read_bytes().decode().split("\0")
    parts = []
    for i in range(0, len(texts), 512):
        for e in tok.encode_batch_fast(texts[i : i + 512], add_special_tokens=False):
            parts.append(np.asarray([*e.ids, end], dtype=np.uint16))
    ids = np.concatenate(parts)
    ids.tofile(corpus / "train.u16")
    print(
        f"{len(ids) / 1e6:.2f} M tokens,"
        f" {sum(len(t.encode()) for t in texts) / len(ids):.3f} bytes per token"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("command", choices=("train", "encode"))
    p.add_argument("--corpus", type=Path, required=True)
    p.add_argument("--out", type=Path)
    p.add_argument("--tokenizer", type=Path)
    p.add_argument("--sample-mb", type=int, default=40)
    a = p.parse_args()
    if a.command == "train":
        train(a.corpus, a.out, a.sample_mb * 1_000_000)
    else:
        encode(a.corpus, a.tokenizer)


if __name__ == "__main__":
    main()
