"""Random ids through decoders of every kind, beside the library's own decode. # fault 32"""

from __future__ import annotations

import tokenizers
from fuzzing import fuzz
from hypothesis import assume, given
from hypothesis import strategies as st
from text.test_stop import naive
from tokenizers import decoders, models

from asyncinfer.text import Detokenizer, StopStrings, Tokenizer
from asyncinfer.text.bytelevel import BYTE_TO_CHAR

BAD = "\N{REPLACEMENT CHARACTER}"
WORDS = [
    *(
        " ",
        "▁",
        "▁▁",
        "▁a",
        "b▁",
        "a",
        "b",
        "é",
        "☃",
        "##a",
        "##",
        "a</w>",
        "</w>",
        ".",
        " '",
        "n't",
    ),
    *("|", "<pad>", "<unk>", "\n", BAD, "<0x41>", "<0x20>", "<0xC3>", "<0xA9>", "<0xE2>", "<0x98>"),
    *("<0x83>", "<0xF0>", "<0xFF>", "<0x0", "<0x+A>", "<0xe2>", "x|y", "Ġ", "Ġa", "ab"),
    *(BYTE_TO_CHAR[byte] for byte in (0xE2, 0x98, 0x83, 0xC3, 0xA9, 0xFF)),
]
ALIKE = [
    decoders.ByteLevel(),
    decoders.ByteFallback(),
    decoders.Replace("▁", " "),
    decoders.Replace("a", ""),
    decoders.Metaspace(),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.Metaspace(prepend_scheme="first"),
    decoders.WordPiece(),
    decoders.WordPiece(prefix="##", cleanup=False),
    decoders.BPEDecoder(),
    decoders.CTC(),
    decoders.CTC(pad_token="a", cleanup=False),
    decoders.Strip(" ", 1, 0),
    decoders.Strip("a", 2, 0),
]
FUSED = [
    decoders.Fuse(),
    decoders.Replace("▁", " "),
    decoders.Strip(" ", 1, 0),
    decoders.Strip(" ", 2, 0),
    decoders.Metaspace(),
]
STEPS = st.one_of(
    st.lists(st.sampled_from(ALIKE), min_size=1, max_size=3),
    st.lists(st.sampled_from(ALIKE[:6]), max_size=2).flatmap(
        lambda first: st.lists(st.sampled_from(FUSED), min_size=1, max_size=2).map(
            lambda then: [*first, decoders.Fuse(), *then]
        )
    ),
)
IDS = st.one_of(
    st.lists(st.integers(0, len(WORDS) + 3), max_size=60),
    # Long runs of few tokens.
    st.lists(st.sampled_from(range(len(WORDS))), min_size=1, max_size=5).flatmap(
        lambda few: st.lists(st.sampled_from(few), min_size=30, max_size=120)
    ),
)


def tokenizer_of(steps: list[decoders.Decoder]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


def deltas(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def only_grows(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether the library never takes back text that it gave for fewer tokens."""
    whole = tokenizer.pieces.decode(ids)
    texts = (tokenizer.pieces.decode(ids[:end]) for end in range(len(ids)))
    # As far as they hold no unfinished character.
    return all(whole.startswith(text[:-3] + text[-3:].rstrip(BAD)) for text in texts)


@given(steps=STEPS, ids=IDS)
@fuzz(400)
def test_a_stream_is_the_whole_decode(steps: list[decoders.Decoder], ids: list[int]) -> None:
    tokenizer = tokenizer_of(steps)
    text = "".join(deltas(Detokenizer(tokenizer), ids))
    if tokenizer.pieces.kind.byte_fallback and BAD in tokenizer.pieces.decode(ids):
        assert text == tokenizer.decode(ids)
        return
    assume(only_grows(tokenizer, ids))
    assert text == tokenizer.decode(ids) == tokenizer.pieces.decode(ids)


@given(steps=STEPS, ids=IDS, stop=st.sampled_from(["a", "b", " a", "é", "ab", BAD + "a"]))
@fuzz(200)
def test_stop_strings_see_every_text(
    steps: list[decoders.Decoder], ids: list[int], stop: str
) -> None:
    tokenizer = tokenizer_of(steps)
    watch, shown, found = StopStrings((stop,)), "", None
    parts = deltas(Detokenizer(tokenizer), ids)
    for part in parts:
        text, found = watch.push(part)
        shown += text
        if found:
            break
    if found is None:
        assert stop not in "".join(parts)
        assert shown + watch.flush() == "".join(parts)
    else:
        assert (shown, found) == naive((stop,), "".join(parts))


@given(steps=STEPS, ids=IDS)
@fuzz(200)
def test_a_token_costs_a_bounded_look_back(steps: list[decoders.Decoder], ids: list[int]) -> None:
    tokenizer = tokenizer_of(steps)
    decode, most, last = tokenizer.pieces.decode, 0, 0

    def counted(some: list[int], skip: bool = True) -> str:
        nonlocal last
        last += len(some)
        return decode(some, skip)

    tokenizer.pieces.decode = counted  # type: ignore[method-assign]
    detokenizer = Detokenizer(tokenizer)
    for token in ids * 3:
        last = 0
        detokenizer.push(token)
        most = max(most, last)
    # A window of characters, the window that is kept of it, and a look for its context.
    assert most <= 4 * (2 * 25 + 2 * 9 + 25)


@given(steps=STEPS, prompt=IDS, ids=IDS)
@fuzz(200)
def test_what_goes_on_from_a_prompt(
    steps: list[decoders.Decoder], prompt: list[int], ids: list[int]
) -> None:
    tokenizer = tokenizer_of(steps)
    before, whole = tokenizer.pieces.decode(prompt), tokenizer.pieces.decode(prompt + ids)
    assume(prompt and prompt[-1] < len(WORDS) and BAD not in whole)
    assume(only_grows(tokenizer, prompt + ids) and tokenizer.pieces.decode(prompt[-1:]))
    assert before + "".join(deltas(Detokenizer(tokenizer, prompt), ids)) == whole
