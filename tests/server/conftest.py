"""The event loop of the server's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Where a test names no other."""
    return "asyncio"
