"""`Ends`: which ends consumers of a simulated life may have."""

from __future__ import annotations

from typing import Final

from asyncinfer.engine.footprint import (
    drafting_bytes,
    logprob_bytes,
    matcher_bytes,
    prepared_bytes,
    submitted_bytes,
)
from asyncinfer.errors import AsyncInferError, Overloaded
from asyncinfer.params import SamplingParams
from asyncinfer.testing.invariants import hold
from asyncinfer.testing.simulator.consumer import Consumer
from asyncinfer.testing.simulator.formats import chars
from asyncinfer.testing.simulator.samplers import may_fail
from asyncinfer.testing.simulator.vocabulary import prompt_of
from asyncinfer.testing.simulator.world import World
from asyncinfer.text import StopStrings

__all__ = ["LATE", "Ends"]

#: Seconds by which a wait may exceed its time.
LATE: Final = 0.05


class Ends:
    """Checks each end in a life; raises `InvariantError` for one that is not allowed."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: Requests that the engine refused, and whose consumers were told so.
        self.overloads = 0

    def check(self, consumer: Consumer) -> None:
        """Check that a consumer may end as it did."""
        world, outcome, ask = self._world, consumer.outcome, consumer.ask
        allowed = True
        match outcome:
            case "whole":
                # A stream that was closed before its prompt was read ends like any other.
                allowed = consumer.expected is not None or consumer.closed
            case "InvalidRequest" | "PromptTooLong":
                allowed = consumer.expected is None or self._too_large(consumer)
                # A request may name an adapter before its load is done.
                allowed = allowed or (ask.adapter is not None and "adapter" in consumer.message)
            case "DeadlineExceeded":
                allowed = ask.deadline is not None and (
                    world.host.now >= consumer.began + ask.deadline
                )
            case "StreamStalled":
                allowed = ask.on_full == "pause" and (
                    self._unread(consumer) >= world.scenario.stall_timeout
                )
            case "RequestFailed":
                full = ask.on_full == "cancel" and "is full" in consumer.message
                allowed = full or "fault" in consumer.message or "no room" in consumer.message
                allowed = allowed or may_fail(ask.sampler, consumer.message)
            case "EngineClosed":
                allowed = world.state.closing or consumer.early or consumer.closed
            case "StreamBusy":
                # A conversation has one speaker at a time.
                allowed = False
            case "EngineDead":
                allowed = world.state.dead or world.state.doubtful
                if allowed:
                    world.state.die()
        hold("end", allowed, "{}: {}", consumer, consumer.message)

    def refused(self, error: AsyncInferError, *, pin: bool = False) -> None:
        """Check a refusal to load, unload or pin."""
        world = self._world
        self.overloads += pin and isinstance(error, Overloaded)
        match type(error).__name__:
            case "EngineClosed":
                allowed = world.state.closing or not world.state.opened
            case "EngineDead":
                allowed = world.state.dead or world.state.doubtful
                if allowed:
                    world.state.die()
            case "RequestFailed":
                allowed = pin and ("fault" in str(error) or "no room" in str(error))
            case "InvalidRequest":
                allowed = pin and "max_held_bytes" in str(error)
            case other:
                allowed = other == "Overloaded"
        hold("end", allowed, "an adapter or a pin: {}", error)

    def _too_large(self, consumer: Consumer) -> bool:
        """Whether the request would hold more bytes than all requests together may."""
        most, ask = self._world.scenario.max_held_bytes, consumer.ask
        if most is None or "max_held_bytes" not in consumer.message:
            return False
        buffer = ask.buffer if ask.max_tokens is None else min(ask.buffer, ask.max_tokens * ask.n)
        params = SamplingParams(n=ask.n, logprobs=ask.logprobs, prompt_logprobs=ask.prompt_logprobs)
        held = submitted_bytes(prompt_of(ask), buffer, None, tuple(ask.negative))
        for tokens in (ask.prompt, ask.guide):
            blocks = len(tokens) // self._world.scenario.block_size
            held += prepared_bytes(len(tokens), blocks, params)
        held += logprob_bytes(self._world.scenario.max_context, params)
        held += StopStrings.held_bytes(tuple(ask.stop), ask.n)
        if self._world.scenario.wrong_drafts:
            held += drafting_bytes(len(ask.prompt), 0, ask.n)
        if ask.format is not None:
            held += matcher_bytes(chars(ask.format), ask.n)
        return held > most

    def _unread(self, consumer: Consumer) -> float:
        """The longest time before its end for which the consumer could have read, but did not."""
        end = consumer.began + consumer.seconds
        last = max([consumer.began, *(at for at in consumer.reads if at < end)])
        if not consumer.seconds:
            # Dropped, so nobody knows when it ended.
            return float("inf")
        # The engine counts at most one look's seconds of a time in which nothing ran.
        counted = 1.0
        # One that began at its end came after it.
        gone = [seconds - counted for at, seconds in self._world.state.jumps if last <= at < end]
        doubt = counted if gone else LATE
        return end - last - sum(seconds for seconds in gone if seconds > 0) + doubt
