"""Tokenizers and chat templates of GGUF files, beside those that transformers makes of the same."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from fuzzing import fuzz
from hypothesis import given as drawn
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from asyncinfer.builtin import read_corpus, standard_library
from asyncinfer.errors import ModelLoadError
from asyncinfer.text import gguf_template, gguf_tokenizer

#: Scripts, spaces, digits, contractions, controls, emoji of several characters.
HARD = [
    "Hello world, it's what I'LL do; we've DON'T",
    "  leading\n\n\n and   trailing \t\r\n  ",
    "1234567890 3.14159 1,000,000 ２０２４ ٣٤٥",
    "def f(x):\n    return x**2  # größe, naïve, façade e\u0301",
    "你好，世界。こんにちは 안녕하세요 สวัสดี नमस्ते مرحبا שלום Привет",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \u200b\ufeff\u00a0 \x00\x07\x1b",
    "camelCaseHTTPServer snake_case $x->y::<T>() /* … */ «»“”",
    "",
    " ",
]
CONTROL, NORMAL, USER = 3, 1, 4


def trained(byte_level: bool, size: int = 700) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges learnt from a few files of the standard library and `HARD`."""
    corpus = read_corpus(standard_library(), package="tomllib")
    texts = [*corpus.training.values(), *HARD]
    backend = Tokenizer(models.BPE(byte_fallback=not byte_level, unk_token="<unk>"))
    special = ["<unk>", "<s>", "</s>"]
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        alphabet = ["▁"]
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=300,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    return tokens, [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


@pytest.fixture(scope="module")
def bytewise() -> tuple[list[str], list[tuple[str, str]]]:
    return trained(byte_level=True)


def metadata(tokens: list[str], **more: Any) -> dict[str, Any]:
    kinds = [CONTROL if token in ("<s>", "</s>", "<unk>") else NORMAL for token in tokens]
    values = {
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        "unknown_token_id": tokens.index("<unk>"),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def byte_level(pair: tuple[list[str], list[tuple[str, str]]], pre: str) -> dict[str, Any]:
    merges = [f"{left} {right}" for left, right in pair[1]]
    return metadata(pair[0], model="gpt2", pre=pre, merges=merges)


#: Those that begin with the BOS token and take a word that is a token as it is.
WHOLE = ("lfm2", "llama-bpe")
#: The cuts in published `tokenizer.json` files.
PUBLISHED_CUTS = {
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "exaone-moe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        r"[\p{Han}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "minimax-m2": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "lfm2": [TikTokenConverter(vocab_file="-").pattern],
    "llama-bpe": [TikTokenConverter(vocab_file="-").pattern],
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "qwen35", "smollm", *PUBLISHED_CUTS])
def test_byte_level(pre: str, bytewise: tuple[list[str], list[tuple[str, str]]]) -> None:
    tokens, merges = bytewise
    vocabulary = {token: index for index, token in enumerate(tokens)}
    plain = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    if pre == "gpt-2":
        right = GPT2Tokenizer(vocab=vocabulary, merges=merges, **plain).backend_tokenizer
    elif pre == "qwen2":
        right = Qwen2Tokenizer(vocab=vocabulary, merges=merges, **plain).backend_tokenizer
    elif pre == "qwen35":
        right = Qwen3_5Tokenizer(vocab=vocabulary, merges=merges, **plain).backend_tokenizer
    else:
        right = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE))
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
        cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
        if pre != "smollm":
            cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in PUBLISHED_CUTS[pre]]
        right.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
        right.decoder = decoders.ByteLevel()
    ours = gguf_tokenizer({**byte_level(bytewise, pre)}, "a.gguf")
    first = [ours.bos_id] if pre in WHOLE else []
    for text in HARD:
        ids = ours.encode(text)
        assert ids == first + right.encode(text, add_special_tokens=False).ids, text
        normalised = text if right.normalizer is None else right.normalizer.normalize_str(text)
        assert ours.decode(ids) == normalised


@pytest.mark.parametrize("begins", [True, False])
def test_sentence_piece(begins: bool) -> None:
    """Merges are found again from scores alone, however the tokens are ranked."""
    tokens, merges = trained(byte_level=False)
    scores = np.array([-float(index) for index in range(len(tokens))], np.float32)
    given = metadata(tokens, model="llama", scores=scores, add_space_prefix=begins)
    ours = gguf_tokenizer(given, "a.gguf")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    right = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    for text in HARD:
        start = "▁" if begins and text else ""
        expected = right.encode(start + text.replace(" ", "▁"), add_special_tokens=False).ids
        assert ours.encode(text) == [ours.bos_id, *expected], text
        assert ours.decode(ours.encode(text)) == text


