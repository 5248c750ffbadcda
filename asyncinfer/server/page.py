"""The chat page: one file, which loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Final

from asyncinfer.server.call import Call

__all__ = ["Page"]

_INLINE: Final = {
    "script-src": rb"<script>(.*?)</script>",
    "style-src": rb"<style>(.*?)</style>",
}


class Page:
    """Serves the page, with a content-security policy that allows the script of the file only."""

    def __init__(self) -> None:
        self._file = files("asyncinfer.server").joinpath("page.html").read_bytes()
        rules = [f"{name} {_hash(self._file, inline)}" for name, inline in _INLINE.items()]
        also = ("connect-src 'self'", "base-uri 'none'", "frame-ancestors 'none'")
        self._headers = {
            "content-security-policy": "; ".join(("default-src 'none'", *rules, *also)),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def __call__(self, call: Call) -> None:
        await call.data(self._file, "text/html; charset=utf-8", headers=self._headers)


def _hash(file: bytes, inline: bytes) -> str:
    """The source of a content-security policy for what is between two tags."""
    (text,) = re.findall(inline, file, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
