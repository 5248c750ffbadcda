"""`asyncinfer serve`: a model over HTTP."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from math import ceil
from typing import Any

import anyio
import click
from anyio.abc import TaskGroup, TaskStatus

from asyncinfer.cli.connections import IDLE_SECONDS, allow_connections, close_silent
from asyncinfer.cli.engine import open_engine
from asyncinfer.cli.finite import FiniteRange
from asyncinfer.cli.model import with_model
from asyncinfer.cli.options import engine_options
from asyncinfer.errors import InvalidConfig
from asyncinfer.server import (
    ApiKey,
    Served,
    check_hosts,
    check_key,
    check_origins,
    create_app,
)

__all__ = ["serve"]

#: Seconds after the drain timeout in which clients are told of it. Connections that are open then
#: are cut, and as many seconds later uvicorn cancels what still answers, with a traceback.
_TELLING = 2
#: Names of this machine: `Host` headers that a server on it takes without --allowed-host. Any other
#: name may belong to a web page that made it resolve to this machine (DNS rebinding).
_LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen at; 0 takes a free one.",
)
@click.option("--name", "names", multiple=True, help="Name of the model. Repeatable.")
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    envvar="ASYNCINFER_API_KEY",
    show_envvar=True,
    metavar="KEY[=SCOPE]",
    help="Let in whoever has KEY, with a cache of its own if SCOPE is named. Repeatable.",
)
@click.option("--max-requests", type=int, help="Most answers of requests held.  [default: 4096]")
@click.option("--cors-origin", "origins", multiple=True, help="Let this origin's pages in.")
@click.option("--allowed-host", "hosts", multiple=True, help="Serve this `Host` too.")
@click.option(
    "--drain-timeout",
    type=FiniteRange(0, 1e9),
    default=30.0,
    show_default=True,
    help="Seconds that answers may go on when the server is stopped.",
)
@click.option(
    "--ray",
    "replicas",
    type=click.IntRange(1),
    metavar="N",
    help="Serve N replicas on a Ray cluster: the one at $RAY_ADDRESS, or one of this machine.",
)
@engine_options
def serve(
    host: str,
    port: int,
    names: tuple[str, ...],
    keys: tuple[str, ...],
    max_requests: int | None,
    origins: tuple[str, ...],
    hosts: tuple[str, ...],
    drain_timeout: float,
    replicas: int | None,
    engine: dict[str, Any],
) -> None:
    """Serve a model to the clients of OpenAI and Anthropic, and a chat page, until Ctrl-C.

    \b
    asyncinfer serve
    asyncinfer serve -m meta-llama/Llama-3.2-1B-Instruct --port 9000 --api-key secret
    """
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.ClickException('serve needs: pip install "asyncinfer[server]"') from error
    if max_requests is not None:
        engine["max_requests"] = max_requests
    if replicas is not None and "adapter" in engine:
        raise click.UsageError("--adapter goes with one engine, not with --ray")
    if "" in names:
        raise click.UsageError("--name: must not be empty")
    try:
        check_origins(origins)
        check_hosts(hosts)
        known = _keys(keys) if keys else None
    except InvalidConfig as error:
        raise click.UsageError(str(error)) from error
    local = host in ("localhost", "127.0.0.1", "::1")
    if not local and not keys:
        click.echo(f"Whoever reaches {host} may use the model: see --api-key.", err=True)
    allow_connections()
    with _listen(host, port) as listening:
        options = {
            "keys": known,
            "page": True,
            "cors_origins": origins,
            "allowed_hosts": (*_LOCAL, host, *hosts) if local or hosts else (),
        }
        opening = _engine(with_model(engine), replicas)
        anyio.run(_serve, opening, names, options, listening, drain_timeout)


def _keys(keys: tuple[str, ...]) -> dict[str, ApiKey]:
    """The keys that are let in. Raises `InvalidConfig`."""
    pairs = [key.partition("=") for key in keys]
    for key, found, scope in pairs:
        if not key or "=" in scope or (found and not scope):
            # A base64 key ends with "=", which would be cut off.
            raise click.UsageError("--api-key: must be KEY or KEY=SCOPE, without another '='")
        check_key(key)
    known = {key: ApiKey(cache_scope=scope) for key, _, scope in pairs}
    if len(known) < len(pairs):
        raise click.UsageError("--api-key: a key is given twice, and has one scope")
    return known


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, opened before the model is loaded. Raises `OSError`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
    with listening:
        yield listening


@asynccontextmanager
async def _engine(options: dict[str, Any], replicas: int | None) -> AsyncIterator[Served]:
    """One engine, or `replicas` of them on a Ray cluster."""
    if replicas is None:
        async with open_engine(options) as engine:
            yield engine
        return
    try:
        from asyncinfer.integrations import RayEngine
    except ModuleNotFoundError as error:
        raise click.ClickException('--ray needs: pip install "asyncinfer[ray]"') from error
    async with RayEngine(replicas=replicas, **options) as ray_engine:
        yield ray_engine


async def _serve(
    opening: AbstractAsyncContextManager[Served],
    names: tuple[str, ...],
    options: dict[str, Any],
    listening: socket.socket,
    drain_timeout: float,
) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals to the command, which closes the engine before it ends."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    async with opening as opened:
        app = create_app(dict.fromkeys(names, opened) if names else opened, **options)
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=ceil(drain_timeout) + 2 * _TELLING,
        )
        server = Server(config)
        address, port = listening.getsockname()[:2]
        place = f"[{address}]" if ":" in address else address
        url = f"http://{place}:{port}"
        async with anyio.create_task_group() as tasks:
            ending = partial(_drain, opened, drain_timeout), partial(_cut, server, drain_timeout)
            # Whoever has read the line may stop the server.
            await tasks.start(_stop_on_signal, server, tasks, ending)
            click.echo(f"Serving at {url}/v1, a chat page at {url} (Ctrl-C ends)", err=True)
            tasks.start_soon(close_silent, server, IDLE_SECONDS)
            await server.serve(sockets=[listening])
            tasks.cancel_scope.cancel()


async def _drain(engine: Served, timeout: float) -> None:
    """Let answers go on for so many seconds. Clients of others are told that the engine closed."""
    await engine.aclose(drain_timeout=timeout)


async def _cut(server: Any, timeout: float) -> None:
    """End the connections of clients that do not read, or have not sent all of their request."""
    await anyio.sleep(timeout + _TELLING)
    for connection in list(server.server_state.connections):
        connection.transport.abort()


async def _stop_on_signal(
    server: Any,
    tasks: TaskGroup,
    ending: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    *,
    task_status: TaskStatus[None],
) -> None:
    """The first signal lets answers end, the second does not."""
    if sys.platform == "win32":
        task_status.started()
        return
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            server.force_exit = server.should_exit
            if not server.should_exit:
                for each in ending:
                    tasks.start_soon(each)
            server.should_exit = True
