"""The tokenizer and the chat template of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from asyncinfer.errors import ModelLoadError
from asyncinfer.text.chat import ChatTemplate
from asyncinfer.text.gguf_words import CUTS, DIGITS, GPT2
from asyncinfer.text.merges import LONGEST, all_merges
from asyncinfer.text.shield import Shield
from asyncinfer.text.tokenizer import Tokenizer

__all__ = ["gguf_template", "gguf_tokenizer"]

_PREFIX: Final = "tokenizer.ggml."
#: Kinds of tokens, by the file's numbers.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
#: Ids that stand for no token: -1, also where it was written as an unsigned number.
_NO_TOKEN: Final = (-1, (1 << 32) - 1)
#: Tokenizers that keep a word which is a token, even if no merges lead to it.
_WHOLE_WORDS: Final = {
    "falcon-h1",
    "lfm2",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "pixtral",
    "tekken",
}
#: Tokenizers whose texts begin with the BOS token, though the file does not say so.
_WITH_BOS: Final = _WHOLE_WORDS
#: Control tokens that end an answer: files name at most one of them.
_ENDS: Final = {
    "<end_of_turn>",
    "<|call|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|return|>",
    "<turn|>",
}
#: Gemma 4's marks of reasoning and tool calls. Files call them user-defined, so that programs
#: which print tokens show them.
_MARKS: Final = {
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
}
#: In Phi-3 this token ends an answer; in gpt-oss it ends one of an answer's several messages.
_END: Final = "<|end|>"
#: Special tokens of Phi-3 that leave the white space behind them; all others take it with them,
#: which files do not say.
_LEAVING_SPACE: Final = {"<unk>", "<s>", "<|endoftext|>"}


def gguf_tokenizer(metadata: Mapping[str, Any], file: str) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes. It is byte-level BPE ("gpt2"), or
    BPE with a fallback to bytes: with merges in the order of scores like SentencePiece's ("llama"),
    or with a list of merges ("gemma4"). `ModelLoadError` names the key."""
    read = _Metadata(metadata, file)
    tokens = read.strings("tokens")
    if not tokens:
        raise read.refuse("tokens", "must be a list of strings, one at least")
    kinds = read.integers("token_type", len(tokens), _NORMAL)
    kind = read.name("model")
    if kind == "gpt2":
        backend = _byte_level(read, tokens)
    elif kind == "llama":
        backend = _with_bytes(read, tokens, _merges(read, tokens, kinds))
    elif kind == "gemma4":
        kinds = [
            _CONTROL if token in _MARKS else kind for token, kind in zip(tokens, kinds, strict=True)
        ]
        backend = _with_bytes(read, tokens, _listed_merges(read))
    else:
        raise read.refuse("model", "must be gpt2, llama or gemma4")
    is_phi3 = kind == "llama" and metadata.get("general.architecture") == "phi3"
    taking = set(tokens) - _LEAVING_SPACE if is_phi3 else set()
    backend.add_special_tokens(_added(tokens, kinds, (_CONTROL, _UNKNOWN), taking, special=True))
    backend.add_tokens(_added(tokens, kinds, (_USER,), special=False))
    bos, eos = (read.token_id(f"{role}_token_id", len(tokens)) for role in ("bos", "eos"))
    opens = read.flag("add_bos_token")
    if opens is None:
        opens = kind != "gpt2" or read.name("pre") in _WITH_BOS
    first = bos if opens else None
    # Of embedding models alone: a model that generates would go on after its prompt's end.
    pooling = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    embeds = isinstance(pooling, int) and pooling in (1, 3)
    last = eos if read.flag("add_eos_token") and embeds else None
    if first is not None or last is not None:
        backend.post_processor = _framing(tokens, first, last)
    control = {token: index for index, token in enumerate(tokens) if kinds[index] == _CONTROL}
    ends = {control[name] for name in _ENDS & control.keys()}
    if _END in control and "<|return|>" not in control:
        ends.add(control[_END])
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        found = read.token_id(key, len(tokens))
        ends |= set() if found is None else {found}
    return Tokenizer(backend, bos_id=bos, eos_ids=ends)


def _framing(
    tokens: Sequence[str], first: int | None, last: int | None
) -> processors.TemplateProcessing:
    """Puts the token `first` before a text and `last` behind it; None: no token."""
    ids = {tokens[index]: index for index in (first, last) if index is not None}
    begin, end = ([] if index is None else [tokens[index]] for index in (first, last))
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", "$B", *end],
        special_tokens=list(ids.items()),
    )


