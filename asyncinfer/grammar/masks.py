"""Token masks: which tokens may come next, a bit each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

from asyncinfer.grammar.matcher import Matcher

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["allowed_ids", "fill_masks", "mask_words"]

I32: TypeAlias = "npt.NDArray[np.int32]"
I64: TypeAlias = "npt.NDArray[np.int64]"


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


def fill_masks(matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]] = ()) -> I32:
    """int32 `[masks, words]`: bit `i % 32` of word `i // 32` says whether token `i` may follow. A
    matcher has a mask, and one more after each token of its draft, which has to fit.

    Args:
        drafts: one for each matcher; none at all without any.

    The work is done in parallel, without the GIL. A matcher that fails allows the end of the text
    alone, and says so when it is told the next token.
    """
    # Imported here: a command line that only shows help does without, and so does an engine without
    # constrained requests.
    import numpy as np
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    began = time.perf_counter()
    first = matchers[0]
    count = len(matchers) + sum(map(len, drafts))
    masks = np.empty((count, first.words), np.int32)
    plain, drafted, row = [], [], 0
    for matcher, draft in zip(matchers, drafts or repeat(()), strict=False):
        if draft:
            drafted.append((matcher.state, row, list(draft)))
        else:
            plain.append((matcher.state, row))
        row += 1 + len(draft)
    if plain:
        fill_next_token_bitmask_par(first.executor, plain, masks)
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(first.executor, drafted, masks)
    first.counters.masks += count
    first.counters.mask_seconds += time.perf_counter() - began
    return masks


def allowed_ids(mask: I32, vocab_size: int) -> I64:
    """The tokens of one mask, int32 `[words]`, in order."""
    import numpy as np

    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little"))
