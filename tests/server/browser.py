"""A headless Chromium, driven by its own protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Tab:
    """A page that is open."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        #: What scripts threw, and what the browser refused.
        self.complaints: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        """A command's result."""
        number = next(self._ids)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(await self._socket.recv())
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression."""
        result = await self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        with anyio.fail_after(120):
            while not await self.run(f"Boolean({script})"):
                await anyio.sleep(0.02)

    async def say(self, text: str) -> None:
        """Type a message, and send it."""
        await self.run("document.getElementById('text').focus()")
        await self.send("Input.insertText", text=text)
        await self.press("Enter")

    async def press(self, key: str) -> None:
        """Press a key, `Enter` or `Escape`, and let it go."""
        code, text = {"Enter": (13, "\r"), "Escape": (27, "")}[key]
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, **told)

    async def shoot(self) -> bytes:
        """A picture, as PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[Tab]:
    """A tab that shows `url`. `folder` is the browser's own."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=1100,760"]
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *options,
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        found = anyio.Path(folder / "DevToolsActivePort")
        with anyio.fail_after(120):
            while not await found.exists() or "\n" not in await found.read_text():
                await anyio.sleep(0.05)
        port = int((await found.read_text()).splitlines()[0])
        async with httpx2.AsyncClient(timeout=120) as client:
            tabs = (await client.get(f"http://127.0.0.1:{port}/json")).json()
        (address,) = (tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        async with connect(address, max_size=None, open_timeout=120, ping_interval=None) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                await tab.send(f"{domain}.enable")
            await tab.send("Page.navigate", url=url)
            await tab.until("document.readyState === 'complete'")
            yield tab
    finally:
        browser.terminate()
        await browser.wait()
