"""The engine's results: chunks and completions. All are frozen."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncinfer.structured_output import AnswerReader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Choice",
    "Chunk",
    "Completion",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]


class TokenLogprob(NamedTuple):
    """The logprob of one token under the model's own distribution (before penalties,
    temperature and truncation), in natural logarithms."""

    token_id: int
    logprob: float
    #: 1 for the most likely token of its position.
    rank: int
    #: The most likely `(token_id, logprob)` pairs of the position, best first.
    top: tuple[tuple[int, float], ...] = ()


class ToolCallDelta(NamedTuple):
    """What a chunk adds to one of an answer's tool calls."""

    #: Which of the answer's calls, from 0. (Hides `tuple.index`.)
    index: int  # type: ignore[assignment]
    #: With the first delta of a call only.
    id: str | None
    #: With the first delta of a call only.
    name: str | None
    #: What the chunk adds to the JSON of the arguments.
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that an answer calls."""

    #: Names the call; the tool's result goes back to the model under it.
    id: str
    name: str
    #: JSON, as the model wrote it where its format is JSON. Unfinished if the answer was cut short.
    arguments: str
    #: The pydantic model that the request named as the tool; None for any other.
    model: Any = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The arguments as plain data, or as an instance of the pydantic model that is the tool;
        None where they are no JSON, as in an answer that was cut short.

        Raises pydantic's `ValidationError` where the model refuses them.
        """
        try:
            data = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return data if self.model is None else self.model.model_validate(data)

    @property
    def message(self) -> dict[str, Any]:
        """The call as an entry of an assistant message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Chunk(NamedTuple):
    """One delta of a stream. `text` is what this chunk adds, never what came before."""

    text: str
    token_ids: tuple[int, ...] = ()
    #: One entry per token, or empty when `logprobs` was not asked for.
    logprobs: tuple[TokenLogprob, ...] = ()
    #: Which of the `n` answers this chunk belongs to. (Hides `tuple.index`.)
    index: int = 0  # type: ignore[assignment]
    #: None until the last chunk of this index.
    finish_reason: str | None = None
    #: With the last chunk of this index, see `Choice`.
    stop_reason: str | int | None = None

    @property
    def partial(self) -> Any:
        """The answer so far as plain data, if the request asked for JSON; a string, list or object
        may be unfinished. None for any other request, and before there is a value. The text is
        parsed at each access: a long answer takes milliseconds.

        Raises `ModuleNotFoundError` without pydantic, naming what to install.
        """
        return None

    @property
    def reasoning(self) -> str:
        """What this chunk adds to the reasoning before the answer. Empty for a prompt that is no
        chat, whose answer is `text` as a whole."""
        return ""

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """What this chunk adds to the answer's tool calls, in order."""
        return ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request took: `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    #: Tokens drafted for it that were right, and that were wrong. All other tokens of the answer
    #: were drawn one at a time.
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    #: Of the answers that were read, the tokens of reasoning, without what delimits it. Where
    #: several tokens came in one chunk with its end, they are parted by their characters.
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the monotonic clock, measured by the engine."""

    queued: float = 0.0
    prefill: float = 0.0
    #: Time to first token, from submission.
    ttft: float = 0.0
    #: Mean time between tokens after the first; 0.0 with fewer than two tokens.
    per_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` answers to a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    #: "stop" (a stop string, stop token, match or end of text), "length", "repetition", "stopped"
    #: (by you).
    finish_reason: str
    #: Of a beam search: the sum of the tokens' logprobs over their number to the power of the
    #: length penalty. Of `best_of`: the mean logprob of a token. None for any other answer.
    score: float | None = None
    #: Parses `text` to an object, if the request asked for JSON.
    reader: AnswerReader | None = field(default=None, repr=False, compare=False)
    #: The model's reasoning before it answered a chat, which `text` leaves out.
    reasoning: str = ""
    #: The tools that the answer to a chat calls, which `text` leaves out.
    tool_calls: tuple[ToolCall, ...] = ()
    #: What ended an answer whose `finish_reason` is "stop": the string of `stop`, the text that
    #: `stop_regex` matched, or the token of `stop_token_ids`. None for any other end.
    stop_reason: str | int | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the assistant's message, to be added to the chat."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.message for call in self.tool_calls]
        return made

    @property
    def parsed(self) -> Any:
        """The object that the answer is: what the request's pydantic type makes of it, or plain
        data for any other JSON. None if the request asked for no JSON, where the answer was cut
        short, and where `constrain_after` is a special token, which texts do not show.

        Raises pydantic's `ValidationError` where a validator of the type refuses the object.
        """
        if self.reader is None or self.finish_reason != "stop":
            return None
        return self.reader.whole(self.text)


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer. With `n > 1` the first answer's fields are also the completion's."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    #: One entry per prompt token, None for the first; None when not asked for.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    #: What `Engine.embed` is made of; None for all other requests.
    embedding: npt.NDArray[np.float32] | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def parsed(self) -> Any:
        """See `Choice.parsed`."""
        return self.choices[0].parsed

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """See `Choice.message`."""
        return self.choices[0].message

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """See `Choice.stop_reason`."""
        return self.choices[0].stop_reason