def gguf_template(
    metadata: Mapping[str, Any], file: str, shield: Shield | None = None
) -> ChatTemplate:
    """The chat template in the metadata of a GGUF file."""
    read = _Metadata(metadata, file)
    tokens = read.strings("tokens")
    special = {}
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}
    for role, theirs in roles.items():
        found = read.token_id(f"{theirs}_token_id", len(tokens))
        if found is not None:
            special[f"{role}_token"] = tokens[found]
    sources = {}
    for name in ("", ".tool_use"):
        source = metadata.get(f"tokenizer.chat_template{name}")
        if not isinstance(source, str | None):
            raise ModelLoadError(f"tokenizer.chat_template{name}: must be a text", file=file)
        sources[name] = source
    return ChatTemplate(
        sources[""], tool_source=sources[".tool_use"], special_tokens=special, shield=shield
    )


def _byte_level(read: _Metadata, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = read.name("pre")
    if name not in CUTS:
        raise read.refuse("pre", f"must be one of {', '.join(CUTS)}")
    backend = _bpe(read, tokens, _listed_merges(read), ignore_merges=name in _WHOLE_WORDS)
    if name in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    cut = CUTS[name]
    steps: list[Any] = []
    if cut == DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    elif cut != GPT2:
        patterns = (cut,) if isinstance(cut, str) else cut
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    words = cut in (DIGITS, GPT2)
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _with_bytes(
    read: _Metadata, tokens: Sequence[str], merges: Sequence[tuple[str, str]]
) -> tokenizers.Tokenizer:
    unknown = tokens[read.token_id("unknown_token_id", len(tokens)) or 0]
    backend = _bpe(read, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    begins = read.flag("add_space_prefix") is not False
    steps: list[Any] = [normalizers.Prepend("▁")] if begins else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _bpe(
    read: _Metadata, tokens: Sequence[str], merges: Sequence[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        model = models.BPE(_vocabulary(tokens), merges, **options)
    except Exception as error:  # The library raises no narrower class.
        raise read.refuse("merges", f"do not fit the tokens: {error}") from error
    return tokenizers.Tokenizer(model)


def _listed_merges(read: _Metadata) -> list[tuple[str, str]]:
    merges = [merge.partition(" ") for merge in read.strings("merges")]
    for index, (_, space, _) in enumerate(merges):
        if not space:
            raise read.refuse("merges", f"entry {index} is no pair")
    return [(left, right) for left, _, right in merges]


def _merges(read: _Metadata, tokens: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece's merges: it joins the two neighbours whose token has the highest score."""
    scores = read.numbers("scores", len(tokens))
    ranked = sorted(
        (index for index, kind in enumerate(kinds) if kind in (_NORMAL, _USER, _UNUSED)),
        key=lambda index: -scores[index],
    )
    for index in ranked:
        if len(tokens[index]) > LONGEST:
            raise read.refuse("tokens", f"entry {index} has more than {LONGEST} characters")
    return all_merges((tokens[index] for index in ranked), _vocabulary(tokens))


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    # Of two tokens with the same spelling only the first is ever used.
    last = range(len(tokens) - 1, -1, -1)
    return dict(zip(reversed(tokens), last, strict=True))


def _added(
    tokens: Sequence[str],
    kinds: Sequence[int],
    which: Iterable[int],
    taking_space: Collection[str] = (),
    *,
    special: bool,
) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False, rstrip=token in taking_space)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in which and token
    ]


class _Metadata:
    """The tokenizer's part of a file's metadata."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self._file = file

    def get(self, key: str) -> Any:
        return self._values.get(_PREFIX + key)

    def strings(self, key: str) -> list[str]:
        values = self.get(key)
        # By a set of types, since a vocabulary has a quarter of a million strings.
        if not isinstance(values, list) or set(map(type, values)) - {str}:
            raise self.refuse(key, "must be a list of strings")
        return values

    def name(self, key: str) -> str:
        """A name; empty where the file has none."""
        value = self.get(key)
        if not isinstance(value, str | None):
            raise self.refuse(key, "must be a name")
        return value or ""

    def flag(self, key: str) -> bool | None:
        """A boolean of the metadata; None if the file does not have it."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def integers(self, key: str, count: int, default: int) -> list[int]:
        import numpy as np

        values = self.get(key)
        if isinstance(values, np.ndarray) and values.dtype.kind not in "iu":
            raise self.refuse(key, "must be a list of integers")
        return [int(value) for value in self.numbers(key, count, default)]

    def numbers(self, key: str, count: int, default: float = 0.0) -> list[float]:
        import numpy as np

        values = self.get(key)
        if values is None:
            return [default] * count
        if not isinstance(values, np.ndarray) or len(values) != count:
            raise self.refuse(key, f"must be a number for each of {count} tokens")
        if np.isnan(values).any():
            raise self.refuse(key, "has values that are no numbers")
        return list(values.tolist())

    def token_id(self, key: str, count: int) -> int | None:
        value = self.get(key)
        if value is None or (type(value) is int and value in _NO_TOKEN):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self.refuse(key, f"must be a token id below {count}")
        return value

    def refuse(self, key: str, why: str) -> ModelLoadError:
        shown = repr(self.get(key))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return ModelLoadError(f"{_PREFIX}{key}={shown}: {why}", file=self._file)
