"""A model hub of a few files on localhost: what the hub's client asks of the real one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from threading import Thread
from typing import Any

from weights.http_server import served

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`files` of `repository`, at one commit, which `branches` name too. `fetched` tells what was
    downloaded, `asked` all that was asked for. With a `token` it is a private repository: nobody
    without it is told that it is there. A file is sent in parts of 1,000 bytes, each after a call
    of `part` with its name."""

    def __init__(
        self,
        repository: str,
        files: dict[str, bytes],
        *,
        token: str | None = None,
        branches: tuple[str, ...] = ("main",),
        part: Callable[[str], object] = lambda name: None,
    ) -> None:
        self.repository = repository
        self.token = token
        self.branches = branches
        self.part = part
        self.files = files
        self.fetched: list[str] = []
        self.asked: list[str] = []
        self.sent = 0
        #: The status of an answer to whoever asks for a file.
        self.status = 200
        self.url = ""

    @contextlib.contextmanager
    def serve(self) -> Iterator[Hub]:
        with served(self._answer) as place:
            self.url = f"http://{place}"
            yield self

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        self.asked.append(path)
        api, files = f"/api/models/{self.repository}", f"/{self.repository}/resolve/{COMMIT}/"
        known = (api, *(f"{api}/revision/{name}" for name in (*self.branches, COMMIT)))
        if self.token is not None and request.headers["Authorization"] != f"Bearer {self.token}":
            self._send(request, b"", status=401, code="RepoNotFound")
        elif path in known:
            siblings = [{"rfilename": name} for name in self.files]
            self._send(request, {"id": self.repository, "sha": COMMIT, "siblings": siblings})
        elif path == f"{api}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": self._hash(data)}
                for name, data in self.files.items()
            ]
            self._send(request, entries)
        elif path.removeprefix(files) in self.files:
            name = path.removeprefix(files)
            if request.command == "GET":
                self.fetched.append(name)
            self._send(request, self.files[name], self.status, name=name)
        else:
            code = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
            self._send(request, b"", status=404, code=code)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        body: Any,
        status: int = 200,
        code: str = "",
        name: str = "",
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.send_header("ETag", f'"{self._hash(data)}"')
        request.send_header("X-Repo-Commit", COMMIT)
        if code:
            request.send_header("X-Error-Code", code)
        request.end_headers()
        if request.command == "GET":
            with contextlib.suppress(ConnectionError):
                for start in range(0, len(data), 1000):
                    if name:
                        self.part(name)
                    request.wfile.write(data[start : start + 1000])
                    self.sent += 1000

    @staticmethod
    def _hash(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()


class SilentHub:
    """Accepts every connection and never says a word; `accepted` counts them."""

    def __init__(self) -> None:
        self.accepted = 0
        self.url = ""

    @contextlib.contextmanager
    def serve(self) -> Iterator[SilentHub]:
        with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as open_ones:
            self.url = f"http://127.0.0.1:{server.getsockname()[1]}"

            def accept() -> None:
                while True:
                    try:
                        connection, _ = server.accept()
                    except OSError:
                        return
                    self.accepted += 1
                    open_ones.enter_context(connection)

            thread = Thread(target=accept)
            thread.start()
            try:
                yield self
            finally:
                # Closing alone would not wake it.
                server.shutdown(socket.SHUT_RDWR)
                thread.join()
