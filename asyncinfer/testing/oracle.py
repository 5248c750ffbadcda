"""The right answer of the fake model, as a pure function of the request.

    kv[p]     = kv[p - 1] * A + mix(token[p] + 1)             (kv[-1] = 0)
    digest[p] = digest[p - 1] + kv[p] * (mix(p) | 1)          (digest[-1] = 0)
    token[p + 1] = a hash of digest[p], and of (seed, p) when the request is sampled

With windows, each of a layer more, that is asked what it sees through it:

    near[i, p] = mix(kv[p - 1] ^ mix(token[p] + 1) ^ i)
    seen[i, p] = sum of near[i, j] * (mix(j) | 1) over p - window[i] < j <= p
    kv[p]      = kv[p - 1] * A + mix(token[p] + 1) + sum of seen[i, p] over i

All modulo 2**64. `kv` and each `near` lie in the pages of a KV group of their own; the
digest covers every entry read through the block table, so one stale, shared or unwritten entry
changes every later token. Without windows both recurrences are linear in the previous value, so
that a whole chunk is a few numpy calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Final

from asyncinfer.chunk import TokenLogprob
from asyncinfer.params import SamplingParams

__all__ = [
    "EOS_ID",
    "WindowSum",
    "added",
    "fake_kv",
    "fake_logprob",
    "mix",
    "next_token",
    "oracle",
    "weight",
]

MASK: Final = 2**64 - 1
A: Final = 0xD1342543DE82EF95
#: The fake model's end-of-text token; drawn only with `eos_every`.
EOS_ID: Final = 0


def mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): 64 bits to 64 bits, one to one."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@lru_cache(1 << 16)
def added(token: int) -> int:
    """What a token adds to the KV."""
    return mix(token + 1)


@lru_cache(1 << 16)
def weight(position: int) -> int:
    """What an entry counts in a sum, by its position."""
    return mix(position) | 1


class WindowSum:
    """The sum over a window that moves on by one position at a time.

    Args:
        position: the next one.
        past: entries of the positions before it that it sees.
    """

    def __init__(self, window: int, position: int, past: Iterable[int] = ()) -> None:
        entries = list(past)
        first = position - len(entries)
        self._window = window
        self._position = position
        self._terms = deque(entry * weight(first + i) for i, entry in enumerate(entries))

    def add(self, entry: int) -> int:
        """Move on to the next position, which has this entry; gives what it sees."""
        self._terms.append(entry * weight(self._position))
        self._position += 1
        if len(self._terms) > self._window:
            self._terms.popleft()
        return sum(self._terms) & MASK


def fake_kv(
    tokens: Sequence[int], windows: Sequence[WindowSum], kv: int = 0
) -> list[tuple[int, ...]]:
    """`kv` and what each window's layer stores, of tokens one after another; `kv` before them.
    Moves the windows on."""
    stored = []
    for token in tokens:
        mixed = added(token)
        nears = [mix(kv ^ mixed ^ i) for i in range(len(windows))]
        seen = sum(window.add(near) for window, near in zip(windows, nears, strict=True))
        kv = (kv * A + mixed + seen) & MASK
        stored.append((kv, *nears))
    return stored


def next_token(
    digest: int,
    position: int,
    *,
    seed: int | None,
    vocab_size: int,
    eos_every: int | None = None,
    barred: Collection[int] = (),
) -> int:
    """The token drawn after `position`. `seed` is None for a greedy request; `barred` tokens are
    stepped over (stop tokens before `min_tokens`)."""
    if seed is not None:
        digest ^= mix((seed + position * A) & MASK)
    h = mix(digest)
    if eos_every is not None and (h >> 40) % eos_every == 0 and EOS_ID not in barred:
        return EOS_ID
    token = 1 + h % (vocab_size - 1)
    while token in barred:
        token = 1 + token % (vocab_size - 1)
    return token


def oracle(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    count: int,
    *,
    vocab_size: int,
    eos_every: int | None = None,
    stop_ids: Collection[int] = (),
    windows: Sequence[int] = (),
) -> list[int]:
    """The first `count` tokens of the answer, past any stop token it holds."""
    kv = digest = 0
    known = list(prompt_ids)
    last = len(known) - 1
    key = None if params.greedy else seed
    seen = [WindowSum(window, 0) for window in windows]
    for p in range(last + count):
        if seen:
            ((kv, *_),) = fake_kv(known[p : p + 1], seen, kv)
        else:
            kv = (kv * A + added(known[p])) & MASK
        digest = (digest + kv * weight(p)) & MASK
        if p >= last:
            barred = stop_ids if p - last < params.min_tokens else ()
            known.append(
                next_token(
                    digest,
                    p,
                    seed=key,
                    vocab_size=vocab_size,
                    eos_every=eos_every,
                    barred=barred,
                )
            )
    return known[last + 1 :]


def fake_logprob(token: int, position: int, alternatives: int, vocab_size: int) -> TokenLogprob:
    """The logprob entry the fake model gives for `token` at `position`: rank 1, and the
    following ids as its alternatives."""
    # Exact in 32 bits.
    best = -(mix(token * A ^ position) % 1000) / 1024
    top = tuple(((token + i) % vocab_size, best - i) for i in range(min(alternatives, vocab_size)))
    return TokenLogprob(token, best, 1, top)
