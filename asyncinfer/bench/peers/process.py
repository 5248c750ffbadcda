"""`PeerProcess`: a peer in a process of its own, which runs one workload after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path
from typing import IO, Any, Final

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncinfer.bench.peers import worker
from asyncinfer.bench.peers.worker import Setup
from asyncinfer.bench.record import BenchError
from asyncinfer.bench.workloads import Workload

__all__ = ["PeerError", "PeerProcess"]

_HERE: Final = Path(__file__).parent
#: The most bytes of a line of an answer, and of a peer's own messages in errors.
_LINE: Final = 64 << 20
_TAIL: Final = 2000


class PeerError(BenchError):
    """A peer failed. `reason` leaves out what its process printed."""

    def __init__(self, reason: str, printed: str) -> None:
        super().__init__(f"{reason} {printed}")
        self.reason = reason


class PeerProcess:
    """A process for one peer, since two engines in one process would share its threads."""

    def __init__(
        self, name: str, process: Process, messages: IO[bytes], most_seconds: float
    ) -> None:
        """`messages`: the file with the output of the process."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self._in = process.stdin
        self._out = BufferedByteReceiveStream(process.stdout)
        self._messages = messages
        self._process = process
        self._most_seconds = most_seconds
        #: The engine's version, by its package.
        self.version = ""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, name: str, python: str, setup: Setup, most_seconds: float = inf
    ) -> AsyncIterator[PeerProcess]:
        """Start the interpreter `python` and load the model. Raises `BenchError`, also for a peer
        that takes more than `most_seconds` now or for a workload, and which is killed."""
        module = _HERE / f"{name.replace('.', '_').replace(' ', '_')}.py"
        command = [python, str(Path(worker.__file__)), str(module)]
        package = str(_HERE.parents[2])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with tempfile.TemporaryFile() as messages:
            try:
                process = await anyio.open_process(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    env={**os.environ, "PYTHONPATH": paths},
                    start_new_session=True,
                )
            except OSError as error:
                raise BenchError(f"{name}: {python} cannot be run: {error}") from error
            async with process:
                peer = cls(name, process, messages, most_seconds)
                try:
                    peer.version = str((await peer._ask(setup))["version"])
                    yield peer
                finally:
                    peer._end()

    def _end(self) -> None:
        """Kill the process and its children: vLLM has two."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def seconds(self, work: Workload, prompts: Sequence[list[int]]) -> float:
        """Seconds of a workload. Raises `PeerError`."""
        return float((await self._run(work, prompts, False))["seconds"])

    async def answers(self, work: Workload, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Token ids of the answers. Raises `PeerError`."""
        found: list[list[int]] = (await self._run(work, prompts, True))["answers"]
        return found

    async def _run(
        self, work: Workload, prompts: Sequence[list[int]], answers: bool
    ) -> dict[str, Any]:
        outputs = [output for _, output in work.requests]
        requests = list(zip(prompts, outputs, strict=True))
        return await self._ask({"requests": requests, "shared": work.shared, "answers": answers})

    async def _ask(self, question: object) -> dict[str, Any]:
        try:
            with anyio.fail_after(self._most_seconds):
                await self._in.send(json.dumps(question).encode() + b"\n")
                line = await self._out.receive_until(b"\n", _LINE)
        except TimeoutError as error:
            self._end()
            reason = f"{self.name}: no answer after {self._most_seconds:g} seconds."
            raise PeerError(reason, self._said()) from error
        except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead) as error:
            raise PeerError(f"{self.name}: its process ended.", self._said()) from error
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise PeerError(f"{self.name}: {told['error']}.", self._said())
        return told

    def _said(self) -> str:
        """The end of the process' output."""
        size = self._messages.seek(0, os.SEEK_END)
        self._messages.seek(max(0, size - _TAIL))
        text = self._messages.read().decode("utf-8", "replace").strip()
        return f"Its last messages:\n{text}" if text else "It printed nothing."
