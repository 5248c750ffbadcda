"""The paths of the application, their handlers and middleware."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route

from asyncinfer.server import chat, embeddings, messages, responses
from asyncinfer.server.body import Bodies
from asyncinfer.server.chat import Chat
from asyncinfer.server.completions import Completions
from asyncinfer.server.embeddings import EMBEDDINGS, EmbeddingsEndpoint
from asyncinfer.server.endpoint import Endpoint, Handler
from asyncinfer.server.errors import HttpError, anthropic_error
from asyncinfer.server.fields import CHAT, COMPLETION, MESSAGES, RESPONSES
from asyncinfer.server.hosts import Hosts, refuse
from asyncinfer.server.keys import Keys
from asyncinfer.server.messages import Messages
from asyncinfer.server.models import Models, Served
from asyncinfer.server.openapi import Operation, document
from asyncinfer.server.page import Page
from asyncinfer.server.plain import DETOKENIZE, TOKENIZE, Plain
from asyncinfer.server.responses import Responses
from asyncinfer.server.traffic import Traffic

__all__ = ["make"]

#: Characters of an unknown path that its refusal repeats.
_SHOWN: Final = 256
_ANTHROPIC: Final[dict[str, Any]] = {"error_body": anthropic_error, "error_event": "error"}


def make(
    engines: Served | Mapping[str, Served],
    keys: Keys,
    max_body_bytes: int,
    cors_origins: tuple[str, ...],
    allowed_hosts: tuple[str, ...],
    page: bool,
) -> Starlette:
    """See `create_app`."""
    models, traffic, bodies = Models(engines), Traffic(), Bodies(max_body_bytes)
    plain = Plain(models, traffic)
    anthropic = Messages(models)
    operations = [
        Operation("POST", "/v1/chat/completions", "Answer a chat.", CHAT),
        Operation("POST", "/v1/completions", "Complete a text.", COMPLETION),
        Operation("POST", "/v1/embeddings", "Vectors of texts.", EMBEDDINGS),
        Operation("POST", "/v1/responses", "Answer items of a conversation.", RESPONSES),
        Operation("POST", "/v1/messages", "Answer a chat, by Anthropic's protocol.", MESSAGES),
        Operation("POST", "/v1/messages/count_tokens", "Count a chat's tokens.", MESSAGES),
        Operation("POST", "/tokenize", "Token ids of a text or a chat.", TOKENIZE),
        Operation("POST", "/detokenize", "The text of token ids.", DETOKENIZE),
        Operation("GET", "/v1/models", "The models that requests may name."),
        Operation("GET", "/v1/models/{model}", "One of them."),
        Operation("GET", "/metrics", "Counters, in Prometheus' text format."),
        Operation("GET", "/health", "Whether all engines serve.", free=True),
        Operation("GET", "/openapi.json", "This document.", free=True),
    ]

    handlers: dict[str, Handler] = {
        "/v1/chat/completions": Chat(models),
        "/v1/completions": Completions(models),
        "/v1/embeddings": EmbeddingsEndpoint(models),
        "/v1/responses": Responses(models),
        "/v1/messages": anthropic,
        "/v1/messages/count_tokens": anthropic.count,
        "/tokenize": plain.tokenize,
        "/detokenize": plain.detokenize,
        "/v1/models": plain.models,
        "/v1/models/{model}": plain.model,
        "/metrics": plain.metrics,
        "/health": plain.health,
        "/openapi.json": lambda call: call.json(document(operations)),
    }
    if page:
        operations.append(Operation("GET", "/", "A page to chat on.", free=True))
        handlers["/"] = Page()
    names: dict[str, Mapping[str, str]] = {
        "/v1/chat/completions": chat.NAMES,
        "/v1/embeddings": embeddings.NAMES,
        "/v1/responses": responses.NAMES,
        "/v1/messages": messages.NAMES,
        "/v1/messages/count_tokens": messages.NAMES,
    }
    routes = [
        Route(
            # A model's name may have slashes.
            operation.path.replace("{model}", "{model:path}"),
            Endpoint(
                operation.path,
                handlers[operation.path],
                keys=None if operation.free else keys,
                traffic=traffic,
                bodies=bodies,
                fields=operation.fields,
                **(_ANTHROPIC if operation.path.startswith("/v1/messages") else {}),
                names=names.get(operation.path),
            ),
            methods=[operation.method],
        )
        for operation in operations
    ]
    # Litestar gives a mounted application paths that end with a slash, whatever the client sent.
    routes += [Route(f"{each.path}/", each.endpoint, methods=each.methods) for each in routes]
    middleware = []
    if allowed_hosts:
        middleware.append(Middleware(Hosts, allowed=allowed_hosts))
    if cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[
                    *("x-request-id", "request-id", "x-should-retry"),
                    *("retry-after", "retry-after-ms"),
                ],
            )
        )
    unknown = partial(_no_such_path, {operation.path for operation in operations})
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: unknown}
    )
    # A redirect would have neither an id nor the scheme and the prefix of a proxy.
    app.router.redirect_slashes = False
    return app


async def _no_such_path(paths: Collection[str], request: Request, error: Any) -> Any:
    """The answer for a path that is not among `paths`, or for another method."""
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    whole = request.scope["path"]
    path = whole.removeprefix(request.scope.get("root_path", "")).removesuffix("/")
    shown = whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}..."
    message = f"{request.method} {shown}: {error.detail}"
    # OpenAI's clients add a path to a base URL that has /v1; Anthropic's add /v1 themselves.
    if f"/v1{path}" in paths:
        message += f"; it is /v1{path}: the client's base URL must end with /v1"
    elif (shorter := path.removeprefix("/v1")) != path and shorter in paths:
        message += f"; it is {shorter}: the client's base URL must end without /v1"
    refusal = HttpError(error.status_code, kind, message, headers=error.headers)
    return partial(refuse, refusal)
