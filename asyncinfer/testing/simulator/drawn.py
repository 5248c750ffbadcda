"""`Drawn`: a scenario, and actions one after another, by chance."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from asyncinfer.testing.simulator.drawn_scenario import draw_scenario, draw_state_pages
from asyncinfer.testing.simulator.formats import FORMATS
from asyncinfer.testing.simulator.life import Life
from asyncinfer.testing.simulator.samplers import SAMPLERS
from asyncinfer.testing.simulator.scenario import Action, Ask
from asyncinfer.testing.simulator.vocabulary import LETTERS

__all__ = ["Drawn"]

_FAULTS: Final = ("row", "memory")
#: Actions after a life is over, so that those who come too late are seen as well.
_AFTERWARDS: Final = 40


class Drawn:
    """`scenario`, and a source of actions for a `Life` of it. Everything follows from the seed.

    Args:
        steps: least and most steps of the model before the life ends.
    """

    def __init__(self, seed: int, steps: tuple[int, int]) -> None:
        self._rng = rng = Random(seed)
        # Draws of their own, so that lives without drafts or samplers stay what they were.
        wrong = Random(~seed).choice((0, 0, 2, 4, 20))
        self._own = own = Random(f"samplers {seed}")
        samplers = own.random() < 0.15
        target = Random(f"pace {seed}").choice((None, None, 0.005, 0.05))
        self.scenario = replace(
            draw_scenario(rng), wrong_drafts=wrong, samplers=samplers, step_target=target
        )
        # The same for conversations: half of those lives have room for all of them.
        self._talking = talking = Random(f"say {seed}")
        self._talks = talking.random() < 0.15
        if self._talks:
            self.scenario = replace(self.scenario, max_held_bytes=None)
        if self._talks and talking.random() < 0.5:
            size = talking.choice((4, 8))
            self.scenario = replace(self.scenario, blocks=1024, block_size=size, max_context=128)
            self.scenario = replace(self.scenario, window=None, prefix_cache=True)
        else:
            pages = draw_state_pages(Random(f"state pages {seed}"), self.scenario)
            self.scenario = replace(self.scenario, state_pages=pages)
        # Another generator for late event loops, so that lives of one seed stay alike.
        self._lateness = late = Random(f"late {seed}")
        self._late = late.random() < 0.15
        # Another generator for requests of no tokens.
        self._no_answer = nothing = Random(f"prompts only {seed}")
        self._prompts_only = nothing.random() < 0.3
        # Another generator for guides.
        self._guiding = guiding = Random(f"guides {seed}")
        self._guided = guiding.random() < 0.15
        self._steps = rng.randint(*steps)
        self._ids = self._after = 0
        self._prefixes = [_letters(rng, 30) for _ in range(3)]
        # What kind of life it is: busy or quiet, smooth or not.
        self._arrivals = rng.choice((0.04, 0.12, 0.25))
        self._most = rng.choice((4, 12, 24))
        self._interrupted = rng.choice((0.0, 0.2, 0.4))
        self._faulty = rng.random() < 0.5
        self._closes = rng.random() < 0.3
        self._closes_early = rng.random() < 0.1
        #: Whether the decode thread, now that it is interrupted, stays so for long.
        self._stuck: bool | None = None
        self._stops = rng.random() < 0.5
        if rng.random() < 0.05:
            self._steps = 3
        self._adapters = 0
        self._formats = rng.random() < 0.15

    def __call__(self, life: Life) -> Action | None:
        rng = self._rng
        if life.seen["steps"] >= self._steps or len(life.trace) > 40 * self._steps:
            return None
        if life.state.over < float("inf"):
            self._after += 1
            if self._after > _AFTERWARDS:
                return None
            if life.state.closing and rng.random() < 0.25:
                return ["cancel_owner"]
        elif self._closes_early and not life.state.opened:
            if rng.random() < 0.25:
                return self._close()
        elif self._closes and rng.random() < 0.01:
            return self._close()
        live = [*life.consumers]
        if self._talks and life.state.opened and self._talking.random() < 0.2:
            return self._talk(life)
        if self._late and self._lateness.random() < 0.1:
            index = self._lateness.randrange(self.scenario.loops)
            return ["late", index, self._lateness.choice((0.02, 0.1, 0.5))]
        if not life.state.hangs:
            self._stuck = None
        elif self._stuck is None:
            self._stuck = rng.random() < 0.2
        if life.state.hangs and rng.random() < (0.8 if self._stuck else 0.2):
            return self._while_it_hangs()
        if rng.random() < self._arrivals and len(live) < self._most:
            ask = self._guide(self._hasty(self._ask()))
            if self._prompts_only and self._no_answer.random() < 0.3:
                ask = replace(ask, max_tokens=0, min_tokens=0)
            if ask.form == "worker" and self._faulty and rng.random() < 0.15:
                # A thread may be about to be started for the first of these.
                return ["refuse_threads", rng.choice((1, 2))]
            return ["submit", ask.to_json()]
        if self.scenario.adapters is not None and rng.random() < 0.04:
            return self._adapter()
        if live and rng.random() < 0.015:
            return [rng.choice(("cancel", "cancel", "stop", "aclose")), rng.choice(live)]
        if rng.random() < (0.05 if self._faulty else 0.02):
            return self._event()
        roll = rng.random()
        if roll < 0.55:
            if rng.random() < 0.9 and _rests(life):
                # It would find nothing to do.
                return ["time", rng.choice((0.01, 0.05, 0.5, 1.5))]
            return self._turn("decode")
        if roll < 0.75:
            return ["loop", rng.randrange(self.scenario.loops), rng.choice((1, 3, 100))]
        if roll < 0.81:
            return self._turn("intake")
        if roll < 0.84:
            return self._turn("watchdog")
        if roll < 0.88 and self.scenario.observers:
            return self._turn("observer")
        if roll < 0.91 and self.scenario.adapters is not None:
            return self._turn("adapter")
        return ["time", rng.choice((0.001, 0.01, 0.01, 0.05, 0.5))]

    def _hasty(self, ask: Ask) -> Ask:
        """Where loops are late, many prompts are prepared meanwhile, and many answers fail."""
        if not self._late or self._lateness.random() < 0.5:
            return ask
        return replace(ask, form="worker", on_full="cancel", buffer=self._lateness.choice((2, 4)))

    def _guide(self, ask: Ask) -> Ask:
        """Guide some answers in some lives."""
        rng = self._guiding
        if not self._guided or ask.format or ask.sampler or rng.random() < 0.5:
            return ask
        negative = _letters(rng, rng.choice((0, 1, 5, 20)))
        return replace(ask, guidance=rng.choice((0.0, 1.5, 3.0)), negative=negative)

    def _turn(self, name: str) -> Action:
        rng = self._rng
        points = rng.randrange(6) if rng.random() < self._interrupted else None
        return ["turn", name, rng.randrange(2), points]

    def _adapter(self) -> Action:
        """An adapter comes or goes."""
        rng = self._rng
        roll = rng.random()
        if roll < 0.65:
            self._adapters += 1
            return ["load", rng.choice("xy"), self._adapters, rng.randrange(self.scenario.loops)]
        if roll < 0.7:
            return ["unload", rng.choice("xy")]
        return ["fault", "adapter", 0] if roll < 0.85 else ["cancel_loads"]

    def _talk(self, life: Life) -> Action:
        """Something happens in a conversation."""
        rng, talks = self._talking, [*life.talks]
        self._ids += 1
        roll = rng.random()
        if rng.random() < 0.1:
            if life.pins and roll < 0.4:
                return ["unpin", rng.choice([*life.pins])]
            prompt, loop = _letters(rng, rng.randrange(1, 20)), rng.randrange(self.scenario.loops)
            return ["pin", self._ids, loop, prompt, rng.choice((None, 0.5))]
        if not talks or roll < 0.1:
            scope, ttl = rng.choice(("", "other")), rng.choice((None, None, 0.5))
            return ["talk", self._ids, rng.randrange(self.scenario.loops), scope, ttl]
        id = rng.choice(talks)
        if roll < 0.8:
            ask = self._ask(rng)
            said = replace(ask, prompt=ask.prompt[:6], max_tokens=rng.choice((1, 3, 6, 12)))
            plain = replace(
                said, prompt_logprobs=None, n=1, format=None, adapter=None, sampler=None
            )
            return ["say", id, plain.to_json()]
        if roll < 0.86:
            return ["fork", id, self._ids]
        if roll < 0.92:
            return ["rewind", id, rng.randrange(4)]
        return ["part", id, rng.random() < 0.5]

    def _event(self) -> Action:
        """Something that happens seldom."""
        rng = self._rng
        roll = rng.random()
        if roll < 0.4 and self._faulty:
            if rng.random() < 0.03:
                return ["fault", rng.choice(("launch", "collect")), 0]
            return ["fault", rng.choice(_FAULTS), rng.randrange(8)]
        if roll < 0.5 and self._stops:
            return ["jump", rng.choice((0.1, 2.0, 50.0))]
        if roll < 0.55 and self._closes:
            return self._close()
        if roll < 0.63 and self._faulty:
            return ["refuse_threads", rng.choice((1, 2))]
        return ["time", rng.choice((0.3, 1.0, 2.0, 6.0))]

    def _while_it_hangs(self) -> Action:
        """The decode thread is in the middle of a turn."""
        rng = self._rng
        roll = rng.random()
        if roll < 0.15 and self._stops:
            return ["jump", rng.choice((2.0, 50.0))]
        if roll < 0.35 and self._closes:
            return self._close()
        if roll < 0.5:
            return ["submit", self._ask().to_json()]
        return ["time", rng.choice((0.05, 0.3, 1.0, 6.0, 12.0))]

    def _close(self) -> Action:
        rng = self._rng
        drain = rng.choice((None, 0.0, 0.5))
        return rng.choice((["close", drain], ["leave", rng.random() < 0.5], ["cancel_owner"]))

    def _ask(self, rng: Random | None = None) -> Ask:
        rng = rng or self._rng
        self._ids += 1
        prefix = rng.choice(self._prefixes)[: rng.randrange(30)]
        form = adapter = None
        if self._formats:
            form = rng.choice((None, *FORMATS))
        if self.scenario.adapters is not None:
            adapter = rng.choice((None, "x", "y"))
        sampler = None
        if self.scenario.samplers and form is None:
            sampler = self._own.choice((None, *SAMPLERS))
        return Ask(
            format=form,
            adapter=adapter,
            sampler=sampler,
            id=self._ids,
            loop=rng.randrange(self.scenario.loops),
            prompt=prefix + _letters(rng, rng.randrange(0 if prefix else 1, 8)),
            form=rng.choice(("ids", "ids", "ids", "text", "worker", "worker", "chat")),
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((None, None, 1, 2, 8, 30, 60)),
            min_tokens=rng.choice((0, 0, 1)) if form is None else 0,
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(2**32),
            stop=rng.choice(([], [], [], ["ab"], ["é", "he"])) if form is None else [],
            logprobs=rng.choice((None, None, None, 1)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
            priority=rng.randrange(3),
            deadline=rng.choice((None, None, None, rng.random(), 4.0, 3600.0)),
            scope=rng.choice(("", "", "other")),
            buffer=rng.choice((1, 4, 8, 100)),
            on_full=rng.choice(("pause", "pause", "coalesce", "cancel")),
            how=rng.choice(("iterate", "iterate", "await", "both")),
            pace=rng.choice((0.0, 0.0, 0.0, 0.02, 0.3, 0.5)),
            patience=rng.choice((None, None, None, 0.05)),
            chunks=rng.choice((None, None, None, 1, 3)),
            then=rng.choice(("stop", "leave", "raise", "drop", "sleep")),
        )


def _rests(life: Life) -> bool:
    """Whether the decode thread waits for news."""
    core = life.engine.core
    return core is not None and not core.busy and core.inbox.empty()


def _letters(rng: Random, count: int) -> list[int]:
    """Tokens that are a letter each."""
    return [rng.randrange(1, len(LETTERS) + 1) for _ in range(count)]
