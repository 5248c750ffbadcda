"""`asyncinfer serve`, as a person runs it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import dedent

import httpx2
import openai
import pytest
from click.testing import CliRunner
from support import heed_ctrl_c

from asyncinfer.cli.app import asyncinfer


@contextmanager
def served(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command, once it listens; it has to be ended by the block."""
    command = [sys.executable, "-m", "asyncinfer", "serve", "--port", "0", *options]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c)
    try:
        assert program.stderr is not None
        line = program.stderr.readline()
        found = re.search(r"http://[^\s,]+", line)
        assert found is not None, line
        yield found[0], program
    finally:
        if program.poll() is None:
            program.kill()
        program.communicate()


@pytest.mark.slow
def test_a_model_is_served_until_it_is_stopped() -> None:
    """The engine is closed in order: there is no warning, no traceback, and the exit code is 0."""
    with served("--name", "coder", "--api-key", "secret=mine", "--max-requests", "9") as (
        url,
        program,
    ):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong").models.list()
        with openai.OpenAI(base_url=url, api_key="secret") as client:
            assert [model.id for model in client.models.list()] == ["coder"]
            done = client.completions.create(
                model="coder", prompt="import ", max_tokens=4, temperature=0
            )
            assert done.choices[0].text
        health = url.replace("/v1", "/health")
        foreign = httpx2.get(health, headers={"host": "evil.example"}, timeout=120)
        assert foreign.status_code == 400
        program.send_signal(signal.SIGTERM)
        _, told = program.communicate(timeout=240)
        assert (program.returncode, told) == (0, "")


@pytest.mark.slow
def test_who_does_not_send_or_read_is_cut_when_the_server_is_stopped() -> None:
    """Without a traceback for each of them."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    many = {"prompt": "import ", "max_tokens": 1000, "n": 8, "logprobs": 20, "ignore_eos": True}
    body = json.dumps({**many, "stream": True})
    whole = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
    with served("-m", "embedded", "--drain-timeout", "0") as (url, program):
        place = ("127.0.0.1", int(url.rpartition(":")[2].removesuffix("/v1")))
        with socket.create_connection(place) as half, socket.socket() as unread:
            half.sendall(whole[:-1])
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.connect(place)
            unread.sendall(whole)
            metrics = url.replace("/v1", "/metrics")
            # Its stream is paused once nothing more can be sent.
            while 'asyncinfer_paused{model="embedded"} 8' not in httpx2.get(metrics).text:
                assert program.poll() is None
            program.send_signal(signal.SIGTERM)
            _, told = program.communicate(timeout=240)
    assert (program.returncode, told) == (0, "")


@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
def test_who_has_read_that_it_serves_may_stop_it(stop: str) -> None:
    """The line says so, and the engine is closed in order."""
    program = f"""
        import signal, socket, warnings
        import anyio, click
        from asyncinfer import Engine
        from asyncinfer.cli import serve
        from asyncinfer.testing import FakeModel

        def told(line, err):
            assert line.startswith("Serving at ") and err
            signal.raise_signal(signal.{stop})

        warnings.simplefilter("error")
        click.echo = told
        with socket.create_server(("127.0.0.1", 0)) as listening:
            anyio.run(serve._serve, Engine(FakeModel()), (), {{}}, listening, 0.0)
        print("closed")
        """
    command = [sys.executable, "-c", dedent(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, preexec_fn=heed_ctrl_c
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = CliRunner().invoke(asyncinfer, ["serve", "--port", str(port)])
    assert isinstance(run.exception, OSError)
    assert f"cannot listen at 127.0.0.1:{port}" in str(run.exception)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--cors-origin", "nonsense"], "cors_origins='nonsense': must be '*' or an origin"),
        (["--allowed-host", "a:80"], "allowed_hosts='a:80': must be '*' or a name"),
    ],
)
def test_bad_origins_and_hosts_are_told_before_a_model_is_loaded(
    options: list[str], told: str
) -> None:
    run = CliRunner().invoke(asyncinfer, ["serve", "--port", "0", *options])
    assert run.exit_code == 2
    assert told in run.output


@pytest.mark.parametrize(
    "options",
    [
        ["--port", "70000"],
        # A key in base64 would lose its end.
        ["--port", "0", "--api-key", "c2VjcmV0MQ=="],
        ["--port", "0", "--api-key", "secret="],
        ["--port", "0", "--api-key", "=scope"],
        ["--port", "0", "--api-key", "c2Vjc "],
        ["--port", "0", "--api-key", "c2Vjc=a", "--api-key", "c2Vjc=b"],
        ["--port", "0", "--api-key", f"c2Vjc={'a' * 300}"],
        ["--port", "0", "--name", "a", "--name", ""],
        ["--port", "0", "--drain-timeout", "nan"],
        ["--port", "0", "--drain-timeout", "inf"],
        ["--port", "0", "--drain-timeout", "-1"],
    ],
)
def test_a_bad_option_is_told(options: list[str]) -> None:
    run = CliRunner().invoke(asyncinfer, ["serve", *options])
    assert run.exit_code == 2
    assert "c2Vj" not in run.output
