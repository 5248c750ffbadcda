"""`ResponseAnswer`: an answer of `/v1/responses`, whole or as events."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

from asyncinfer.chunk import Completion, TokenLogprob, ToolCallDelta, Usage
from asyncinfer.server.body import SMALL, offload_large
from asyncinfer.server.call import Call
from asyncinfer.server.logprobs import chat_logprobs, scored_bytes
from asyncinfer.server.models import Model
from asyncinfer.server.usage import WHOLE_INTERVAL, LastCall, begun_before

__all__ = ["ResponseAnswer"]

#: Finish reasons of an answer that was not cut short.
_WHOLE: Final = ("stop", "stopped")


class ResponseAnswer:
    """One response, whole or as events.

    Its items are what the model thinks, says and calls, in the order in which they come.
    """

    def __init__(self, call: Call, model: Model, options: dict[str, Any]) -> None:
        self._call = call
        self._model = model
        self._options = options
        #: Whether there are events.
        self._sends = True
        self._events = 0
        #: About the bytes of the events to come.
        self._size = 0
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._last = LastCall()
        #: Logprobs of tokens without text, such as those of reasoning and calls, which the message
        #: that comes next has.
        self._scored: list[Any] = []
        #: Whether the last item is being sent.
        self._open = False

    async def whole(self, chat: list[dict[str, Any]]) -> None:
        if self._options.get("tools"):
            # A completion does not tell what was said before which call.
            self._sends = False
            self._options.setdefault("stream_interval", WHOLE_INTERVAL)
            reason, usage = await self._read(chat)
            make = partial(self._ended, reason, usage)
        else:
            done = await self._model.engine.generate(chat, **self._options)
            make, usage = partial(self._whole, done), done.usage
        await self._call.made(scored_bytes(self._options, usage), make)

    def _whole(self, done: Completion) -> dict[str, Any]:
        if done.reasoning:
            self._items.append({**self._item("reasoning"), "content": [_thought(done.reasoning)]})
        content = [_said(done.text, self._scores(done.logprobs))]
        self._items.append({**self._item("message"), "content": content})
        return self._response(done.finish_reason, done.usage)

    async def send(self, chat: list[dict[str, Any]]) -> None:
        reason, usage = await self._read(chat)
        # Four of the last events have all logprobs.
        self._size = 4 * scored_bytes(self._options, usage)
        await offload_large(self._size, partial(self._finish, reason), usage)
        await self._call.end()

    async def _read(self, chat: list[dict[str, Any]]) -> tuple[str, Usage]:
        """Make the items, with their events but for the last. Returns why the answer ended, and
        what it took."""
        reason = "stop"
        async with self._model.engine.stream(chat, **self._options) as stream:
            async for chunk in stream:
                if self._sends and not self._call.begun:
                    begun = {**self._head(), "status": "in_progress", "output": [], "usage": None}
                    self._event("created", response=begun)
                    self._event("in_progress", response=begun)
                calls, more = chunk.tool_calls, begun_before(chunk.tool_calls)
                for each in calls[:more]:
                    self._called(each)
                if chunk.reasoning:
                    thought = self._begun("reasoning", chunk.reasoning)
                    self._part("reasoning", _thought(""))
                    self._delta("reasoning_text", thought)
                self._scored += self._scores(chunk.logprobs)
                text = self._begun("message", chunk.text)
                if text:
                    self._part("message", _said("", []))
                if text or (self._scored and self._saying):
                    self._delta("output_text", text, self._scored)
                    self._scored = []
                self._last.add(calls)
                if calls[more:]:
                    await self._close_message()
                for each in calls[more:]:
                    self._called(each)
                if self._call.is_due(stream.ready):
                    await self._call.flush()
                reason = chunk.finish_reason or reason
            return reason, stream.usage or Usage()

    def _finish(self, reason: str, usage: Usage) -> None:
        """The last events."""
        response = self._ended(reason, usage)
        self._event(response["status"], response=response)

    def _ended(self, reason: str, usage: Usage) -> dict[str, Any]:
        """The response to an answer that was read to its end."""
        if not self._items:
            self._part("message", _said("", []))
            self._items[-1]["content"][0]["logprobs"] += self._scored
        self._close(self._status(reason))
        return self._response(reason, usage)

    @property
    def _saying(self) -> bool:
        """Whether a message is being sent."""
        return self._open and bool(self._items[-1]["type"] == "message")

    def _begun(self, kind: str, text: str) -> str:
        """Text of this kind. The white space that parts it from another item is no part of it."""
        begun = self._open and self._items[-1]["type"] == kind
        return text if begun or not self._items else text.lstrip()

    def _part(self, kind: str, empty: dict[str, Any]) -> None:
        """Open an item of this kind with one part, unless it is open."""
        if self._open and self._items[-1]["type"] == kind:
            return
        self._close()
        item = {**self._item(kind), "content": [], "status": "in_progress"}
        self._items.append(item)
        self._open = True
        self._event("output_item.added", **self._place(), item={**item})
        item["content"] = [empty]
        self._event("content_part.added", **self._place(part=True), part={**empty})

    def _delta(self, name: str, text: str, scores: list[Any] | None = None) -> None:
        """Send more of the open item's part."""
        (part,) = self._items[-1]["content"]
        part["text"] += text
        fields: dict[str, Any] = {"delta": text}
        if scores is not None:
            part["logprobs"] += scores
            fields["logprobs"] = scores
        self._event(f"{name}.delta", **self._place(part=True), **fields)

    def _called(self, each: ToolCallDelta) -> None:
        if each.id is not None:
            self._close()
            function = {"call_id": each.id, "name": each.name, "arguments": ""}
            item = {**self._item("function_call"), **function, "status": "in_progress"}
            self._items.append(item)
            self._open = True
            self._event("output_item.added", **self._place(), item={**item})
        if each.arguments:
            self._items[-1]["arguments"] += each.arguments
            kind = "function_call_arguments.delta"
            self._event(kind, **self._place(item=True), delta=each.arguments)

    async def _close_message(self) -> None:
        """End the open message, if there is one, before a call: its last events have all its
        logprobs."""
        if self._saying:
            scored = Usage(completion_tokens=len(self._items[-1]["content"][0]["logprobs"]))
            self._size = 3 * scored_bytes(self._options, scored)
            await offload_large(self._size, self._close, "completed")
            self._size = 0

    def _close(self, status: str = "completed") -> None:
        """End the open item, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            fields = {"arguments": item["arguments"], "name": item["name"]}
            self._event("function_call_arguments.done", **self._place(item=True), **fields)
        else:
            (part,) = item["content"]
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            place = self._place(part=True)
            self._event(f"{part['type']}.done", **place, **fields)
            self._event("content_part.done", **place, part=part)
        self._event("output_item.done", **self._place(), item=item)

    def _item(self, kind: str) -> dict[str, Any]:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{self._call.id}{len(self._items):02}"}
        item |= {"type": kind, "status": "completed"}
        if kind == "message":
            item["role"] = "assistant"
        if kind == "reasoning":
            item["summary"] = []
        return item

    def _place(self, *, item: bool = False, part: bool = False) -> dict[str, Any]:
        """The fields that say which item an event belongs to, and which part of it."""
        place: dict[str, Any] = {"output_index": len(self._items) - 1}
        if item or part:
            place["item_id"] = self._items[-1]["id"]
        if part:
            place["content_index"] = 0
        return place

    def _scores(self, logprobs: tuple[TokenLogprob, ...]) -> list[Any]:
        """Logprobs in OpenAI's form."""
        if self._options.get("logprobs") is None:
            return []
        found: list[Any] = chat_logprobs(self._model.engine.tokenizer, logprobs)["content"]
        return found

    def _status(self, reason: str) -> str:
        """The last item's status: `stop_regex` may end a call before its arguments."""
        cut = self._items[-1]["type"] == "function_call" and self._last.whole is False
        return "completed" if reason in _WHOLE and not cut else "incomplete"

    def _response(self, reason: str, usage: Usage) -> dict[str, Any]:
        """The complete response."""
        whole = reason in _WHOLE
        self._items[-1]["status"] = self._status(reason)
        return {
            **self._head(),
            "status": "completed" if whole else "incomplete",
            "completed_at": int(time.time()) if whole else None,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _head(self) -> dict[str, Any]:
        body = self._call.body
        given = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "text")
        return {
            "id": f"resp_{self._call.id}",
            "object": "response",
            "created_at": self._created,
            "model": self._model.name,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "store": False,
            **{name: body.get(name) for name in given if name in body},
        }

    def _event(self, kind: str, **fields: Any) -> None:
        if not self._sends:
            return
        name = f"response.{kind}"
        told = {"type": name, "sequence_number": self._events, **fields}
        self._call.event(told, name, large=self._size > SMALL)
        self._events += 1


def _said(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
