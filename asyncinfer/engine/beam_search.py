"""`BeamSearch`: one request whose beams are sequences that fork at every token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from asyncinfer.engine.beam_group import BeamGroup, BeamOptions, Candidate, Hypothesis
from asyncinfer.engine.loop_bridge import Packed
from asyncinfer.engine.request import Request, TokenSink
from asyncinfer.errors import RequestFailed
from asyncinfer.scheduler import RowLogprobs, Scheduler, Sequence
from asyncinfer.text import Detokenizer

__all__ = ["BeamOutput", "BeamSearch"]


class BeamSearch:
    """A beam is a sequence that computes one token. Its successors fork from it: they share its
    pages, and copy those that they write to. A computed beam is paused until its successors are
    computed, so that another sequence may take its pages. A successor is then computed from the
    prefix cache. Decode thread only.

    `request.outputs` are the beams being computed and those before them.
    """

    def __init__(
        self,
        request: Request,
        options: BeamOptions,
        scheduler: Scheduler,
        new_id: Callable[[], int],
        detokenizer: Callable[[], Detokenizer],
    ) -> None:
        """
        Args:
            new_id: gives the id of a sequence.
            detokenizer: makes one for an answer.
        """
        self.request: Final = request
        self.detokenizer: Final = detokenizer
        self._options = options
        self._scheduler = scheduler
        self._new_id = new_id
        self._groups: list[BeamGroup] = []

    def begin(self, root: Sequence) -> None:
        """Search from the prompt on; `root` is the sequence that computes it."""
        stops, most = len(root.stop_ids), root.max_total - root.prompt_len
        self._groups = [BeamGroup(self._options, stops, most) for _ in range(self._options.groups)]
        # All groups begin with the same beam.
        self._add(root, [(group, 0) for group in range(len(self._groups))])

    def computed(self, output: BeamOutput, logprobs: Packed) -> str | None:
        """Note that a beam was computed. Returns why the best answer ended if the search is over.

        Raises `RequestFailed` where no answer can end.
        """
        request = self.request
        output.following = [*self._candidates(output.sequence, logprobs)]
        self._scheduler.pause(output.sequence)
        current = [each for each in _outputs(request) if each.step == output.step]
        if any(each.following is None for each in current):
            return None
        for each in _outputs(request):
            if each.step < output.step:
                self._drop(each)
        request.outputs = [*current]
        self._advance(current)
        if len(request.outputs) > len(current):
            return None
        return self._finish(output)

    def _advance(self, current: list[BeamOutput]) -> None:
        """Choose the beams of the next step, and have them computed."""
        taken: Counter[int] = Counter()
        places: dict[tuple[BeamOutput, int], list[tuple[int, int]]] = {}
        for number, group in enumerate(self._groups):
            if group.over:
                continue
            at = {
                place: output
                for output in current
                for where, place in output.places
                if where == number
            }
            beams = group.advance([at[i].following or [] for i in range(len(at))], taken)
            for place, beam in enumerate(beams):
                places.setdefault((at[beam.parent], beam.token), []).append((number, place))
        for (parent, token), found in places.items():
            self._add(self._fork(parent.sequence, token), found, parent.step + 1)

    def _candidates(self, sequence: Sequence, logprobs: Packed) -> Iterator[Candidate]:
        """The tokens that may follow a beam. A group chooses among fewer of those that end no text
        than it would look at if no token ended any."""
        assert isinstance(logprobs, RowLogprobs)
        matcher, last = sequence.matcher, len(sequence.tokens) + 1 >= sequence.max_total
        most = self._options.candidates(0)
        for token, logprob in logprobs.best():
            if logprob == -float("inf"):
                return
            ends = token in sequence.stop_ids or (matcher is not None and matcher.completes(token))
            reason = "stop" if ends else "length" if last else None
            yield token, logprob, reason
            most -= not ends
            if not most:
                return

    def _fork(self, parent: Sequence, token: int) -> Sequence:
        """The beam that goes on by a token."""
        matcher = None
        if parent.matcher is not None:
            matcher = parent.matcher.copy()
            matcher.accept(token, 0)
        scope, adapter = parent.namespace
        return Sequence(
            self._new_id(),
            [*parent.tokens, token],
            parent.params,
            prompt_len=parent.prompt_len,
            max_total=parent.max_total,
            seed=parent.seed,
            arrival=parent.arrival,
            priority=parent.priority,
            deadline=parent.deadline,
            scope=scope,
            adapter=adapter,
            adapter_slot=parent.adapter_slot,
            stop_ids=parent.stop_ids,
            bad_ids=parent.bad_ids,
            matcher=matcher,
            candidates=parent.candidates,
            keys=[*parent.keys],
            index=1,
            fork_of=parent,
        )

    def _add(self, sequence: Sequence, places: list[tuple[int, int]], step: int = 0) -> None:
        output = BeamOutput(self, sequence, places, step)
        sequence.owner = output
        self.request.outputs.append(output)
        if step:
            # The first is added with its request.
            self._scheduler.add(sequence)

    def _drop(self, output: BeamOutput) -> None:
        output.ended = True
        self._scheduler.finish(output.sequence, self._scheduler.states.now)
        # The two refer to each other, see `Request.let_go`.
        del output.sequence

    def _finish(self, output: BeamOutput) -> str:
        """Hand the answers on, the best first."""
        request = self.request
        found = sorted(
            (each for group in self._groups for each in group.hypotheses),
            key=lambda each: -each.score,
        )
        if not found:
            raise RequestFailed(f"{request.id}: no beam came to an end that its options allow")
        for each in _outputs(request):
            if each is not output:
                self._drop(each)
        request.outputs, request.open_outputs = [output], 1
        output.count = sum(len(each.tokens) for each in found)
        request.scores = tuple(each.score for each in found)
        for index, answer in enumerate(found):
            text, tokens = self._text(answer, output.sequence), answer.tokens
            ends = answer.finish_reason == "stop"
            stop = request.stop_reason(tokens[-1]) if ends else None
            request.delivered += len(tokens)
            request.buffer.put((text, tokens, (), index, answer.finish_reason, stop))
        return found[0].finish_reason

    def _text(self, answer: Hypothesis, sequence: Sequence) -> str:
        ends = answer.tokens[-1] in sequence.stop_ids
        return self.detokenizer().decode(answer.tokens[:-1] if ends else answer.tokens)


class BeamOutput(TokenSink):
    """One beam of a search, in the place of an answer: nothing of it is shown before the end."""

    __slots__ = ("following", "places", "search", "step")

    def __init__(
        self, search: BeamSearch, sequence: Sequence, places: list[tuple[int, int]], step: int
    ) -> None:
        super().__init__(search.request, sequence)
        self.search = search
        #: The groups that have it, each with the beam's number there.
        self.places = places
        #: Tokens after the prompt.
        self.step = step
        #: What may follow, the likeliest first; None before it was computed.
        self.following: list[Candidate] | None = None

    def advance(
        self, tokens: tuple[int, ...], reason: str | None, logprobs: Packed = ()
    ) -> str | None:
        """Note the beam's successors. After a preemption it is computed again, with the same
        result."""
        return None if self.following is not None else self.search.computed(self, logprobs)


def _outputs(request: Request) -> list[BeamOutput]:
    return [output for output in request.outputs if isinstance(output, BeamOutput)]
