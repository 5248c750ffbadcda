"""`/v1/responses`: OpenAI's newer protocol, without what it stores on a server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from asyncinfer.errors import InvalidRequest
from asyncinfer.server.call import Call
from asyncinfer.server.errors import FieldError
from asyncinfer.server.fields import RESPONSES, check_fields, check_names, flag, options_of
from asyncinfer.server.models import Models
from asyncinfer.server.prompts import response_format
from asyncinfer.server.response_answer import ResponseAnswer
from asyncinfer.server.response_input import response_chat
from asyncinfer.server.usage import request_options

__all__ = ["NAMES", "Responses"]

#: The request's names of the engine's options.
NAMES: Final = {
    "prompt": "input",
    "messages": "input",
    "logprobs": "top_logprobs",
    "json_schema": "text.format",
    "json_object": "text.format",
    "response_format": "text.format",
}
#: Fields of `text`.
_TEXT: Final = ("format", "verbosity")
#: Fields that would need a server that keeps responses.
_STORED: Final = ("previous_response_id", "conversation", "background", "prompt")


class Responses:
    """Answers the items of an input."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: Call) -> None:
        body = call.body
        for name in _STORED:
            if body.get(name):
                bound = "is not served: no response is kept; send the whole input"
                raise FieldError(name, body[name], bound)
        check_fields(body, RESPONSES)
        model = self._models.find(body.get("model"))
        chat = await call.offload(partial(response_chat, places=call.places), body)
        options = {**await call.offload(_options, body), **request_options(call, model)}
        answer = ResponseAnswer(call, model, options)
        if flag(body, "stream"):
            await answer.send(chat)
        else:
            await answer.whole(chat)


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = options_of(body, RESPONSES)
    text = body.get("text", {})
    if not isinstance(text, Mapping):
        raise InvalidRequest("text", text, "must be an object")
    check_names("text", text, _TEXT)
    if text.get("format") is not None:
        options |= response_format(text["format"])
    include = body.get("include", [])
    if not isinstance(include, list):
        raise InvalidRequest("include", include, "must be a list")
    if "message.output_text.logprobs" in include:
        options["logprobs"] = body.get("top_logprobs", 0)
    elif "top_logprobs" in body:
        options["logprobs"] = body["top_logprobs"]
    return options
