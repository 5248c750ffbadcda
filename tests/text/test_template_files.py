"""Templates and named tokens where checkpoints keep them, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, meta
from text import backends
from transformers import PreTrainedTokenizerFast

from asyncinfer import Engine, InvalidRequest, ModelLoadError
from asyncinfer.testing import FakeModel
from asyncinfer.text import ChatTemplate, Tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CONFIGS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"chat_template": "config"}, {}),
    ({"chat_template": "config"}, {"chat_template.jinja": "file"}),
    (
        {
            "chat_template": [
                {"name": "default", "template": "config"},
                {"name": "tool_use", "template": "config tools {{ tools|length }}"},
            ]
        },
        {},
    ),
    (
        {"chat_template": [{"name": "tool_use", "template": "config tools"}]},
        {"chat_template.jinja": "file {{ tools is none }}"},
    ),
    (
        {"chat_template": "config"},
        {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "more"},
    ),
    (
        {"chat_template": "config"},
        {"additional_chat_templates/tool_use.jinja": "more", "chat_template.jinja": "file"},
    ),
    ({"chat_template": "config"}, {"additional_chat_templates/rag.jinja": "only for documents"}),
    ({}, {}),
]
NAMED = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ boi_token }}"
TOKENS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"bos_token": "A", "eos_token": "B"}, None),
    ({"bos_token": None}, {"bos_token": "C", "eos_token": {"content": "D", "lstrip": False}}),
    ({"bos_token": "A"}, {"bos_token": "C"}),
    ({"bos_token": "A", "added_tokens_decoder": {}}, {"bos_token": "C"}),
    ({"image_token": "I", "extra_special_tokens": {"boi_token": "J"}}, None),
    ({"extra_special_tokens": ["I", "J"], "image_token": "K"}, {"eos_token": "B"}),
    ({"additional_special_tokens": ["I"]}, {"additional_special_tokens": ["J"]}),
]


def folder_of(path: Path, config: dict[str, Any], files: dict[str, str]) -> Path:
    backends.byte_level().save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content)
    return path


@pytest.mark.parametrize(
    ("config", "taken"), [({}, "of its own"), ({"chat_template": "config"}, "config")]
)
def test_the_file_of_models_of_images_and_text(
    tmp_path: Path, config: dict[str, Any], taken: str
) -> None:
    files = {"chat_template.json": json.dumps({"chat_template": "of its own"})}
    assert ChatTemplate.from_folder(folder_of(tmp_path, config, files)).render(HELLO) == taken


@pytest.mark.parametrize("tools", [None, TOOLS, []], ids=["none", "tools", "empty"])
@pytest.mark.parametrize(("config", "files"), CONFIGS)
def test_which_template_is_taken(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], tools: Any
) -> None:
    folder = folder_of(tmp_path, config, files)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate.from_folder(folder)
    try:
        expected = theirs.get_chat_template(tools=tools)
    except ValueError:
        with pytest.raises(InvalidRequest, match="no chat template"):
            ours.render(HELLO)
        assert not ours
        return
    options = {} if tools is None else {"tools": tools}
    if tools is None or "tools" in meta.find_undeclared_variables(Environment().parse(expected)):
        text = theirs.apply_chat_template(HELLO, tools=tools, tokenize=False)
        assert ours.render(HELLO, **options) == text
    else:
        with pytest.raises(InvalidRequest, match="tools"):
            ours.render(HELLO, **options)


@pytest.mark.parametrize(("config", "older"), TOKENS)
def test_tokens_by_name(
    tmp_path: Path, config: dict[str, Any], older: dict[str, Any] | None
) -> None:
    files = {} if older is None else {"special_tokens_map.json": json.dumps(older)}
    folder = folder_of(tmp_path, {"chat_template": NAMED + "!", **config}, files)
    expected = PreTrainedTokenizerFast.from_pretrained(folder)
    text = ChatTemplate.from_folder(folder).render(HELLO)
    assert text == expected.apply_chat_template(HELLO, tokenize=False)
    ours = Tokenizer.from_folder(folder)
    assert ours.bos_id == expected.bos_token_id
    assert ours.special_ids >= set(expected.all_special_ids)


def test_templates_are_files_of_the_checkpoint(tmp_path: Path) -> None:
    model, outside = tmp_path / "model", tmp_path / "secret"
    model.mkdir()
    outside.write_text("secret")
    folder_of(model, {}, {"additional_chat_templates/tool_use.jinja": "x"})
    link = model / "additional_chat_templates" / "default.jinja"
    link.symlink_to(outside)
    with pytest.raises(ModelLoadError, match="link out of"):
        ChatTemplate.from_folder(model)
    link.unlink()
    link.write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match="not readable"):
        ChatTemplate.from_folder(model)
    link.write_bytes(b" " * ((4 << 20) + 1))
    with pytest.raises(ModelLoadError, match="at most 4194304"):
        ChatTemplate.from_folder(model)
    link.unlink()
    for count in range(64):
        (link.parent / f"{count}.jinja").write_text("x")
    with pytest.raises(ModelLoadError, match="65 templates: at most 64"):
        ChatTemplate.from_folder(model)


BROKEN = [
    ("{% if %}", "does not compile: line 1: "),
    ("\n{{ x|nofilter }}", "does not compile: line 2: "),
    ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "does not compile"),
    ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "does not compile"),
    ("  \n", "is empty"),
    ("", "is empty"),
]


@pytest.mark.parametrize(("source", "says"), BROKEN)
def test_a_template_that_cannot_be_used(source: str, says: str) -> None:
    template = ChatTemplate(source)
    assert not template
    assert len(template.notes) == 1
    assert says in template.notes[0]
    assert "chats are refused" in template.notes[0]
    with pytest.raises(InvalidRequest, match=f"{says}.*give the prompt as text or token ids"):
        template.render(HELLO)


def test_one_that_only_tools_need() -> None:
    template = ChatTemplate("{{ messages|length }}", tool_source="{% if %}")
    assert template
    assert "does not compile" in template.notes[0]
    assert template.render(HELLO) == "1"
    with pytest.raises(InvalidRequest, match="does not compile"):
        template.render(HELLO, tools=TOOLS)


@pytest.mark.parametrize("source", ["{% if false %}x{% endif %}", "{{ ' ' }}\n"])
def test_a_template_that_writes_nothing(source: str) -> None:
    template = ChatTemplate(source)
    assert template.notes == ()
    with pytest.raises(InvalidRequest, match="writes nothing for them"):
        template.render(HELLO)


class Templated(FakeModel):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def load(self, config: Any, progress: Any = None) -> Any:
        from dataclasses import replace

        return replace(super().load(config, progress), template=ChatTemplate(self.source))


@pytest.mark.anyio
@pytest.mark.parametrize(("source", "says"), BROKEN[::4])
async def test_texts_are_completed_all_the_same(source: str, says: str) -> None:
    async with Engine(Templated(source)) as engine:
        assert (await engine.generate("hello", max_tokens=2, ignore_eos=True)).token_ids
        with pytest.raises(InvalidRequest, match=says):
            await engine.generate(HELLO)
