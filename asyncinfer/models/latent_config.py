"""The configs of latent attention and of the indexer that makes it sparse."""

from __future__ import annotations

from dataclasses import dataclass

from asyncinfer.layers import check_flags, check_integers, refuse
from asyncinfer.models.bounds import MOST_HEADS, MOST_WIDTH

__all__ = ["IndexerConfig", "LatentConfig"]

_MOST_CHOSEN = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """The indexer of sparse attention (DeepSeek-V3.2, 2025): small heads score the tokens before a
    token, and it attends to those with the best scores."""

    #: Heads of its queries, and their dimensions; a token has one key.
    heads: int
    size: int
    #: How many tokens a token attends to, itself among them if its score is good enough.
    most: int
    #: In the checkpoint, dimensions that are rotated together are adjacent.
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "interleaved")
        check_integers(self, "heads", low=1, high=MOST_HEADS)
        check_integers(self, "size", low=1, high=MOST_WIDTH)
        check_integers(self, "most", low=1, high=_MOST_CHOSEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are made from
    one small vector per token, which is what the cache holds. `ModelConfig.head_dim` is that of the
    cache, `held`, with one KV head."""

    #: Size of the vector that queries are made from; None: they are made from the hidden state.
    query_rank: int | None
    kv_rank: int
    #: Dimensions of a query or key head that are not rotated, and that are.
    plain: int
    rotated: int
    #: Dimensions of a value head.
    value: int
    #: In the checkpoint, dimensions that are rotated together are adjacent.
    interleaved: bool = True
    #: What chooses the tokens that a token attends to; None: it attends to all before it.
    indexer: IndexerConfig | None = None

    def __post_init__(self) -> None:
        if self.query_rank is not None:
            check_integers(self, "query_rank", low=1, high=MOST_WIDTH)
        check_integers(self, "kv_rank", "plain", "rotated", "value", low=1, high=MOST_WIDTH)
        if self.rotated % 2:
            raise refuse(self, "rotated", "must be even")
        check_flags(self, "interleaved")
        indexer = self.indexer
        if not isinstance(indexer, IndexerConfig | None):
            raise refuse(self, "indexer", "must be an IndexerConfig, or None")
        if indexer is not None and self.query_rank is None:
            raise refuse(self, "indexer", "needs query_rank")
        if indexer is not None and indexer.size < self.rotated:
            raise refuse(self, "indexer", f"must have a size of rotated={self.rotated} at least")

    @property
    def held(self) -> int:
        """Dimensions of the vector that the cache holds of a token, the indexer's key among
        them."""
        return self.kv_rank + self.rotated + (0 if self.indexer is None else self.indexer.size)
