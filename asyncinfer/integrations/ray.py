"""`RayEngine`: replicas of an engine as actors of a Ray cluster."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from asyncinfer.checks import check_choice, check_integer, checking_config
from asyncinfer.remote import ROUTINGS, RemoteEngine, Replica, ReplicaLost, Routing

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs Ray: pip install "asyncinfer[ray]"', name=error.name
    ) from error

__all__ = ["RayEngine", "RayLink"]

#: Calls that an actor has at once: a replica bounds its requests by itself.
_CALLS = 100_000


class RayLink:
    """A way to a replica that is an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        """See `Link`."""
        try:
            return await getattr(self.actor, method).remote(*args)
        except RayActorError as error:
            raise ReplicaLost(f"{method}: {error}") from error
        except RayTaskError as error:
            # Ray's own error is of a class that is made of both.
            cause = error.cause
            raise cause if isinstance(cause, BaseException) else error from None


class RayEngine(RemoteEngine):
    """A `RemoteEngine` of actors, which it makes when it is opened, and ends when it is closed. Ray
    brings one back that dies; its requests fail with `ReplicaLost`. On a Ray that is running, or on
    one of this machine alone that it starts.

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
            # Before there are actors, which would be nobody's.
            check_choice("routing", routing, ROUTINGS)
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        options.setdefault("prefix_secret", secrets.token_bytes(32))
        self._model, self._options = model, options
        # Ray hides GPUs from an actor that asks for none.
        gpus = min(1, ray.cluster_resources().get("GPU", 0))
        own = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": -1}
        chosen = own | dict(actor_options or {})
        self._make = ray.remote(Replica).options(max_concurrency=_CALLS, **chosen)
        self._made: dict[str, RayLink] = {}
        self._number = 0
        super().__init__(dict(self._new() for _ in range(replicas)), routing=routing)

    @property
    def links(self) -> Mapping[str, RayLink]:
        """The ways to the replicas, by name."""
        return self._made

    @property
    def lost(self) -> Mapping[str, Exception]:
        """Replicas that do not answer, by name, and why."""
        return self._dispatcher.lost

    async def scale(self, replicas: int, *, drain_timeout: float | None = None) -> None:
        """Have so many replicas. Those that are lost go first, then the newest, once their requests
        are done, or `drain_timeout` seconds have passed. Raises as `add` and `remove` do."""
        with checking_config():
            check_integer("replicas", replicas, 1)
        while len(self._made) < replicas:
            name, link = self._new()
            try:
                await self.add(name, link)
            except BaseException:
                # Unless the engine was closed meanwhile.
                if self._made.pop(name, None) is link:
                    ray.kill(link.actor)
                raise
        while len(self._made) > replicas:
            lost = [name for name in self._made if name in self.lost]
            name = (lost or [*self._made])[-1]
            try:
                # One that is lost cannot be asked to close.
                with suppress(ReplicaLost):
                    await self.remove(name, drain_timeout=drain_timeout)
            finally:
                ray.kill(self._made.pop(name).actor)

    async def aclose(self, *, drain_timeout: float | None = None) -> None:
        """Close and end all actors."""
        try:
            await super().aclose(drain_timeout=drain_timeout)
        finally:
            while self._made:
                ray.kill(self._made.popitem()[1].actor)

    def _new(self) -> tuple[str, RayLink]:
        name = f"replica-{self._number}"
        self._number += 1
        self._made[name] = RayLink(self._make.remote(self._model, **self._options))
        return name, self._made[name]
