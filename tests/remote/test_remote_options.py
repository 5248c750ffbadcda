"""Options and deadlines of requests are an engine's on their way to a replica, too."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from remote.wire import Wire, wires
from support import Until

from asyncinfer import DeadlineExceeded, InvalidConfig, InvalidRequest
from asyncinfer.remote import RemoteEngine
from asyncinfer.remote.prompt_keys import PromptKeys

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Ray's loop: no other has replicas."""
    return request.param


class Noting:
    """A link that notes the options that it carries."""

    def __init__(self, inner: Wire) -> None:
        self.inner = inner
        self.options: dict[str, Any] = {}

    async def call(self, method: str, *args: Any) -> Any:
        for each in args:
            if isinstance(each, dict):
                self.options[method] = each
        return await self.inner.call(method, *args)


async def ask(remote: RemoteEngine, method: str, deadline: float) -> None:
    if method == "whole":
        await remote.score("hello", ["!"], deadline=deadline)
    elif method == "pin":
        async with remote.pin("hello", deadline=deadline):
            pass
    else:
        await remote.generate("hello", max_tokens=1, deadline=deadline)


@pytest.mark.parametrize("method", ["whole", "pin", "begin"])
async def test_a_replica_has_what_routing_left_of_a_deadline(
    method: str, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    of, least = PromptKeys.of, 0.0

    async def slow(self: PromptKeys, *args: Any) -> list[bytes]:
        end = time.monotonic() + least
        await until(lambda: time.monotonic() > end)
        return await of(self, *args)

    monkeypatch.setattr(PromptKeys, "of", slow)
    links = {name: Noting(link) for name, link in wires(2).items()}
    async with RemoteEngine(links) as remote:
        await ask(remote, method, 60.0)
        (told,) = [link.options[method] for link in links.values() if method in link.options]
        assert 0.0 < told["deadline"] < 60.0
        asked = [link.inner.calls.count(method) for link in links.values()]
        least = 0.05
        with pytest.raises(DeadlineExceeded, match="passed on the way"):
            await ask(remote, method, 0.05)
        assert asked == [link.inner.calls.count(method) for link in links.values()]


async def test_unknown_options_are_refused_here() -> None:
    links = wires(1)
    async with RemoteEngine(links) as remote:
        for method, args in (
            ("score", ("ab", ["c"])),
            ("embed", (["ab"],)),
            ("best_of", ("ab",)),
            ("beam_search", ("ab",)),
        ):
            with pytest.raises(InvalidRequest, match=rf"^timeout=3: .* {method}\(\); .* deadline"):
                await getattr(remote, method)(*args, timeout=3)
        # What an engine's own method takes by name is passed on.
        with pytest.raises(InvalidRequest, match=r"^pooling='best'"):
            await remote.embed(["ab"], pooling="best", deadline=60.0)
        await remote.beam_search("ab", beams=2, max_tokens=2)
        await remote.best_of("ab", candidates=2, max_tokens=2, priority=1)
        assert links["replica-0"].calls.count("whole") == 3


async def test_options_have_the_bounds_of_an_engine() -> None:
    async with RemoteEngine(wires(1)) as remote:
        for deadline in (0, -1, 1e30):
            for method in ("whole", "pin", "begin"):
                with pytest.raises(InvalidRequest, match=r"^deadline=.* must be in \(0, 1e\+09\]"):
                    await ask(remote, method, deadline)
        for session in ([], 3):
            with pytest.raises(InvalidRequest, match=r"^session=.* must be a string"):
                remote.stream("ab", session=session)  # type: ignore[arg-type]
        for seconds in ("soon", -1, float("nan")):
            with pytest.raises(InvalidConfig, match=r"^drain_timeout="):
                await remote.remove("replica-0", drain_timeout=seconds)  # type: ignore[arg-type]
        # It was not removed.
        assert (await remote.generate("ab", max_tokens=2)).finish_reason == "length"


@pytest.mark.parametrize("prompt", [[*range(64)], [{"role": "user", "content": "a" * 64}]])
async def test_each_kind_of_prompt_goes_where_its_beginning_is(prompt: Any) -> None:
    links = wires(4)
    async with RemoteEngine(links) as remote:
        for _ in range(3):
            await remote.best_of(prompt, candidates=2, max_tokens=2)
        assert sorted(link.calls.count("whole") for link in links.values()) == [0, 0, 0, 3]


async def test_neither_engine_nor_stream_is_copied() -> None:
    async with RemoteEngine(wires(1)) as remote, remote.stream("ab", max_tokens=3) as stream:
        for each in (remote, stream):
            with pytest.raises(TypeError, match="cannot be copied"):
                copy.copy(each)
        assert len((await stream).token_ids) == 3
