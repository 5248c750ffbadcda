"""`Tokenizer`: text to token ids and back, through the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import tokenizers

from asyncinfer.errors import InvalidRequest, ModelLoadError, Size, renaming
from asyncinfer.text.bytelevel import byte_level_backend
from asyncinfer.text.detokenizer import Detokenizer
from asyncinfer.text.longest_token import extent, longest_token
from asyncinfer.text.panic import panicked
from asyncinfer.text.pieces import PieceTable, decoder_kind
from asyncinfer.text.shield import Shield, check_text
from asyncinfer.text.tokenizer_files import load_backend, named_ids, with_tokens_below
from asyncinfer.text.word_cache import keep_no_prompts

__all__ = ["Tokenizer"]

#: Tokens of a vocabulary; published ones have 300,000.
MAX_VOCABULARY: Final = 1 << 24
#: Special tokens that the messages of a chat may spell out.
MAX_COVERED: Final = 10_000


class Tokenizer:
    """Turns text into token ids and back. Immutable after construction; safe from any thread.

    `encode` and `decode` release the GIL while the library works, so that a long prompt does not
    stop the host. They block their caller, so call them off the event loop.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        left_out: tuple[str, ...] = (),
    ) -> None:
        """`backend` belongs to this object from now on: truncation and padding are switched off.
        `left_out` names tokens of the model's files that it does not have."""
        self._left_out = left_out
        backend.no_truncation()
        backend.no_padding()
        keep_no_prompts(backend)
        self._backend = backend
        #: The largest token id, plus one.
        self.vocab_size, longest = extent(backend)
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(f"has a token id of {self.vocab_size - 1} >= {MAX_VOCABULARY}")
        #: The token that opens a text, None without one.
        self.bos_id: int | None = bos_id
        #: The tokens that end a text.
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        added = backend.get_added_tokens_decoder()
        #: Tokens that are no text: `decode` skips them.
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        #: Tokens that were added to the vocabulary, special ones and others, by their text.
        self.added_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in added.items()
        }
        #: Keeps special tokens out of chat messages.
        self.shield = Shield(
            {token.content: token.normalized for token in added.values() if token.special},
            str if backend.normalizer is None else partial(_normalised, backend.normalizer),
            {token.content: token.normalized for token in added.values() if not token.special},
        )
        #: The most characters of a text that one token stands for; None if there is no bound.
        self.longest_token: int | None = longest_token(backend, longest)
        #: What each token adds to a text; shared by every `Detokenizer`.
        self.pieces = PieceTable(backend, decoder_kind(backend), self.vocab_size, self.special_ids)

    @classmethod
    def from_folder(cls, path: Path, rows: int | None = None) -> Tokenizer:
        """Read `tokenizer.json` and what the files beside it say about special tokens.

        `rows` is how many tokens the model has an embedding for. Added tokens beyond are left out:
        they stand for no text, as the one that images replace does in Gemma 3's models of text.
        Raises `ModelLoadError`, naming the file.
        """
        backend = load_backend(path)
        beyond: tuple[str, ...] = ()
        if rows is not None:
            backend, beyond = with_tokens_below(backend, rows)
        bos_id, eos_ids = named_ids(path, backend)
        try:
            return cls(backend, bos_id=bos_id, eos_ids=eos_ids, left_out=beyond)
        except BaseException as error:
            if not panicked(error):
                raise
            file = str(path / "tokenizer.json")
            raise ModelLoadError(f"not a tokenizer: {error}", file=file) from error

    @classmethod
    def byte_level(cls, *, add_bos: bool = True, eos_id: int = 257) -> Tokenizer:
        """A tokenizer without a file: token `b` is the byte `b`, 256 opens a text and 257 (or
        `eos_id`) ends it.

        For fake models, tests and benchmarks.
        """
        return cls(byte_level_backend(add_bos=add_bos), bos_id=256, eos_ids=[eos_id])

    @property
    def notes(self) -> tuple[str, ...]:
        """Which tokens of the model's files were left out."""
        if not self._left_out:
            return ()
        first, more = ", ".join(self._left_out[:3]), len(self._left_out) - 3
        some = f"{first} and {more} more" if more > 0 else first
        return (f"tokens that the model has no embedding for are read as text: {some}",)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `InvalidRequest` for a lone surrogate, which is not valid
        Unicode, and for a text that the tokenizer fails for."""
        check_text("prompt", text)
        try:
            # Not `encode`, which holds the GIL. A batch of one runs on the calling thread.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not panicked(error):
                raise
            raise InvalidRequest("prompt", text, f"the tokenizer fails for it: {error}") from error
        return batch[0].ids

    def encode_chat(self, text: str, *, inner: bool = False) -> list[int]:
        """Token ids of a rendered chat. Special tokens that the template wrote are special tokens;
        those that `shield` has marked are plain text. `inner`: it follows other text."""
        first, *others = self.shield.pieces(text)
        if len(others) > MAX_COVERED:
            # Bounded, since each piece is tokenised by itself.
            raise InvalidRequest(
                "messages",
                Size(f"{len(others)} spelled-out special tokens"),
                f"at most {MAX_COVERED}",
            )
        begun = self._inner(first) if inner else self._plain(first)
        return begun + [token for piece in others for token in self._inner(piece)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; malformed bytes become U+FFFD, ids without a token are skipped.

        With `skip_special_tokens` it is exactly what a `Detokenizer` gives piece by piece.
        """
        text = self.pieces.decode(list(ids), skip_special_tokens)
        if skip_special_tokens and self.pieces.kind.byte_fallback and "\ufffd" in text:
            # If one byte of a run is malformed, the library turns the whole run into U+FFFD, of
            # which a stream has shown the first characters already.
            return Detokenizer(self).decode(ids)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that the token adds to a text; None if that depends on its neighbours, so that
        only a `Detokenizer` knows. An id without a token adds nothing."""
        return self.pieces.bytes_of(token_id)

    def special_id(self, text: str) -> int | None:
        """The id of the special token `text`; None if there is none."""
        # Not by the library, which has a text keep its bytes in UTF-8 for as long as it lives.
        token_id = self.added_tokens.get(text)
        return token_id if token_id in self.special_ids else None

    def encode_inner(self, text: str, field: str = "prompt") -> list[int]:
        """Token ids of `text` as it follows other text. Raises what `encode` does, of `field`."""
        check_text(field, text)
        with renaming("prompt", field):
            return self._inner(text)

    def difference(self, other: Tokenizer) -> tuple[int, str | None, str | None] | None:
        """The first token id that stands for something else in the other's vocabulary, with its
        text here and there, None for no token; None where the vocabularies are the same."""
        ours, theirs = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        if ours == theirs:
            return None
        token = min(number for _, number in ours.items() ^ theirs.items())
        here, there = (
            {number: text for text, number in each.items()}.get(token) for each in (ours, theirs)
        )
        return token, here, there

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        text: str = self._backend.to_str()
        return text

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The ways `word` is written as tokens: at the start of a text, after a space, and
        directly after something else."""
        check_text("bad_words", word)
        found = [self._plain(word), self._plain(" " + word), self._inner(word)]
        return tuple(dict.fromkeys(tuple(ids) for ids in found if ids))

    def _plain(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _inner(self, text: str) -> list[int]:
        """Token ids of `text` as it follows other text. SentencePiece puts a space before a text,
        so `text` is tokenised after an anchor, whose tokens are cut off."""
        anchor, anchored = self._plain("\n"), self._plain("\n" + text)
        if anchored[: len(anchor)] == anchor:
            return anchored[len(anchor) :]
        return self._plain(text)


def _normalised(normalizer: Any, text: str) -> str:
    try:
        normal: str = normalizer.normalize_str(text)
    except BaseException as error:
        if not panicked(error):
            raise
        # `encode` fails for the text too, and reports it.
        return text
    return normal
