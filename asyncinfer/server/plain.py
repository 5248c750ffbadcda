"""The paths that answer at once: `/v1/models`, `/tokenize`, `/health`, `/metrics`, the document."""

from __future__ import annotations

from typing import Any

from asyncinfer.checks import check_string
from asyncinfer.errors import InvalidRequest, renaming
from asyncinfer.server.call import Call, json_bytes
from asyncinfer.server.fields import ANY, BOOLEAN, Field, Fields, check_fields, flag
from asyncinfer.server.models import Models
from asyncinfer.server.offload import offload
from asyncinfer.server.prompts import chat_messages
from asyncinfer.server.traffic import Traffic

__all__ = ["DETOKENIZE", "TOKENIZE", "Plain"]

TOKENIZE = Fields(
    Field("model", {"type": "string"}, "A name that /v1/models lists; without it, the first."),
    Field("prompt", {"type": "string"}, "A text; or else `messages`."),
    Field("messages", {"type": "array"}, "A chat, by the model's template."),
    Field(
        "add_special_tokens",
        BOOLEAN,
        "Such as one that begins a text; true without it. Of no chat.",
    ),
)
DETOKENIZE = Fields(
    TOKENIZE[0],
    Field("tokens", ANY, "Token ids.", required=True),
)


class Plain:
    """Handlers, one for each path."""

    def __init__(self, models: Models, traffic: Traffic) -> None:
        self._models = models
        self._traffic = traffic

    async def models(self, call: Call) -> None:
        await call.json({"object": "list", "data": self._models.listed()})

    async def model(self, call: Call) -> None:
        name = call.path.rpartition("/v1/models/")[2].removesuffix("/")
        if not name:
            await self.models(call)
            return
        await call.json(self._models.entry(self._models.find(name)))

    async def health(self, call: Call) -> None:
        states = {}
        for name, engine in self._models.engines.items():
            found = engine.health()
            # Callers need no key, so they see neither a stack nor the text of an exception.
            reasons = [] if found.state == "dead" else [*found.reasons]
            states[name] = {"state": found.state, "reasons": reasons}
        serving = all(engine.health().serving for engine in self._models.engines.values())
        state = "ok" if serving else "failing"
        await call.json({"status": state, "engines": states}, 200 if serving else 503)

    async def metrics(self, call: Call) -> None:
        stats = {name: engine.stats() for name, engine in self._models.engines.items()}
        text = self._traffic.metrics(stats)
        await call.data(text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, call: Call) -> None:
        body = call.body
        check_fields(body, TOKENIZE)
        if "prompt" in body and "messages" in body:
            raise InvalidRequest("prompt", body["prompt"], "excludes messages: send one of them")
        engine = self._models.find(body.get("model")).engine
        tokenizer = engine.tokenizer
        special = flag(body, "add_special_tokens") if "add_special_tokens" in body else True
        most = engine.model.max_context

        def work() -> bytes:
            if "messages" in body:
                if special and "add_special_tokens" in body:
                    bound = "must be false with messages: a template writes those that a chat has"
                    raise InvalidRequest("add_special_tokens", special, bound)
                # The text that the template makes is what the engine calls the prompt.
                with renaming("prompt", "messages"):
                    ids = tokenizer.encode_chat(chat_messages(body["messages"]))
            else:
                prompt = check_string("prompt", body.get("prompt"))
                ids = tokenizer.encode(prompt, add_special_tokens=special)
            return json_bytes({"tokens": ids, "count": len(ids), "max_model_len": most})

        await call.data(await offload(work), "application/json")

    async def detokenize(self, call: Call) -> None:
        body = call.body
        check_fields(body, DETOKENIZE)
        engine = self._models.find(body.get("model")).engine
        tokenizer, end = engine.tokenizer, engine.model.vocab_size

        def work() -> bytes:
            tokens: Any = body["tokens"]
            if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
                raise InvalidRequest("tokens", tokens, "must be a list of token ids")
            for index, token in enumerate(tokens):
                if not 0 <= token < end:
                    raise InvalidRequest(f"tokens[{index}]", token, f"must be in [0, {end})")
            return json_bytes({"prompt": tokenizer.decode(tokens)})

        await call.data(await offload(work), "application/json")
