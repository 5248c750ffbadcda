"""`build_app`: replicas of an engine behind HTTP, as an application of Ray Serve."""

# Annotations are not postponed here, since Ray Serve reads that of `build_app`.

from typing import Any

from asyncinfer.integrations.ray import RayEngine
from asyncinfer.remote import Routing
from asyncinfer.server import ApiKey, create_app

try:
    from pydantic import BaseModel, Field
    from ray import serve
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs Ray Serve: pip install "asyncinfer[ray]"', name=error.name
    ) from error

__all__ = ["ServeConfig", "build_app"]

#: The most requests that Serve passes on at once. Engines bound theirs by themselves, with a 429. A
#: request held back by Serve would wait unseen, with no place in an engine's queue.
_ONGOING = 100_000


class ServeConfig(BaseModel, extra="forbid"):
    """The arguments of `build_app`: the `args` of an application in a config file of Serve, or the
    `name=value` of `serve run`."""

    #: As of `Engine`; each replica loads it.
    model: Any = None
    #: How many at first; the ingress' `scale(n)`, or its `user_config`, changes it while it serves.
    replicas: int = Field(default=2, ge=1)
    #: See `RayEngine`.
    routing: Routing = "prefix"
    actor_options: dict[str, Any] = {}
    #: The name that requests use; without it, the model's own.
    name: str | None = None
    #: Bearer keys, each with the fields of its `ApiKey`. None lets everybody in.
    keys: dict[str, ApiKey] | None = None
    #: Options of each `Engine`.
    engine: dict[str, Any] = {}
    #: Options of `create_app` beside `keys`.
    server: dict[str, Any] = {}
    #: Options of Serve's deployment, such as `{"ray_actor_options": {"num_cpus": 0.5}}`.
    deployment: dict[str, Any] = {}


class _Application:
    """The ASGI application of a `RayEngine`, opened once Serve tells the number of replicas."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._engine: RayEngine | None = None
        self._app: Any = None

    async def scale(self, replicas: int) -> None:
        """Open with, or change to, so many replicas. Raises as `RayEngine` and `create_app` do."""
        config = self._config
        if self._engine is not None:
            await self._engine.scale(replicas)
            return
        engine = RayEngine(
            config.model,
            replicas=replicas,
            actor_options=config.actor_options,
            routing=config.routing,
            **config.engine,
        )
        served = engine if config.name is None else {config.name: engine}
        app = create_app(served, keys=config.keys, **config.server)
        await engine.__aenter__()
        self._engine, self._app = engine, app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            if self._engine is not None:
                await self._engine.aclose(drain_timeout=0.0)
            await send({"type": "lifespan.shutdown.complete"})
            return

        async def passed(message: Any) -> None:
            if message["type"] == "http.response.start":
                # Serve adds the same header.
                pairs = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message = {**message, "headers": pairs}
            await send(message)

        await self._app(scope, receive, passed)


def build_app(config: ServeConfig) -> Any:
    """An application of Ray Serve: one ingress, which creates the replicas as actors, routes to
    them as `RayEngine` does, and serves `create_app`. It runs in a process of its own, which Serve
    watches and restarts; the replicas end with it.

        serve.run(build_app(ServeConfig(model="Qwen/Qwen3-0.6B", replicas=4)))

    Raises `ValidationError` for a bad config; Serve's status tells what is wrong with a model.
    """

    def application() -> _Application:
        return _Application(config)

    class Ingress:
        async def scale(self, replicas: int) -> None:
            # Serve's wrapper has `app` as an attribute.
            await self.app.scale(replicas)  # type: ignore[attr-defined]

        async def reconfigure(self, told: dict[str, int]) -> None:
            await self.scale(**told)

    made = serve.deployment(serve.ingress(application)(Ingress)).options(
        **{
            "name": "asyncinfer",
            # One router must see all requests.
            "num_replicas": 1,
            "max_ongoing_requests": _ONGOING,
            **config.deployment,
            "user_config": {"replicas": config.replicas},
        }
    )
    return made.bind()