def test_a_token_whose_cuts_would_take_days_is_refused() -> None:
    tokens = ["<unk>", "<s>", "</s>", "a" * 512]
    given = metadata(tokens, model="llama", scores=np.zeros(4, np.float32))
    assert gguf_tokenizer(given, "a.gguf").vocab_size == 4
    tokens[3] = "a" * 513
    with pytest.raises(ModelLoadError, match=r"tokens=.*entry 3 has more than 512 characters"):
        gguf_tokenizer(given, "a.gguf")


def test_gemma_4() -> None:
    """Merges are listed; marks of tool calls are no text, whatever the file calls them."""
    tokens, merges = trained(byte_level=False)
    tokens = [*tokens, "<turn|>", "<|tool_call>", "<pad>", "<mask>"]
    given = metadata(
        tokens,
        model="gemma4",
        merges=[f"{left} {right}" for left, right in merges],
        scores=np.zeros(len(tokens), np.float32),
        add_space_prefix=False,
        add_bos_token=True,
    )
    kinds = given["tokenizer.ggml.token_type"]
    kinds[-4:] = CONTROL, USER, CONTROL, CONTROL
    ours = gguf_tokenizer(given, "a.gguf")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    right = GemmaTokenizer(vocab=vocabulary, merges=merges, bos_token="<s>", eos_token="</s>")
    for text in HARD:
        expected = right.encode(text, add_special_tokens=False)
        assert ours.encode(text) == [ours.bos_id, *expected], text
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_ids == {tokens.index("</s>"), tokens.index("<turn|>")}
    call = tokens.index("<|tool_call>")
    assert ours.encode("a<|tool_call>b", add_special_tokens=False)[1] == call
    assert ours.decode([call]) == ""


def test_special_tokens_are_marks_and_user_defined_ones_are_text() -> None:
    tokens, merges = trained(byte_level=True)
    given = byte_level(([*tokens, "<|im_end|>", "<tool>"], merges), "gpt-2")
    given["tokenizer.ggml.token_type"][-2:] = [CONTROL, USER]
    ours = gguf_tokenizer(given, "a.gguf")
    mark, text = len(tokens), len(tokens) + 1
    assert ours.encode("a<|im_end|>b<tool>")[1::2] == [mark, text]
    assert ours.decode([mark, text]) == "<tool>"
    assert ours.eos_ids == {given["tokenizer.ggml.eos_token_id"], mark}


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_special_tokens_of_phi_3_take_the_white_space_behind_them(architecture: str) -> None:
    """Its `tokenizer.json` says so, and files of this kind do not."""
    tokens, _ = trained(byte_level=False)
    tokens = [*tokens, "<|user|>"]
    scores = np.array([-float(index) for index in range(len(tokens))], np.float32)
    given = metadata(tokens, model="llama", scores=scores, add_space_prefix=False)
    given["tokenizer.ggml.token_type"][-1] = CONTROL
    given["general.architecture"] = architecture
    ours = gguf_tokenizer(given, "a.gguf")
    with_space, without = (ours.encode(f"<|user|>{space}a<s>\n") for space in ("\n ", ""))
    assert (with_space == without) is (architecture == "phi3")
    assert ours.decode(without) == "a\n"


def test_the_template_has_the_special_tokens() -> None:
    tokens, merges = trained(byte_level=True)
    given = byte_level((tokens, merges), "gpt-2")
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    given["tokenizer.chat_template"] = source
    template = gguf_template(given, "a.gguf")
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    del given["tokenizer.chat_template"]
    assert not gguf_template(given, "a.gguf")


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
def test_an_id_of_minus_one_stands_for_no_token(none: int) -> None:
    """As llama2.c's converter writes the ids of tokens that its models lack."""
    tokens, merges = trained(byte_level=True)
    roles = ("bos", "eos", "unknown", "seperator", "padding", "eot")
    ids = {f"tokenizer.ggml.{role}_token_id": none for role in roles}
    source = "{{ bos_token is defined }} {{ pad_token is defined }} {{ messages[0].content }}"
    given = {**byte_level((tokens, merges), "llama-bpe"), **ids, "tokenizer.chat_template": source}
    ours = gguf_tokenizer(given, "a.gguf")
    assert ours.bos_id is None
    assert not ours.eos_ids
    assert ours.encode("a") == [tokens.index("a")]
    template = gguf_template(given, "a.gguf")
    assert template.render([{"role": "user", "content": "hi"}]) == "False False hi"


