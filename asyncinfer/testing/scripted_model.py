"""`ScriptedModel`: a model that says what a test wants, through the whole real engine."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import tokenizers

from asyncinfer.cache import KVGroupSpec
from asyncinfer.config import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.errors import RequestFailed
from asyncinfer.grammar import Matcher, allowed_ids, fill_masks
from asyncinfer.scheduler import Join, RunnerSpec, Step
from asyncinfer.testing.fake_model import FakeRunner
from asyncinfer.text import ChatTemplate, Tokenizer
from asyncinfer.text.bytelevel import byte_level_backend

__all__ = ["Said", "ScriptedModel"]

_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_ADDED: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")
#: A template that writes chats as Qwen's and Hermes' do.
_TEMPLATE: Final = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
{#- <think></think> #}"""


@dataclass(frozen=True)
class Said:
    """One answer: reasoning, then text, then calls, and then its end or an error."""

    text: str = ""
    reasoning: str = ""
    #: Names and arguments.
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    #: Seconds that the step in which the answer begins takes, for all of its requests.
    delay: float = 0.0
    #: What the request fails with after that, as `RequestFailed` is caused by it.
    error: Exception | None = None

    @property
    def written(self) -> str:
        """The answer's text as the model writes it."""
        text = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        # Models write other letters than ASCII's as they are.
        called = ({"name": name, "arguments": dict(args)} for name, args in self.tool_calls)
        calls = (json.dumps(call, ensure_ascii=False) for call in called)
        parts = (text + self.text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls))
        return "\n".join(filter(None, parts))


#: Answers in turn; or what answers the messages of a prompt, each with "role" and "content".
Script: TypeAlias = "Iterable[Said | str] | Callable[[list[dict[str, str]]], Said | str]"


class ScriptedModel:
    """A `ModelSource` whose answers a test has written: `Engine(ScriptedModel(["Hello"]))`.

    Prompts, batches, caching, streams, tools, structured output and errors are the engine's own; a
    token is a byte. An answer that does not fit what its request asks for (`json_schema`,
    `tool_choice="required"`) fails with `RequestFailed`, as does a request beyond the last answer,
    and one for which the function raises.

    Args:
        script: answers, one for each request (and for each of its `n`) in the order in which they
            begin; or a function, called on the engine's thread with the messages of the prompt. A
            prompt that is no chat is one message of the user.
        blocks: KV blocks.
        max_context: tokens of the longest sequence.
    """

    def __init__(self, script: Script, *, blocks: int = 4096, max_context: int = 32_768) -> None:
        self._rule = script if callable(script) else None
        self._turns = deque(() if callable(script) else script)
        self._blocks = blocks
        self._max_context = max_context
        #: The messages of every prompt that was answered, in order.
        self.prompts: list[list[dict[str, str]]] = []

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        backend = byte_level_backend(add_bos=False)
        special = [tokenizers.AddedToken(text, special=True) for text in (_BEGIN, _END)]
        backend.add_special_tokens(special)
        backend.add_tokens([tokenizers.AddedToken(text, special=False) for text in _ADDED])
        tokenizer = Tokenizer(backend, eos_ids=[backend.token_to_id(_END) or 0])
        (end,) = tokenizer.eos_ids
        spec = RunnerSpec(
            groups=(KVGroupSpec(self._blocks),),
            block_size=config.block_size,
            max_slots=config.max_running,
            max_context=min(self._max_context, config.max_context or self._max_context),
            vocab_size=tokenizer.vocab_size,
            max_step_tokens=config.max_step_tokens,
            step_target=config.step_target,
            masks=True,
        )
        template = ChatTemplate(_TEMPLATE, shield=tokenizer.shield)
        runner = _ScriptedRunner(spec, tokenizer, end, self._answer)
        return Loaded(runner, tokenizer, template, architecture="scripted")

    def _answer(self, messages: list[dict[str, str]]) -> Said:
        self.prompts.append(messages)
        if self._rule is not None:
            answer = self._rule(messages)
        elif self._turns:
            answer = self._turns.popleft()
        else:
            raise RequestFailed("the script has no answer left")
        return Said(answer) if isinstance(answer, str) else answer


@dataclass(slots=True)
class _Script:
    """An answer as tokens."""

    said: Said
    token_ids: list[int]
    begun: bool = False


class _ScriptedRunner(FakeRunner):
    """Draws the tokens of a script."""

    def __init__(
        self,
        spec: RunnerSpec,
        tokenizer: Tokenizer,
        end: int,
        answer: Callable[[list[dict[str, str]]], Said],
    ) -> None:
        super().__init__(spec, failing=self._failed)
        self._tokenizer = tokenizer
        self._end = end
        self._answer = answer
        #: By slot. A sequence that lost its slot goes on with the answer that it began.
        self._current: dict[int, _Script] = {}
        self._begun: dict[tuple[int, tuple[int, ...]], _Script] = {}
        self._faults: dict[int, Exception] = {}

    def _apply(self, step: Step) -> None:
        super()._apply(step)
        for join in step.joins:
            # Its draws are asked for one by one.
            self._slots.special.add(join.slot)
            key = (join.seed, tuple(join.token_ids[: join.prompt_len]))
            answer = self._begun.get(key)
            if answer is None:
                try:
                    said = self._answer(self._messages(key[1]))
                except Exception as error:
                    said = Said(error=error)
                ids = self._tokenizer.encode(said.written, add_special_tokens=False)
                answer = self._begun[key] = _Script(said, ids)
            self._current[join.slot] = answer

    def _next_token(
        self,
        join: Join,
        position: int,
        digest: int,
        matcher: Matcher | None = None,
        draft: Sequence[int] = (),
    ) -> int:
        answer = self._current[join.slot]
        at = position + 1 - join.prompt_len
        if not answer.begun:
            answer.begun = True
            time.sleep(answer.said.delay)
        token = self._end
        if at < len(answer.token_ids):
            token = answer.token_ids[at]
        else:
            self._begun.pop((join.seed, tuple(join.token_ids[: join.prompt_len])), None)
            if answer.said.error is not None:
                self._faults[join.slot] = answer.said.error
        if matcher is not None:
            allowed = allowed_ids(fill_masks([matcher], [draft])[-1], self._spec.vocab_size)
            if token not in allowed:
                shown = self._tokenizer.decode(answer.token_ids[:at], False)
                self._faults[join.slot] = RequestFailed(
                    f"the script's answer does not fit the request's format after {shown!r}"
                )
                token = int(allowed[0])
        return token

    def _failed(self, step: Step) -> Mapping[int, Exception]:
        failed = {
            row: self._faults[slot] for row, slot in enumerate(step.slots) if slot in self._faults
        }
        self._faults.clear()
        return failed

    def _messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """The chat messages that a prompt was made of."""
        begin = self._tokenizer.added_tokens[_BEGIN]
        if begin not in ids:
            return [{"role": "user", "content": self._tokenizer.decode(ids)}]
        found, starts = [], [at for at, token in enumerate(ids) if token == begin]
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            part = list(ids[start + 1 : stop])
            whole = self._end in part
            text = self._tokenizer.decode(part[: part.index(self._end)] if whole else part, False)
            role, _, content = text.partition("\n")
            if whole or content:
                found.append({"role": role, "content": content})
        return found
