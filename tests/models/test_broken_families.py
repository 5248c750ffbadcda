"""Families that raise, hang, lie or cannot be imported: named with the call where they are asked
for, and harmless to everybody else."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from asyncinfer import Engine, plugins
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cli.app import asyncinfer as cli
from asyncinfer.errors import ModelLoadError, PluginError
from asyncinfer.models import Family, JsonReader, ModelConfig, examine, family_calls, read_config

NAME = "OddForCausalLM"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped model as one of an architecture that a plugin is for."""
    path = tmp_path / "model"
    shutil.copytree(MODEL_PATH, path)
    config = path / "config.json"
    values = {**json.loads(config.read_text()), "architectures": [NAME], "model_type": "odd"}
    config.write_text(json.dumps(values))
    return path


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(plugins.models, "_registered", {})
    monkeypatch.setattr(plugins.models, "_loaded", {})

    def add(family: Any, name: str = NAME) -> None:
        plugins.register("asyncinfer.models", name, family)

    return add


class Interrupted(BaseException):
    """Of a library that has one of its own."""


RAISED = [
    KeyError("n_embd"),
    ValueError("no"),
    TypeError("no"),
    AttributeError("no"),
    RecursionError("no"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    Interrupted("no"),
]


def raising(error: BaseException) -> type[Family]:
    class Raises(Family):
        def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
            raise error

    return Raises


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_family_raises(error: BaseException, folder: Path, register: Any) -> None:
    register(raising(error))

    async def run() -> None:
        await Engine.open(folder, device="cpu")

    with pytest.raises(PluginError) as caught:
        anyio.run(run)
    for part in (NAME, "asyncinfer.models", "read() raised", type(error).__name__):
        assert part in str(caught.value)
    assert caught.value.__cause__ is error
    with pytest.raises(PluginError, match=r"read\(\) raised"):
        read_config(folder)


def test_what_a_family_refuses_stays_the_files_fault(folder: Path, register: Any) -> None:
    register(raising(ModelLoadError("n_embd=3: must be even", file="config.json")))
    with pytest.raises(ModelLoadError, match="n_embd=3: must be even"):
        read_config(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm": "layernorm"}, "ModelConfig.norm='layernorm': must be one of 'rms'"),
        ({"norm_eps": -1.0}, "ModelConfig.norm_eps=-1.0: must be a number above 0"),
        ({"num_kv_heads": 3}, "ModelConfig.num_kv_heads=3: must divide num_heads"),
    ],
)
def test_a_shape_that_cannot_be(
    changes: dict[str, Any], says: str, folder: Path, register: Any
) -> None:
    class Wrong(Family):
        def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
            return replace(llama, **changes)

    register(Wrong)
    with pytest.raises(PluginError) as caught:
        read_config(folder)
    assert NAME in str(caught.value)
    assert says in str(caught.value)


class Forced(Family):
    """Changes what is frozen."""

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        object.__setattr__(llama, "norm", "banana")
        return llama


class Another(ModelConfig):
    """Checks nothing."""

    def __post_init__(self) -> None: ...


class Disguised(Family):
    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        values = {name: getattr(llama, name) for name in ModelConfig.__dataclass_fields__}
        return Another(**values)


class Nothing(Family):
    def read(self, architecture: str, values: Any, file: str) -> Any:
        return {}


class Sly(Family):
    @property
    def model_type(self) -> str:  # type: ignore[override]
        raise KeyError("sly")


class Numbered(Family):
    model_type = 7  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("family", "says"),
    [
        (Forced, r"norm='banana': must be one of"),
        (Disguised, r"gave Another, not a ModelConfig"),
        (Nothing, r"gave dict, not a ModelConfig"),
        (Sly, r"model_type raised KeyError\('sly'\)"),
        (Numbered, r"model_type=7: must be a string or None"),
    ],
)
def test_a_family_that_lies(family: Any, says: str, folder: Path, register: Any) -> None:
    register(family)
    with pytest.raises(PluginError, match=says) as caught:
        read_config(folder)
    assert NAME in str(caught.value)


class Hanging(Family):
    """Until it is told to go on."""

    go_on = threading.Event()

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        self.go_on.wait()
        return llama


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hanging]]:
    monkeypatch.setattr(family_calls, "READ_TIMEOUT", 2.0)
    threads = set(threading.enumerate())
    Hanging.go_on.clear()
    yield Hanging
    Hanging.go_on.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(120)
        assert not thread.is_alive()


def test_a_family_that_hangs(folder: Path, register: Any, hanging: type[Hanging]) -> None:
    register(hanging)
    with pytest.raises(PluginError, match=r"read\(\) has not returned after 2 s") as caught:
        read_config(folder)
    assert NAME in str(caught.value)
    assert "self.go_on.wait()" in str(caught.value)


def test_a_family_cannot_change_what_others_are_asked_of(folder: Path, register: Any) -> None:
    class Greedy(Family):
        def read(self, architecture: str, values: Any, file: str) -> Any:
            values.clear()
            return {}

    register(Greedy, "GreedyForCausalLM")
    first, nearest, *_, greedy = examine(folder).problems
    assert NAME in first
    assert nearest == "its tensors are those of LlamaForCausalLM: what it computes may still differ"
    assert "GreedyForCausalLM" in greedy


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put a distribution with a family on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules = set(sys.modules)

    def write(name: str, source: str) -> None:
        module = name.lower()
        (site / f"{module}.py").write_text(source)
        info = site / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[asyncinfer.models]\n{name} = {module}:It\n")

    yield write
    for name in set(sys.modules) - modules:
        del sys.modules[name]


FAMILY = """
from asyncinfer.models import Family
class It(Family):
    '''It.'''
    def read(self, architecture, values, file):
        {}
"""


def test_broken_families_break_nobody_elses_checkpoint(folder: Path, install: Any) -> None:
    """An unknown checkpoint is held against every family that can be asked; the others are named,
    for theirs may be the one that was meant."""
    install("UnimportableForCausalLM", "raise ImportError('no such driver')")
    install("KeyErrorForCausalLM", FAMILY.format("return values['n_embd']"))
    install("LeavingForCausalLM", FAMILY.format("raise SystemExit(3)"))
    found = examine(folder)
    first, nearest, *broken = found.problems
    assert f"architectures=['{NAME}']" in first
    assert nearest.startswith("its tensors are those of LlamaForCausalLM")
    assert len(broken) == 3
    for line, (name, why) in zip(
        sorted(broken),
        [
            ("KeyErrorForCausalLM", "read() raised KeyError('n_embd')"),
            ("LeavingForCausalLM", "read() raised SystemExit(3)"),
            ("UnimportableForCausalLM", "cannot be imported: ImportError('no such driver')"),
        ],
        strict=True,
    ):
        assert line.startswith(f"not compared: plugin '{name}' ({name.lower()} 1.2, group ")
        assert why in line

    done = CliRunner().invoke(cli, ["models", str(folder)])
    assert done.exception is None
    assert "its tensors are those of LlamaForCausalLM" in done.output
    assert "UnimportableForCausalLM" in done.output
    listed = CliRunner().invoke(cli, ["models"])
    assert listed.exception is None
    assert "BROKEN: plugin 'UnimportableForCausalLM'" in listed.output
    assert "LlamaForCausalLM " in listed.output


def test_what_a_shipped_family_does_not_take_is_the_files_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace(NAME, "LlamaForCausalLM"))
    monkeypatch.setattr(Family, "configure", lambda self, config, llama: {}["n_embd"])
    with pytest.raises(ModelLoadError, match=r"cannot be read as LlamaForCausalLM: KeyError"):
        read_config(folder)
