"""`Models`: the engines of an application by the names that requests use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from asyncinfer.engine import Engine
from asyncinfer.errors import AsyncInferError, EngineClosed, EngineDead, InvalidConfig
from asyncinfer.remote import RemoteEngine
from asyncinfer.server.errors import HttpError
from asyncinfer.stats import AdapterInfo

__all__ = ["Model", "Models", "Served"]


#: The engines that an application can serve.
Served: TypeAlias = Engine | RemoteEngine


class Model(NamedTuple):
    """What a request's `model` names: an engine, or one of its LoRA adapters."""

    name: str
    engine: Served
    adapter: str | None = None


class Models:
    """Finds models by name. Adapters come and go, and so are looked up each time."""

    def __init__(self, engines: Served | Mapping[str, Served]) -> None:
        """Raises `InvalidConfig`."""
        self._created = int(time.time())
        self._engines: dict[str | None, Served] = {}
        #: The model's name, for an engine that was given without a name, once the model is loaded.
        self._unnamed: str | None = None
        if isinstance(engines, Served):
            self._engines[None] = engines
        elif not isinstance(engines, Mapping) or not engines:
            bound = "must be an Engine, or map a name to one at least"
            raise InvalidConfig("engines", engines, bound)
        else:
            for name, engine in engines.items():
                if not isinstance(name, str) or not name or not isinstance(engine, Served):
                    raise InvalidConfig("engines", name, "must map names to engines")
                self._engines[name] = engine

    @property
    def engines(self) -> dict[str, Served]:
        return {self._name(name, engine): engine for name, engine in self._engines.items()}

    @property
    def _serving(self) -> dict[str, Served]:
        """The engines that can say what they have; all where none can, since each says why."""
        engines = self.engines
        return {name: each for name, each in engines.items() if each.health().serving} or engines

    def find(self, name: object) -> Model:
        """The model of a request; the first engine if it names none. Raises `HttpError`."""
        engines = self.engines
        if name is None:
            first = next(iter(engines))
            return Model(first, engines[first])
        if isinstance(name, str):
            if name in engines:
                return Model(name, engines[name])
            for engine in self._serving.values():
                if any(adapter.name == name for adapter in _adapters(engine)):
                    return Model(name, engine, name)
        known = ", ".join(model["id"] for model in self.listed())
        raise HttpError(
            404,
            "not_found_error",
            f"model={str(name)[:80]!r}: no such model; there are: {known}",
            param="model",
            code="model_not_found",
        )

    def listed(self) -> list[dict[str, Any]]:
        """The entry of each model in `/v1/models`. Raises `EngineClosed` and `EngineDead` where no
        engine serves."""
        found = []
        for name, engine in self._serving.items():
            found.append(self.entry(Model(name, engine)))
            loaded = [self.entry(Model(each.name, engine)) for each in _adapters(engine)]
            found.extend({**each, "parent": name} for each in loaded)
        return found

    def entry(self, model: Model) -> dict[str, Any]:
        """The entry of one. Raises `EngineClosed` and `EngineDead`."""
        health = model.engine.health()
        if not health.serving:
            # The model of a closed engine can still be read.
            kind = EngineDead if health.state == "dead" else EngineClosed
            raise kind("; ".join(health.reasons) or f"the engine is {health.state}")
        told: dict[str, Any] = {"id": model.name, "object": "model", "created": self._created}
        told |= {"owned_by": "asyncinfer", "max_model_len": model.engine.model.max_context}
        if model.adapter is not None:
            # An engine may have several names.
            names = (name for name, each in self.engines.items() if each is model.engine)
            told["parent"] = next(names)
        return told

    def _name(self, name: str | None, engine: Served) -> str:
        """The engine's name: the one given, else its model's, which it keeps when it is closed."""
        if name is not None:
            return name
        if self._unnamed is None:
            with suppress(AsyncInferError):
                self._unnamed = engine.model.name
        return self._unnamed or "model"


def _adapters(engine: Served) -> list[AdapterInfo]:
    """The loaded adapters; replicas have none."""
    return [] if isinstance(engine, RemoteEngine) else [*engine.adapters.list()]
