"""An engine tells nobody what it is asked: no connection, no prompt in a log."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest

from asyncinfer import Engine, InvalidRequest
from asyncinfer.testing import FakeModel

PROGRAM = """
import socket, sys

def forbid(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "subprocess.Popen"):
        raise SystemExit(f"{event} {arguments}")

# The builds of torch for a GPU have the system list its libraries.
import torch
sys.addaudithook(forbid)

import asyncio
from asyncinfer import Engine

async def main():
    async with Engine(device="cpu", kv_bytes=1 << 22) as engine:
        print((await engine.generate("def add(a, b):", max_tokens=4)).usage.completion_tokens)

asyncio.run(main())
"""


def test_a_local_model_connects_to_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


@pytest.mark.anyio
async def test_no_log_event_has_a_prompt_or_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    prompt = "the password is swordfish"
    with caplog.at_level(logging.DEBUG, "asyncinfer"):
        async with Engine(FakeModel(), drain_timeout=0.0) as engine:
            answer = (await engine.generate(prompt, max_tokens=40, temperature=0.0)).text
            # The full buffer holds the request back, so that leaving it is an abort.
            async with engine.stream(prompt, max_tokens=40, buffer=2) as stream:
                await anext(stream)
            with pytest.raises(InvalidRequest):
                await engine.generate("swordfish " * 1000)
    told = [record.getMessage() for record in caplog.records]
    assert any("request_finished" in message for message in told)
    assert any("request_aborted" in message for message in told)
    assert not [message for message in told if "swordfish" in message or answer[:8] in message]
