"""The chat page: what it may load, and how it behaves in a browser where there is one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import anyio
import pytest
from server.browser import CHROMIUM, opened
from server.chat_model import ChatModel, ask, listening
from support import Until, places

from asyncinfer import Engine
from asyncinfer.server import ApiKey, create_app
from asyncinfer.testing import StepGate

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

            # The button stops, and the request is gone.
            gate.close()
            await tab.say("Go on")
            await tab.until(f"{BUTTON} === 'Stop'")
            await until(lambda: places(engine) == 1)
            await tab.run("document.getElementById('send').click()")
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


@pytest.mark.slow
@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="makes the pictures of the docs")
async def test_the_pictures_of_the_docs(tmp_path: Path) -> None:
    folder = anyio.Path(os.environ["SCREENSHOTS"])
    async with Engine() as engine:
        async with listening(create_app(engine, page=True)) as url, opened(url, tmp_path) as tab:
            await tab.until("document.getElementById('model').value !== ''")
            await tab.run("document.getElementById('max_completion_tokens').value = 48")
            await tab.say("the mean of a list of numbers")
            await tab.until(f"{LAST}?.querySelector('.figures')")
            for theme in ("light", "dark"):
                await tab.run(f"theme('{theme}')")
                await folder.joinpath(f"chat-page-{theme}.png").write_bytes(await tab.shoot())
