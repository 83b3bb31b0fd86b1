"""How text is cut before byte-pair merging, by the name in ``tokenizer.ggml.pre``.

A GGUF file carries vocabulary and merges but only the name of the cutting rule. The expressions
are those of the models' own tokenizers. A rule with several expressions applies them one after
the other, each to the pieces that the one before left.
"""

from dataclasses import dataclass, replace
from typing import Final

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

__all__ = ["PRETOKENIZERS", "Pretokenizer"]


@dataclass(frozen=True)
class Pretokenizer:
    """One cutting rule and the habits of the tokenizers that use it."""

    expressions: tuple[str, ...]
    nfc: bool = False  # the model saw text in composed form
    ignore_merges: bool = False  # a piece that is in the vocabulary is not taken apart
    add_bos: bool = False  # where the file does not say

    def build(self) -> PreTokenizer:
        """The rule as a pre-tokenizer that ends in the byte alphabet."""
        splits = [Split(Regex(e), behavior="isolated") for e in self.expressions]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

_gpt2 = Pretokenizer((_GPT2,))
_smollm = Pretokenizer((r"\p{N}", _GPT2))
_default = Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_qwen2 = Pretokenizer(
    (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    nfc=True,
)
_qwen35 = Pretokenizer(
    (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    nfc=True,
)
_llama3 = Pretokenizer(
    (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ignore_merges=True,
    add_bos=True,
)

PRETOKENIZERS: Final = {
    "default": _default,
    "deepseek-r1-qwen": replace(_qwen2, nfc=False),
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "llama-v3": _llama3,
    "llama3": _llama3,
    "qwen2": _qwen2,
    "qwen35": _qwen35,
    "refact": _smollm,
    "smollm": _smollm,
    "starcoder": _smollm,
}
