"""The chat page: what it may load, and how it behaves in a browser where there is one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from server.browser import CHROMIUM, opened
from server.chat_model import ChatModel, ask, listening
from support import Until, places

from asyncinfer import Engine
from asyncinfer.server import ApiKey, create_app
from asyncinfer.testing import Said, ScriptedModel, StepGate

pytestmark = pytest.mark.anyio

LAST = "[...document.querySelectorAll('.turn')].at(-1)"
BUTTON = "document.getElementById('send').textContent"


async def test_it_is_one_file_that_loads_nothing_else() -> None:
    async with Engine(ChatModel()) as engine:
        assert (await ask(create_app(engine), "/")).status == 404
        answer = await ask(create_app(engine, keys={"a": ApiKey()}, page=True), "/")
    page = answer.body.decode()
    assert not re.search(r"""(src|href)=|url\(|@import|https?://|innerHTML|\son\w+=""", page)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
async def test_a_conversation_in_a_browser(tmp_path: Path, until: Until) -> None:
    gate = StepGate()
    async with Engine(ChatModel(gate=gate)) as engine:
        async with listening(create_app(engine, page=True)) as url, opened(url, tmp_path) as tab:
            await tab.until("document.getElementById('model').value === 'ChatModel'")
            await tab.run(
                "for (const [id, value] of [['max_completion_tokens', 40], ['seed', 5]]) {"
                " const field = document.getElementById(id);"
                " field.value = value; field.dispatchEvent(new Event('change')); }"
            )
            await tab.say("Hello <b>there</b>")
            await tab.until(f"{LAST}?.querySelector('.figures')")
            figures = await tab.run(f"{LAST}.querySelector('.figures').textContent")
            assert re.match(r"40 tokens · [\d.]+ tokens/s · prompt \d+, 0 cached", figures)
            said = await tab.run("document.querySelector('.turn.user').textContent")
            assert said == "Hello <b>there</b>"
            assert await tab.run(f"{LAST}.querySelector('.said').textContent.length") > 10

            # The second turn finds the first in the cache.
            await tab.say("And again")
            await tab.until("document.querySelectorAll('.figures').length === 2")
            figures = await tab.run(f"{LAST}.querySelector('.figures').textContent")
            assert int(re.findall(r"(\d+) cached", figures)[0]) > 0

            # Escape stops as the button does, and the request is gone.
            gate.close()
            await tab.say("Go on")
            await tab.until(f"{BUTTON} === 'Stop'")
            await until(lambda: places(engine) == 1)
            await tab.press("Escape")
            await tab.until(f"{BUTTON} === 'Send'")
            gate.open()
            await until(lambda: places(engine) == 0)

            # Several conversations, which a reload keeps.
            await tab.run("document.getElementById('new').click()")
            assert await tab.run("document.querySelectorAll('.turn').length") == 0
            await tab.say("Another")
            await tab.until(f"{LAST}?.querySelector('.figures')")
            await tab.run("document.getElementById('theme').click()")
            theme = await tab.run("document.documentElement.dataset.theme")
            await tab.send("Page.reload")
            await tab.until("document.querySelectorAll('nav div').length === 2")
            assert await tab.run("document.documentElement.dataset.theme") == theme
            titles = "[...document.querySelectorAll('nav button:first-child')]"
            assert await tab.run(f"{titles}.map((each) => each.textContent)") == [
                "Another",
                "Hello <b>there</b>",
            ]
            assert tab.complaints == []


TOOLS = [
    {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


#: Conversations that were answered by a text alone.
asked: list[list[dict[str, str]]] = []


def answers(messages: list[dict[str, str]]) -> Said | str:
    last = messages[-1]
    if last["role"] == "tool":
        told = [each["content"] for each in messages if each["role"] == "tool"]
        return f"It is {' and '.join(told)}."
    if last["content"].endswith("fail"):
        return Said("It began", error=RuntimeError("secret"))
    if "weather" in last["content"]:
        calls = [("weather", {"city": city}) for city in ("Rome", "Oslo")]
        return Said("Let me look.", reasoning="I need the tool.", tool_calls=calls)
    asked.append(messages)
    if "Fences" in last["content"]:
        return "See\n````md\n```\ninner\n```\n````\nand\n  ```\n  second\n  ```"
    return "Hello."


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
async def test_reasoning_and_calls_in_a_browser(tmp_path: Path) -> None:
    async with Engine(ScriptedModel(answers)) as engine:
        async with listening(create_app(engine, page=True)) as url, opened(url, tmp_path) as tab:
            folds = f"[...{LAST}.querySelectorAll('details.aside')]"

            async def told(script: str) -> Any:
                return await tab.run(f"{folds}.map((each) => {script})")

            async def tools(text: str) -> None:
                await tab.run(
                    f"{{ const field = document.getElementById('tools');"
                    f" field.value = {json.dumps(text)};"
                    " field.dispatchEvent(new Event('change')); }"
                )

            await tab.until("document.getElementById('model').value === 'ScriptedModel'")
            # What is no JSON is said before anything is sent.
            await tools("[")
            await tab.say("The weather?")
            notice = "document.getElementById('notice').textContent"
            await tab.until(f"{notice}.startsWith('Tools: ')")
            assert engine.stats().finished == 0
            await tools(json.dumps(TOOLS))

            await tab.say("The weather, please?")
            await tab.until(f"{LAST}?.querySelector('.figures')")
            assert await told("each.querySelector('summary').textContent") == [
                "Reasoning",
                *["Calls weather"] * 2,
            ]
            assert await told("each.open") == [False] * 3
            assert (await told("each.querySelector('pre').textContent"))[0] == "I need the tool."
            assert await tab.run(f"{LAST}.querySelector('.said').textContent") == "Let me look."

            # The results go back by Enter; one that is missing gets the focus.
            await tab.run(f"{LAST}.querySelector('.result input').focus()")
            await tab.send("Input.insertText", text="21 degrees")
            await tab.press("Enter")
            second = f"{LAST}.querySelectorAll('.result input')[1]"
            assert await tab.run(f"document.activeElement === {second}")
            await tab.send("Input.insertText", text="3")
            await tab.press("Enter")
            said = f"{LAST}?.querySelector('.said')?.textContent"
            await tab.until(f"{said} === 'It is 21 degrees and 3.'")

            # An error keeps what came before it, tells no secret, and can be tried again.
            await tab.say("Now fail")
            await tab.until(f"{LAST}?.querySelector('.error')")
            assert await tab.run(said) == "It began"
            shown = await tab.run(f"{LAST}.textContent")
            assert "the server's log says why" in shown
            assert "secret" not in shown
            count = await tab.run("document.querySelectorAll('.turn').length")
            await tab.run(f"[...{LAST}.querySelectorAll('.acts button')].at(-1).click()")
            await tab.until(f"{LAST}?.querySelector('.error')")
            assert await tab.run("document.querySelectorAll('.turn').length") == count

            # A question after one that has no answer goes with it.
            await tools("")
            await tab.say("Hello")
            await tab.until(f"{said} === 'Hello.'")
            assert asked[-1][-1]["content"] == "Now fail\n\nHello"
            assert await tab.run("document.getElementById('told').textContent") == "Hello."

            # What the page calls odd the server judges, and the focus stays where one reads.
            await tab.run(
                "document.getElementById('temperature').value = '0.75';"
                f"[...{LAST}.querySelectorAll('.acts button')].at(-1).focus()"
            )
            await tab.press("Enter")
            await tab.until(f"document.activeElement.id === 'log' && {BUTTON} === 'Send'")
            await tab.say("Fences")
            await tab.until(f"{LAST}?.querySelectorAll('pre').length === 2")
            code = await tab.run(
                f"[...{LAST}.querySelectorAll('pre')].map((each) => each.textContent)"
            )
            assert code == ["```\ninner\n```", "  second"]

            # Another tab keeps a conversation and deletes another: this one loses none.
            await tab.run(
                "localStorage['asyncinfer.conversations'] = JSON.stringify(["
                "{id: 'theirs', title: 'Theirs', turns: [{role: 'user', content: 'Hi'}]},"
                " ...JSON.parse(localStorage['asyncinfer.conversations'])]);"
                "dispatchEvent(new StorageEvent('storage', {key: 'asyncinfer.conversations'}))"
            )
            await tab.say("Fences again")
            await tab.until(f"{LAST}?.querySelectorAll('pre').length === 2 && {BUTTON} === 'Send'")
            kept = "JSON.parse(localStorage['asyncinfer.conversations'])"
            titles = await tab.run(f"{kept}.map((each) => each.title)")
            assert titles == ["Theirs", "The weather?"]
            assert (await tab.run(f"{kept}[1].turns.at(-2).content")) == "Fences again"

            # On a narrow screen nothing is wider than it.
            narrow = {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": True}
            await tab.send("Emulation.setDeviceMetricsOverride", **narrow)
            assert await tab.run("document.documentElement.scrollWidth") == 360
            assert tab.complaints == []


@pytest.mark.slow
@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="makes the pictures of the docs")
async def test_the_pictures_of_the_docs(tmp_path: Path) -> None:
    folder = anyio.Path(os.environ["SCREENSHOTS"])
    async with Engine("smollm2", max_context=1024) as engine:
        async with listening(create_app(engine, page=True)) as url, opened(url, tmp_path) as tab:
            await tab.until("document.getElementById('model').value !== ''")
            await tab.run("document.getElementById('temperature').value = 0")
            questions = ("What is the capital of France?", "And its largest museum?")
            for count, question in enumerate(questions, 1):
                await tab.say(question)
                await tab.until(f"document.querySelectorAll('.figures').length === {count}")
            for theme in ("light", "dark"):
                await tab.run(f"theme('{theme}')")
                await folder.joinpath(f"chat-page-{theme}.png").write_bytes(await tab.shoot())
