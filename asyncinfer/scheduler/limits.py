"""Whether a request can ever be computed."""

from __future__ import annotations

from bisect import bisect_right

from asyncinfer.bounds import MAX_PROMPT_SCORES
from asyncinfer.cache.window_pages import steady_pages
from asyncinfer.errors import InvalidRequest, PromptTooLong, Size
from asyncinfer.scheduler.step_runner import RunnerSpec

__all__ = ["check_fits", "check_guided"]


def check_fits(
    spec: RunnerSpec, prompt_len: int, max_tokens: int | None, prompt_logprobs: int | None = None
) -> int:
    """The most tokens a request may come to, prompt and answer together.

    Clipped to the context. A request whose prompt and one token fit, but whose worst case is
    larger than the whole pool, is refused if it asked for that many tokens, and clipped if it
    left the number open. A pure function, usable from any thread.

    Raises:
        PromptTooLong: it can never fit the context or the pool.
        InvalidRequest: its answer can never fit the pool, its prompt logprobs are too many to hold,
            or the runner gives vectors alone and more is wanted.
    """
    context = spec.max_context
    held = spec.num_blocks * spec.block_size
    # The last token of an answer is never computed, so it needs no room.
    most = held + 1
    if prompt_len < 1:
        raise InvalidRequest("prompt", Size(f"{prompt_len} tokens"), "must hold at least one token")
    if spec.whole_prompts:
        vectors = "this model's tokens see each other: it gives vectors of texts (`embed`) alone"
        if max_tokens != 0:
            raise InvalidRequest("max_tokens", max_tokens, f"must be 0, since {vectors}")
        if prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs", prompt_logprobs, f"must be None, since {vectors}"
            )
    # An answer that is wanted has one token at least.
    longest = context if max_tokens == 0 else context - 1
    if prompt_len > longest:
        bound = f"at most {longest} fit the context of {context} tokens ({spec.context_bound})"
        raise PromptTooLong("prompt", Size(f"{prompt_len} tokens"), bound)
    if prompt_len >= most:
        bound = f"at most {held} fit the KV cache; a larger kv_bytes holds more"
        raise PromptTooLong("prompt", Size(f"{prompt_len} tokens"), bound)
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


def check_guided(
    spec: RunnerSpec, prompt_len: int, negative_len: int, total: int, max_tokens: int | None
) -> int:
    """`total`, which `check_fits` gave for the prompt, or less: so much that a guide of a negative
    prompt fits beside it, with an answer of the same length.

    Raises:
        InvalidRequest: the two can never be computed together.
    """
    scale, size = "guidance_scale", spec.block_size
    if not spec.guides:
        raise InvalidRequest(scale, Size("two sequences"), "this model computes no guides")
    for name, most in (("max_running", spec.max_slots), ("max_step_tokens", spec.max_step_tokens)):
        if most < 2:
            raise InvalidRequest(scale, Size("two sequences"), f"needs {name} >= 2, not {most}")
    for group in spec.groups:
        if group.window is not None and group.num_pages < 2 * steady_pages(group.window, size):
            held = "pages of states hold" if group.state else "KV of layers with a window holds"
            bound = f"the {held} one; a larger kv_bytes holds more"
            raise InvalidRequest(scale, Size("two sequences"), bound)

    def blocks(answer: int) -> int:
        # The last token of an answer is never computed.
        return sum(-(-(length + answer - 1) // size) for length in (prompt_len, negative_len))

    most = min(total - prompt_len, spec.max_context - negative_len)
    fits = bisect_right(range(most + 1), spec.num_blocks, key=blocks) - 1
    if fits < 1:
        bound = (
            f"prompt, negative prompt and answer must fit the context of {spec.max_context} tokens "
            f"and, together, a KV cache of {spec.num_blocks} blocks of {size}"
        )
        raise InvalidRequest("negative_prompt", Size(f"{negative_len} tokens"), bound)
    if max_tokens is not None and fits < most:
        bound = f"at most {fits}, so that the KV cache holds both sequences of guidance_scale"
        raise InvalidRequest("max_tokens", max_tokens, bound)
    return prompt_len + fits
