"""The right answer of the fake model, as a pure function of the request.

    kv[p]     = kv[p - 1] * A + mix(token[p] + 1)             (kv[-1] = 0)
    digest[p] = digest[p - 1] + kv[p] * (mix(p) | 1)          (digest[-1] = 0)
    token[p + 1] = a hash of digest[p], and of (seed, p) when the request is sampled

With windows there is one more layer for each, which adds what it sees through its window:

    near[i, p] = mix(kv[p - 1] ^ mix(token[p] + 1) ^ i)
    seen[i, p] = sum of near[i, j] * (mix(j) | 1) over p - window[i] < j <= p
    kv[p]      = kv[p - 1] * A + mix(token[p] + 1) + sum of seen[i, p] over i

A layer with a state is such a layer as well, whose window is `STATE`:

    seen[i, p] = mix(seen[i, p - 1] + near[i, p])             (seen[i, -1] = 0)

and what it stores is `seen`, once for each block.

All modulo 2**64. `kv` and each `near` lie in the pages of a KV group of their own; the
digest covers every entry read through the block table, so one stale, shared or unwritten entry
changes every later token. An adapter is a number: it is kv[-1], and its mix is added to each digest
that a token is drawn by. Without windows both recurrences are linear in the previous value, so
that a whole chunk is a few numpy calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Final

from asyncinfer.cache import KVGroupSpec
from asyncinfer.chunk import TokenLogprob
from asyncinfer.params import SamplingParams

__all__ = [
    "EOS_ID",
    "STATE",
    "RunningHash",
    "Seen",
    "WindowSum",
    "adapted",
    "added",
    "answer_digests",
    "begin",
    "fake_kv",
    "fake_logprob",
    "guided",
    "guided_oracle",
    "mix",
    "next_token",
    "oracle",
    "weight",
    "windows_of",
]

MASK: Final = 2**64 - 1
A: Final = 0xD1342543DE82EF95
#: The fake model's end-of-text token; drawn only with `eos_every`.
EOS_ID: Final = 0
#: In a list of windows: a layer that keeps a state.
STATE: Final = 0


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
    """An entry's weight in a sum, by its position."""
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


class RunningHash:
    """The state of a layer that keeps one, after the tokens so far."""

    def __init__(self, state: int = 0) -> None:
        self._state = state

    def add(self, entry: int) -> int:
        """Move on to the next position, which has this entry; gives the state."""
        self._state = mix((self._state + entry) & MASK)
        return self._state


#: What a layer beside the first sees of the tokens before.
Seen = WindowSum | RunningHash


def begin(windows: Sequence[int]) -> list[Seen]:
    """What each window's layer sees before the first token."""
    return [WindowSum(window, 0) if window else RunningHash() for window in windows]


def fake_kv(tokens: Sequence[int], windows: Sequence[Seen], kv: int = 0) -> list[tuple[int, ...]]:
    """`kv` and what each window's layer stores, of tokens one after another; `kv` before them.
    Moves the windows on."""
    stored = []
    for token in tokens:
        mixed = added(token)
        nears = [mix(kv ^ mixed ^ i) for i in range(len(windows))]
        seen = [window.add(near) for window, near in zip(windows, nears, strict=True)]
        kv = (kv * A + mixed + sum(seen)) & MASK
        for i, window in enumerate(windows):
            if isinstance(window, RunningHash):
                nears[i] = seen[i]
        stored.append((kv, *nears))
    return stored


def adapted(digest: int, adapter: int) -> int:
    """The digest that a token is drawn by, with its adapter mixed in; 0 is no adapter."""
    return (digest + mix(adapter)) & MASK if adapter else digest


def guided(digest: int, guide: int, scale: float) -> int:
    """The digest that a guided request draws by, of its own and its guide's."""
    return mix(digest ^ mix((guide + hash(scale)) & MASK))


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
    adapter: int = 0,
    sampler: Callable[[int, int], int] | None = None,
) -> list[int]:
    """The first `count` tokens of the answer, past any stop token it holds. `sampler`: what sampler
    plugins make of a draw, and of how many were drawn before it."""
    kv, digest = adapter, 0
    known = list(prompt_ids)
    last = len(known) - 1
    key = None if params.greedy else seed
    seen = begin(windows)
    for p in range(last + count):
        if seen:
            ((kv, *_),) = fake_kv(known[p : p + 1], seen, kv)
        else:
            kv = (kv * A + added(known[p])) & MASK
        digest = (digest + kv * weight(p)) & MASK
        if p >= last:
            barred = stop_ids if p - last < params.min_tokens else ()
            token = next_token(
                adapted(digest, adapter),
                p,
                seed=key,
                vocab_size=vocab_size,
                eos_every=eos_every,
                barred=barred,
            )
            known.append(token if sampler is None else sampler(token, p - last))
    return known[last + 1 :]


def guided_oracle(
    prompt_ids: Sequence[int],
    negative_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    count: int,
    *,
    vocab_size: int,
    eos_every: int | None = None,
    stop_ids: Collection[int] = (),
    windows: Sequence[int] = (),
    adapter: int = 0,
) -> list[int]:
    """`oracle` for a request that `params.guidance_scale` guides away from `negative_ids`."""
    answer: list[int] = []
    given, free = (_Digests(ids, windows, adapter) for ids in (prompt_ids, negative_ids))
    while len(answer) < count:
        token = next_token(
            adapted(guided(given.digest, free.digest, params.guidance_scale), adapter),
            len(prompt_ids) - 1 + len(answer),
            seed=None if params.greedy else seed,
            vocab_size=vocab_size,
            eos_every=eos_every,
            barred=stop_ids if len(answer) < params.min_tokens else (),
        )
        answer.append(token)
        given.add(token)
        free.add(token)
    return answer


class _Digests:
    """The digest of a growing sequence."""

    def __init__(self, tokens: Sequence[int], windows: Sequence[int], adapter: int) -> None:
        self.digest, self._position, self._kv = 0, 0, adapter
        self._seen = begin(windows)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        ((self._kv, *_),) = fake_kv((token,), self._seen, self._kv)
        self.digest = (self.digest + self._kv * weight(self._position)) & MASK
        self._position += 1


def answer_digests(
    prompt_ids: Sequence[int], answer: Sequence[int], windows: Sequence[int] = (), adapter: int = 0
) -> list[int]:
    """What each token of an answer was drawn by, whatever rule drew it."""
    kv, digest, found = adapter, 0, []
    seen = begin(windows)
    known = [*prompt_ids, *answer]
    for p in range(len(known) - 1):
        ((kv, *_),) = fake_kv(known[p : p + 1], seen, kv)
        digest = (digest + kv * weight(p)) & MASK
        if p >= len(prompt_ids) - 1:
            found.append(adapted(digest, adapter))
    return found


def windows_of(groups: Sequence[KVGroupSpec]) -> list[int]:
    """The windows of the groups beside the first, as the functions here take them."""
    return [STATE if group.state else group.window or 0 for group in groups[1:]]


def fake_logprob(
    token: int,
    position: int,
    alternatives: int,
    vocab_size: int,
    ids: tuple[int, ...] | None = None,
) -> TokenLogprob:
    """The logprob entry the fake model gives for `token` at `position`: rank 1, and the
    following ids, or `ids`, as its alternatives."""
    # A value that float32 holds exactly.
    best = -(mix(token * A ^ position) % 1000) / 1024
    steps = list(range(min(alternatives, vocab_size)))
    if ids is not None:
        steps = sorted((each - token) % vocab_size for each in ids)
    top = tuple(((token + i) % vocab_size, best - i) for i in steps)
    return TokenLogprob(token, best, 1, top)
