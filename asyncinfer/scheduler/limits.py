"""Whether a request can ever be computed."""

from __future__ import annotations

from asyncinfer.bounds import MAX_PROMPT_SCORES
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.scheduler.step_runner import RunnerSpec

__all__ = ["check_fits"]


def check_fits(
    spec: RunnerSpec, prompt_len: int, max_tokens: int | None, prompt_logprobs: int | None = None
) -> int:
    """The most tokens a request may come to, prompt and answer together.

    Clipped to the context. A request whose prompt and one token fit, but whose worst case is
    larger than the whole pool, is refused if it asked for that many tokens, and clipped if it
    left the number open. A pure function, usable from any thread.

    Raises:
        InvalidRequest: it can never fit the context or the pool, or its prompt logprobs are too
            many to hold.
    """
    context = spec.max_context
    held = spec.num_blocks * spec.block_size
    # The last token of an answer is never computed, so it needs no room.
    most = held + 1
    if prompt_len < 1:
        raise InvalidRequest("prompt", Size(f"{prompt_len} tokens"), "must hold at least one token")
    if prompt_len >= context:
        bound = f"at most {context - 1} fit the context of {context} tokens ({spec.context_bound})"
        raise InvalidRequest("prompt", Size(f"{prompt_len} tokens"), bound)
    if prompt_len >= most:
        bound = f"at most {held} fit the KV cache; a larger kv_bytes holds more"
        raise InvalidRequest("prompt", Size(f"{prompt_len} tokens"), bound)
    if prompt_logprobs is not None and prompt_len * (1 + prompt_logprobs) > MAX_PROMPT_SCORES:
        bound = (
            f"a prompt of {prompt_len} tokens would have {prompt_len * (1 + prompt_logprobs)} "
            f"logprobs; at most {MAX_PROMPT_SCORES}"
        )
        raise InvalidRequest("prompt_logprobs", prompt_logprobs, bound)
    if max_tokens is None:
        return min(context, most)
    total = min(prompt_len + max_tokens, context)
    if total > most:
        bound = (
            f"at most {most - prompt_len} beside the prompt: the KV cache holds {held} tokens, "
            "and with a larger kv_bytes more"
        )
        raise InvalidRequest("max_tokens", max_tokens, bound)
    return total