BAD: dict[str, tuple[Mapping[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "tokens=None: must be a list of strings"),
    "tokens of numbers": ({"tokens": [1, 2]}, "tokens=[1, 2]: must be a list of strings"),
    "a model unheard of": ({"model": "rwkv"}, "model='rwkv': must be gpt2, llama or gemma4"),
    "a cut unheard of": (
        {"pre": "klingon"},
        "pre='klingon': must be one of a.x-4.0, chatglm-bpe, ",
    ),
    "no merges": ({"merges": None}, "merges=None: must be a list of strings"),
    "half a merge": ({"merges": ["a"]}, "entry 0 is no pair"),
    "a merge of strangers": ({"merges": ["klingon words"]}, "do not fit the tokens"),
    "no tokens at all": ({"tokens": []}, "tokens=[]: must be a list of strings, one at least"),
    "a model that is a list": ({"model": np.array([1, 2])}, "model=array([1, 2]): must be a name"),
    "a cut that is a list": ({"pre": ["gpt-2"]}, "pre=['gpt-2']: must be a name"),
    "one kind for all": ({"token_type": 1}, "token_type=1: must be a number for each of"),
    "kinds that are no numbers": (
        {"token_type": np.full(3, math.nan, np.float32)},
        "must be a list of integers",
    ),
    "a beginning that is a word": (
        {"add_bos_token": "yes"},
        "add_bos_token='yes': must be true or",
    ),
    "too few kinds": ({"token_type": np.array([1], np.int32)}, "must be a number for each of"),
    "an end beyond": ({"eos_token_id": 10**6}, "eos_token_id=1000000: must be a token id below"),
    "an end that is none": ({"eos_token_id": True}, "eos_token_id=True: must be a token id below"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_by_its_key(
    name: str, bytewise: tuple[list[str], list[tuple[str, str]]]
) -> None:
    changes, says = BAD[name]
    named = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelLoadError) as caught:
        gguf_tokenizer({**byte_level(bytewise, "gpt-2"), **named}, "a.gguf")
    assert says in str(caught.value)
    assert str(caught.value).startswith("file a.gguf: tokenizer.ggml.")


def test_scores_that_are_no_numbers_are_refused() -> None:
    scores = np.array([0.0, math.nan, 1.0], np.float32)
    given = metadata(["<unk>", "<s>", "</s>"], model="llama", scores=scores)
    with pytest.raises(ModelLoadError, match=r"a\.gguf: tokenizer\.ggml\.scores=.*no numbers"):
        gguf_tokenizer(given, "a.gguf")


def test_a_template_that_is_no_text_is_refused() -> None:
    given = {**metadata(["<unk>", "<s>", "</s>"]), "tokenizer.chat_template": 7}
    with pytest.raises(ModelLoadError, match=r"a\.gguf: tokenizer\.chat_template: must be a text"):
        gguf_template(given, "a.gguf")


#: Values of any type that a file may have under a tokenizer's key.
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from((-1, 0, 1, 7, 2**31, 2**63, 2**64 - 1, math.nan, math.inf, -1.5)),
    st.sampled_from(("", "gpt2", "llama", "gemma4", "default", "qwen2", "<s>", "\0")),
    st.lists(st.sampled_from(("", "a", "b", "a b", "a b c", " ", "<0x41>", "▁")), max_size=5),
    st.lists(st.integers(-1, 7), max_size=5).map(lambda values: np.array(values, np.int32)),
    st.lists(st.floats(width=32), max_size=5).map(lambda values: np.array(values, np.float32)),
    st.just([["a"], ["b"]]),
)
KEYS = (
    *("model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id"),
    *("unknown_token_id", "eot_token_id", "add_bos_token", "add_space_prefix"),
)


@fuzz(300)
@drawn(data=st.data())
def test_fuzzed_tokenizers(
    bytewise: tuple[list[str], list[tuple[str, str]]], data: st.DataObject
) -> None:
    """Whatever the keys hold, and whether or not their lengths fit: the key is named, or texts
    become ids below the number of tokens."""
    kind = data.draw(st.sampled_from(("gpt2", "llama", "gemma4")))
    given = byte_level((bytewise[0][:400], bytewise[1][:50]), "gpt-2")
    count = len(given["tokenizer.ggml.tokens"])
    scores = -np.arange(count, dtype=np.float32)
    given |= {"tokenizer.ggml.model": kind, "tokenizer.ggml.scores": scores}
    for name in data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)):
        key = f"tokenizer.ggml.{name}"
        value, change = given.get(key), data.draw(st.sampled_from(("odd", "cut", "again", "none")))
        if change == "none":
            given.pop(key, None)
        elif change == "odd" or not isinstance(value, list | np.ndarray) or not len(value):
            given[key] = data.draw(ODD)
        elif change == "cut":
            given[key] = value[: data.draw(st.integers(0, len(value)))]
        else:
            given[key] = value[:-1] if isinstance(value, np.ndarray) else [*value, value[0]]
    refusal, ids = "file a.gguf: tokenizer.", [0]
    try:
        ours = gguf_tokenizer(given, "a.gguf")
        gguf_template(given, "a.gguf", ours.shield)
        ids, count = ours.encode("héllo  wörld\n<s>12 a b"), ours.vocab_size
        ours.decode(ids)
    except ModelLoadError as error:
        refusal = str(error)
    assert refusal.startswith("file a.gguf: tokenizer.")
    assert all(0 <= token < count for token in ids)
