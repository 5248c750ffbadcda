"""Whether a request can ever be computed."""

from __future__ import annotations

from asyncinfer.errors import InvalidRequest
from asyncinfer.scheduler.plan import RunnerSpec

__all__ = ["check_fits"]


def check_fits(spec: RunnerSpec, prompt_len: int, max_tokens: int | None) -> int:
    """The most tokens a request may come to, prompt and answer together.

    Clipped to the context. A request whose prompt and one token fit, but whose worst case is
    larger than the whole pool, is refused if it asked for that many tokens, and clipped if it
    left the number open. A pure function, usable from any thread.

    Raises:
        InvalidRequest: it can never fit the context or the pool.
    """
    context = spec.max_context
    held = spec.num_blocks * spec.block_size
    # The last token of an answer is never computed, so it needs no room.
    most = held + 1
    if prompt_len < 1:
        raise InvalidRequest("prompt", f"{prompt_len} tokens", "must hold at least one token")
    if prompt_len >= context:
        bound = f"at most {context - 1} fit a context of {context}"
        raise InvalidRequest("prompt", f"{prompt_len} tokens", bound)
    if prompt_len >= most:
        bound = f"at most {held} fit the KV cache"
        raise InvalidRequest("prompt", f"{prompt_len} tokens", bound)
    if max_tokens is None:
        return min(context, most)
    total = min(prompt_len + max_tokens, context)
    if total > most:
        bound = f"at most {most - prompt_len} beside the prompt: the KV cache holds {held} tokens"
        raise InvalidRequest("max_tokens", max_tokens, bound)
    return total
