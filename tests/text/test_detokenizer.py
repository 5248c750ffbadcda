"""The deltas of a `Detokenizer` are the whole decode, and never half a character. # fault 32"""

from __future__ import annotations

import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text import backends
from tokenizers import decoders

from asyncinfer import Engine, InvalidRequest
from asyncinfer.testing import FakeModel
from asyncinfer.text import Detokenizer, StopStrings, Tokenizer

BAD = "�"
BYTE_LEVEL = backends.byte_level()
LLAMA, GEMMA = backends.sentencepiece(strip=1), backends.sentencepiece(strip=0)


def ids_of(backend: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, some past the vocabulary, with a liking for tokens that are not single bytes."""
    size = backend.get_vocab_size()
    late = max(0, size - 30)
    return st.lists(st.one_of(st.integers(0, size + 3), st.integers(late, size - 1)), max_size=30)


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@given(ids=ids_of(BYTE_LEVEL))
def test_byte_level_is_the_librarys_decode(ids: list[int]) -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    whole = BYTE_LEVEL.decode(ids)
    assert "".join(deltas(tokenizer, ids)) == whole == tokenizer.decode(ids)


@given(ids=ids_of(BYTE_LEVEL))
def test_a_table_filled_by_others_changes_nothing(ids: list[int]) -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    first = deltas(tokenizer, ids)
    assert deltas(tokenizer, ids) == first


@given(text=st.text(max_size=40), cut=st.integers(0, 3))
def test_a_valid_text_shows_no_replacement_before_its_end(text: str, cut: int) -> None:
    tokenizer = Tokenizer.byte_level(add_bos=False)
    data = text.encode()[: -cut or None]
    shown = deltas(tokenizer, list(data))
    assert "".join(shown[:-1]) == data.decode(errors="ignore")
    assert set(shown[-1]) <= {BAD}


def naive_sentencepiece(backend: tokenizers.Tokenizer, ids: list[int], strip: int) -> str:
    """The library's rules, but a malformed run of bytes keeps the characters before the fault."""
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    text, run = "", b""
    for token in [*(backend.id_to_token(i) for i in ids if i not in special), ""]:
        if token is None:
            continue
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        if byte:
            run += bytes([int(byte[1], 16)])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError as error:
            text += run[: error.start].decode() + BAD * (len(run) - error.start)
        run = b""
        text += token.replace("▁", " ")
    kept = text.lstrip(" ")
    return text[min(strip, len(text) - len(kept)) :]


@pytest.mark.parametrize(("backend", "strip"), [(LLAMA, 1), (GEMMA, 0)], ids=["llama", "gemma"])
def test_sentencepiece(backend: tokenizers.Tokenizer, strip: int) -> None:
    tokenizer = Tokenizer(backend)

    @given(ids=ids_of(backend))
    def check(ids: list[int]) -> None:
        whole = "".join(deltas(tokenizer, ids))
        assert whole == tokenizer.decode(ids) == naive_sentencepiece(backend, ids, strip)
        if BAD not in backend.decode(ids):
            assert whole == backend.decode(ids)

    check()


@pytest.mark.parametrize("backend", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_sentencepiece_text_survives(backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(backend)

    @given(text=st.text(alphabet=st.sampled_from("def ☃é\nab🐍x"), max_size=20))
    def check(text: str) -> None:
        shown = deltas(tokenizer, tokenizer.encode(text, add_special_tokens=False))
        assert "".join(shown) == text
        assert shown[-1] == ""

    check()


def test_a_run_of_bytes_streams_character_by_character() -> None:
    tokenizer = Tokenizer(GEMMA)
    ids = [1 + byte for byte in "\n☃".encode()]
    assert deltas(tokenizer, ids) == ["\n", "", "", "☃", ""]


def test_the_librarys_answer_for_a_run_cut_short() -> None:
    ids = [1 + byte for byte in "🐍".encode()[:3]]
    assert deltas(Tokenizer(GEMMA), ids) == ["", "", "", BAD * 3]
    assert GEMMA.decode(ids) == BAD * 3


@pytest.mark.parametrize("kind", sorted(backends.OTHERS))
def test_other_decoders(kind: str) -> None:
    backend = backends.OTHERS[kind]()
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(0) is None

    @given(ids=st.lists(st.integers(0, backend.get_vocab_size() + 1), max_size=80))
    def check(ids: list[int]) -> None:
        assert "".join(deltas(tokenizer, ids)) == backend.decode(ids)

    check()


def test_special_tokens_add_nothing_even_inside_a_character() -> None:
    tokenizer = Tokenizer.byte_level()
    first, *rest = "☃".encode()
    assert deltas(tokenizer, [256, first, 257, *rest, 257]) == ["", "", "", "", "☃", "", ""]


def test_an_id_without_a_token_does_not_end_a_run_of_bytes() -> None:
    beyond = GEMMA.get_vocab_size() + 5
    first, *rest = [1 + byte for byte in "☃".encode()]
    assert deltas(Tokenizer(GEMMA), [first, beyond, *rest]) == ["", "", "", "☃", ""]


@pytest.mark.parametrize("backend", [BYTE_LEVEL, LLAMA, GEMMA])
def test_what_cannot_be_an_id_is_refused(backend: tokenizers.Tokenizer) -> None:
    detokenizer = Detokenizer(Tokenizer(backend))
    before = "".join(map(detokenizer.push, range(backend.get_vocab_size())))
    assert before
    for wrong in (-1, -3000, 2**31):
        with pytest.raises(InvalidRequest, match=f"^token_id={wrong}: must be between 0 and"):
            detokenizer.push(wrong)


def test_flush_twice_gives_nothing_twice() -> None:
    detokenizer = Detokenizer(Tokenizer.byte_level())
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.flush() == BAD
    assert detokenizer.flush() == ""


MIXED = {
    "metaspace": [decoders.Metaspace(prepend_scheme="always")],
    "fused": [decoders.Fuse(), decoders.Replace("▁", " ")],
}


@pytest.mark.parametrize("steps", list(MIXED.values()), ids=list(MIXED))
def test_a_malformed_byte_does_not_silence_what_follows(steps: list[decoders.Decoder]) -> None:
    tokenizer = Tokenizer(backends.byte_fallback(*steps))
    the, end, word = 256, 257, 258
    ids = [the, 0xC3, 0xA9, 0xE3, word, *[the, end, word] * 20]
    shown = deltas(tokenizer, ids)
    text = "".join(shown)
    assert text.lstrip() == f"theé{BAD}word" + " the endword" * 20
    assert tokenizer.decode(ids) == text
    # Every word comes with its own token.
    assert [part.strip() for part in shown[-4:]] == ["the", "end", "word", ""]
    watch = StopStrings((" end",))
    assert any(watch.push(part)[1] for part in shown)


@pytest.mark.parametrize("steps", list(MIXED.values()), ids=list(MIXED))
def test_a_run_of_bytes_is_shown_character_by_character(steps: list[decoders.Decoder]) -> None:
    tokenizer = Tokenizer(backends.byte_fallback(*steps))
    text = "☃é🐍x" * 20
    shown = deltas(tokenizer, list(text.encode()))
    assert [part for part in shown if part] == list(text)
    # A run that breaks off: what was shown stays, every other byte is U+FFFD.
    broken = deltas(tokenizer, [*"☃".encode(), 0xE2, 0x98, 258])
    assert broken == ["", "", "☃", "", "", BAD * 2 + "word", ""]


def test_a_decoder_that_fails_costs_its_token_only(capfd: pytest.CaptureFixture[str]) -> None:
    # It panics for a text of nothing but the space.
    steps = [decoders.Replace("▁", ""), decoders.Strip(" ", 0, 1)]
    tokenizer = Tokenizer(backends.byte_fallback(*steps))
    assert "".join(deltas(tokenizer, [256, 259, 258])) == tokenizer.decode([256, 259, 258])
    assert tokenizer.decode([256, 259, 258]) == f"the{BAD}word"
    assert "panicked" in capfd.readouterr().err


@pytest.mark.parametrize("prompt", ["The capital is", "x\n", "é"])
def test_a_completion_keeps_its_first_space(prompt: str) -> None:
    tokenizer = Tokenizer(LLAMA)
    before = tokenizer.encode(prompt, add_special_tokens=False)
    a, space_def = (LLAMA.token_to_id(token) for token in ("a", "▁def"))

    def after(ids: list[int], *answer: int) -> str:
        return Detokenizer(tokenizer, ids).decode(answer)

    assert after(before, space_def, a) == " defa"
    assert prompt + after(before, space_def) == tokenizer.decode([*before, space_def])
    # A text of its own starts without one.
    end, nothing = LLAMA.token_to_id("</s>"), LLAMA.get_vocab_size() + 7
    for ids in ([], [end], [*before, end], [end, nothing]):
        assert after(ids, space_def, a) == "defa"


@pytest.mark.anyio
async def test_prompt_and_completion_read_on_in_an_engine() -> None:
    tokenizer, spaces = Tokenizer(backends.sentencepiece()), 0
    async with Engine(FakeModel(tokenizer=tokenizer)) as engine:
        for turn in range(100):
            prompt = f"{'a' * (turn % 60)} b"
            done = await engine.generate(prompt, max_tokens=2, ignore_eos=True, seed=turn)
            whole = tokenizer.decode([*tokenizer.encode(prompt), *done.token_ids])
            assert prompt + done.text == whole
            spaces += done.text.startswith(" ")
    assert spaces
