"""`RayEngine`: replicas of an engine as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from asyncinfer.checks import check_choice, check_integer, checking_config
from asyncinfer.errors import InvalidConfig
from asyncinfer.remote import ROUTINGS, RemoteEngine, Replica, ReplicaLost, Routing

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs Ray: pip install "asyncinfer[ray]"', name=error.name
    ) from error

__all__ = ["RayEngine", "RayLink"]

#: The most concurrent calls of an actor: its replica bounds requests by itself.
_CALLS = 100_000


class RayLink:
    """A link to a replica that is an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        """See `Link`."""
        try:
            return await getattr(self.actor, method).remote(*args)
        except RayActorError as error:
            raise ReplicaLost(f"{method}: {error}") from error
        except RayTaskError as error:
            # The class of Ray's own error is made of both errors' classes.
            cause = error.cause
            raise cause if isinstance(cause, BaseException) else error from None


class RayEngine(RemoteEngine):
    """A `RemoteEngine` whose replicas are actors. It creates them when it opens, and ends them when
    it closes. Ray restarts an actor that dies; its requests fail with `ReplicaLost`. Uses the
    running Ray, or starts one on this machine alone.

    Args:
        model: as of `Engine`; each replica loads it.
        replicas: how many there are at first; `scale` changes it.
        actor_options: what Ray is to know of an actor, such as `{"num_gpus": 2}`. Without it an
            actor has a processor, and a GPU where the cluster has any.
        routing: see `RemoteEngine`.
        options: of each `Engine`.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        replicas: int = 2,
        actor_options: Mapping[str, Any] | None = None,
        routing: Routing = "prefix",
        **options: Any,
    ) -> None:
        """Raises `InvalidConfig`."""
        with checking_config():
            check_integer("replicas", replicas, 1)
            # Checked before any actor exists, since nobody would end one.
            check_choice("routing", routing, ROUTINGS)
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        options.setdefault("prefix_secret", secrets.token_bytes(32))
        self._model, self._options = model, options
        # Ray hides the GPUs from an actor that asks for none.
        gpus = min(1, ray.cluster_resources().get("GPU", 0))
        own = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": -1}
        chosen = own | dict(actor_options or {})
        self._make = ray.remote(Replica).options(max_concurrency=_CALLS, **chosen)
        self._made: dict[str, RayLink] = {}
        self._number = 0
        self._scaling = asyncio.Lock()
        super().__init__(dict(self._new() for _ in range(replicas)), routing=routing)

    @property
    def links(self) -> Mapping[str, RayLink]:
        """The links to the replicas, by name."""
        return self._made

    @property
    def lost(self) -> Mapping[str, Exception]:
        """Replicas that do not answer, each with the reason."""
        return self._dispatcher.lost

    async def scale(self, replicas: int, *, drain_timeout: float | None = None) -> None:
        """Change the number of replicas. Lost ones go first, then the newest, once their requests
        are done or `drain_timeout` seconds have passed. A second call waits for the first. Raises
        as `add` and `remove` do."""
        with checking_config():
            check_integer("replicas", replicas, 1)
        async with self._scaling:
            while len(self._made) < replicas:
                name, link = self._new()
                try:
                    await self.add(name, link)
                except BaseException:
                    self._end(name, link)
                    raise
            while len(self._made) > replicas:
                lost = [name for name in self._made if name in self.lost]
                await self.remove((lost or [*self._made])[-1], drain_timeout=drain_timeout)

    async def remove(self, name: str, *, drain_timeout: float | None = None) -> None:
        """See `RemoteEngine.remove`. The actor ends."""
        link = self._made.get(name)
        try:
            # A lost replica cannot be asked to close.
            with suppress(ReplicaLost):
                await super().remove(name, drain_timeout=drain_timeout)
        except InvalidConfig:
            # It is still opening, or another call removes it.
            link = None
            raise
        finally:
            if link is not None:
                self._end(name, link)

    async def aclose(self, *, drain_timeout: float | None = None) -> None:
        """Close and end all actors."""
        try:
            await super().aclose(drain_timeout=drain_timeout)
        finally:
            while self._made:
                ray.kill(self._made.popitem()[1].actor)

    def _end(self, name: str, link: RayLink) -> None:
        # `aclose` may have ended it.
        if self._made.pop(name, None) is link:
            ray.kill(link.actor)

    def _new(self) -> tuple[str, RayLink]:
        name = f"replica-{self._number}"
        self._number += 1
        self._made[name] = RayLink(self._make.remote(self._model, **self._options))
        return name, self._made[name]
