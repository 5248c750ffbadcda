"""`download`: a file over HTTP, which goes on where an earlier download broke off."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO, Final, cast
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from asyncinfer.runtime import check_cancelled

__all__ = ["BrokenOff", "Origin", "download"]

_CHUNK: Final = 1 << 18
#: Seconds without a byte after which a connection is given up, and how many are tried. Nobody can
#: stop a download while it waits for a byte.
_SILENT_SECONDS: Final = 20.0
_TRIES: Final = 10
_PARTIAL, _RANGE_REFUSED = 206, 416


class BrokenOff(OSError):
    """A download broke off; what has come so far is kept."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How to talk to a server."""

    host: str
    #: Value of the `Authorization` header, which is sent to this host alone.
    authorization: str | None = None
    #: A file of certificates to trust; None: the system's.
    certificates: str | None = None
    #: Address of a proxy; None: the environment's.
    proxy: str | None = None

    def page(self, url: str, accept: str, most: int) -> tuple[str, str, bytes] | None:
        """The address, the kind and the content of a page of at most `most` bytes; None where there
        is none. Raises `OSError`."""
        try:
            with self.open(url, {"Accept": accept}) as answer:
                content = bytearray()
                while part := answer.read1(_CHUNK):
                    check_cancelled()
                    content += part
                    if len(content) > most:
                        raise OSError(f"{url} has more than {most} bytes")
                return answer.url, answer.headers.get_content_type(), bytes(content)
        except HTTPError as error:
            error.close()
            if error.code in (404, 410):
                return None
            raise
        except HTTPException as error:
            raise OSError(f"{url}: {error!r}") from error

    def open(self, url: str, headers: dict[str, str]) -> HTTPResponse:
        request = Request(url, headers={"User-Agent": "asyncinfer", **headers})
        if self.authorization is not None and urlsplit(url).netloc == self.host:
            # Not sent to a host that the server redirects to.
            request.add_unredirected_header("Authorization", self.authorization)
        trusted = ssl.create_default_context(cafile=self.certificates)
        given = None if self.proxy is None else {"http": self.proxy, "https": self.proxy}
        opener = build_opener(HTTPSHandler(context=trusted), ProxyHandler(given))
        return cast(HTTPResponse, opener.open(request, timeout=_SILENT_SECONDS))


def download(server: Origin, url: str, into: Path, *, most: int, show_progress: bool) -> None:
    """Fetch `url` to the end of `into`, which may hold the beginning of it already.

    A connection that breaks is made again, ten times in all. Raises `BrokenOff` after that, and
    `OSError` where the server has no such file, or one of more than `most` bytes. What
    `check_cancelled` raises ends it with the next bytes that come, or after 20 seconds without any;
    those that came are kept.
    """
    with into.open("ab") as file, _bar(show_progress) as bar:
        for left in reversed(range(_TRIES)):
            try:
                _fetch_rest(server, url, file, most, bar)
                return
            except HTTPError as error:
                error.close()
                raise
            except (OSError, HTTPException) as error:
                if isinstance(error, _TooLarge):
                    raise
                if not left:
                    there = file.seek(0, os.SEEK_END)
                    raise BrokenOff(f"broke off after {there} bytes: {error}") from error


class _TooLarge(OSError):
    """The file has more bytes than it may."""


def _fetch_rest(server: Origin, url: str, file: BinaryIO, most: int, bar: Any) -> None:
    """Ask for what is missing, and write it. Raises `OSError` if not all of it comes."""
    there = file.seek(0, os.SEEK_END)
    # Not compressed, so that bytes can be counted.
    headers = {"Accept-Encoding": "identity"}
    if there:
        headers["Range"] = f"bytes={there}-"
    try:
        answer = server.open(url, headers)
    except HTTPError as error:
        if error.code != _RANGE_REFUSED or not there:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{there}":
            return
        file.truncate(0)
        raise OSError("the server has a shorter file") from error
    with answer:
        if answer.status != _PARTIAL or not _continues(answer, there):
            file.truncate(0)
            there = 0
        length = answer.headers.get("Content-Length")
        total = None if length is None else there + int(length)
        if total is not None and total > most:
            raise _TooLarge(f"{url} has {total} bytes, more than {most} bytes")
        bar.total = total
        _show(bar, there)
        # Whatever has come, and not as much as was asked for: that may take minutes.
        while chunk := answer.read1(_CHUNK):
            there += len(chunk)
            if there > most:
                raise _TooLarge(f"{url} has more than {most} bytes")
            file.write(chunk)
            _show(bar, there)
            check_cancelled()
    file.flush()
    if total is not None and there < total:
        raise OSError(f"{there} of {total} bytes came")


def _continues(answer: HTTPResponse, there: int) -> bool:
    return str(answer.headers.get("Content-Range", "")).startswith(f"bytes {there}-")


def _bar(shown: bool) -> Any:
    """A bar that counts bytes, as the hub's client draws it."""
    import huggingface_hub.utils as hub

    bar: Callable[..., Any] = hub.tqdm  # type: ignore[attr-defined]
    return bar(unit="B", unit_scale=True, disable=not shown)


def _show(bar: Any, done: int) -> None:
    bar.update(done - bar.n)
