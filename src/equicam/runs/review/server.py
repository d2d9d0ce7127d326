"""Serve a page on one port of 127.0.0.1 until Ctrl-C: the review page, or the live look."""

import math
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from equicam.errors import EquicamError
from equicam.runs.review.auth import Access

HOST = "127.0.0.1"
MAX_HEADER_BYTES = 8 << 10
MAX_SECONDS = {h11.IDLE: 3, h11.SEND_BODY: 15}  # until headers, until a body must be whole
MIN_DESCRIPTORS = 4096  # so that connections without a whole request leave room for others

Links = dict[str | None, str]
"""The addresses of a page with their tokens, by the reviewer whom each is for; None: for everybody."""


def listen(port: int | None, usual: int) -> socket.socket:
    """A bound socket on the given port; without one, on the usual port if it is free, else on any free port."""
    try:
        listener = socket.create_server((HOST, port or usual))
    except OSError as error:
        if port:
            what, got = f"port {port} of {HOST}", os.strerror(error.errno or 0)
            raise EquicamError(what, "to be free", got, "another --port") from error
        listener = socket.create_server((HOST, 0))
    # else the body of an answer waits 40 ms for the header to be acknowledged; connections inherit it
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(app: ASGIApp, access: Access, listener: socket.socket, announce: Callable[[Links], None]) -> None:
    """Announce the addresses of a page and serve it until Ctrl-C."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_DESCRIPTORS:
        most = MIN_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MIN_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    announce({who: f"http://{HOST}:{access.port}/?token={token}" for who, token in access.tokens.items()})
    config = uvicorn.Config(
        app, http="h11", ws="none", log_level="error", access_log=False, server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES, timeout_graceful_shutdown=3,
    )  # fmt: skip
    _DeadlineServer(config).run(sockets=[listener])


class _DeadlineServer(uvicorn.Server):
    """A server that aborts connections whose headers or body are not whole in time; uvicorn's waits for ever."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._since: dict[Any, float] = {}  # when each connection began to wait for what it waits for

    async def on_tick(self, counter: int) -> bool:
        """Look at every connection, ten times a second."""
        now, connections = time.monotonic(), cast("set[H11Protocol]", self.server_state.connections)
        waiting = [(one, one.cycle, one.conn.their_state) for one in connections]
        self._since = {one: self._since.get(one, now) for one in waiting}
        for (connection, _, awaited), began in self._since.items():
            if now - began > MAX_SECONDS.get(awaited, math.inf):
                connection.transport.abort()
        return await super().on_tick(counter)
