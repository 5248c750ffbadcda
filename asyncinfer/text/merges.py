"""`all_merges`: the merges of a vocabulary that has only ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["LONGEST", "all_merges"]

#: The most characters of a token, checked by its reader: the time of splits grows with the square.
LONGEST: Final = 512


def all_merges(ranked: Iterable[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every split of a token into two others, in the order of `ranked`: tokenizers without a list
    of merges always join the two neighbours whose token comes first."""
    found = []
    for token in ranked:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        found += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return found
