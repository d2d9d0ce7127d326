"""Connections of a local server: how many are open, and how long and large a request may be before it is whole.

uvicorn by itself waits for ever for the end of a request's headers and accepts connections until descriptors run out.
"""

import asyncio
import contextlib
import logging
import socket
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from equicam.runs.review.auth import MAX_BODY_BYTES

MAX_CONNECTIONS = 512
MAX_ARRIVAL_SECONDS = 15  # for a whole request, headers and body
MAX_HEADER_BYTES = 8 << 10
MAX_REQUEST_BYTES = MAX_HEADER_BYTES + MAX_BODY_BYTES
PENDING_CONNECTIONS = 1024  # that the system holds until they are accepted
FLOOD_CLOSINGS = 10  # connections closed, with no quiet between them
QUIET_SECONDS = 60
logger = logging.getLogger("equicam.runs.review")


class Listener(socket.socket):
    """A listening socket that makes room for a new connection by closing the oldest without a whole request.

    It counts sockets when they are accepted, because a TLS connection has no protocol before its handshake ends.
    """

    def __init__(self, family: socket.AddressFamily) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MAX_REQUEST_BYTES)  # so that no read gets more
        self.most = min(MAX_CONNECTIONS, _max_descriptors() // 2)
        # few at once: a request must be read before the connections after it can make it the oldest
        self.accepts_at_once = max(1, self.most // 32)
        # sockets, not descriptors: a descriptor is used again before TLS says that its connection is lost
        self._waiting: dict[socket.socket, None] = {}  # without a whole request, the oldest first
        self._busy: dict[socket.socket, None] = {}
        self._ending: list[socket.socket] = []  # shut down, but not closed by the event loop yet
        self._closings, self._last_closing = 0, 0.0

    def listen(self, _backlog: int = 0, /) -> None:
        """Listen; asyncio's argument is the number of accepts at once."""
        super().listen(PENDING_CONNECTIONS)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and close others while there are too many."""
        self._ending = [one for one in self._ending if _is_open(one)]
        if len(self._ending) > self.most // 4:
            raise BlockingIOError  # the event loop comes back after it has closed them
        connection, address = super().accept()
        self._waiting = {one: None for one in self._waiting if _is_open(one)} | {connection: None}
        self._busy = {one: None for one in self._busy if _is_open(one)}
        while len(self._waiting) + len(self._busy) > self.most:
            self._close_oldest()
        return connection, address

    def find(self, descriptor: int) -> socket.socket | None:
        """The counted connection that has this descriptor now."""
        return next((one for one in (*self._waiting, *self._busy) if one.fileno() == descriptor), None)

    def mark(self, connection: socket.socket | None, *, whole: bool) -> None:
        """Note that a connection's request has arrived, or that its response is sent and it waits for the next."""
        before, after = (self._waiting, self._busy) if whole else (self._busy, self._waiting)
        if connection in before:  # else it is being closed
            del before[connection]
            after[connection] = None

    def report_closing(self) -> None:
        """Count a connection that was closed early; many make a flood, which gets one line of log."""
        now = time.monotonic()
        self._closings = 1 if now - self._last_closing > QUIET_SECONDS else self._closings + 1
        self._last_closing = now
        if self._closings == FLOOD_CLOSINGS:
            logger.warning(
                "review: too many connections, or requests that do not arrive whole; the oldest are closed, and this "
                "line is not repeated while it lasts"
            )

    def _close_oldest(self) -> None:
        """The one that waits longest, but not the newest; if all have whole requests, the oldest of those."""
        among = self._waiting if len(self._waiting) > 1 else self._busy
        connection = next(iter(among))
        del among[connection]
        self._ending.append(connection)
        self.report_closing()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # its transport reads the end and closes it


class ReviewProtocol(H11Protocol):
    """HTTP with a deadline and a limit on bytes until a request is whole."""

    def __init__(self, listener: Listener, max_body_bytes: int = MAX_BODY_BYTES, **given: Any) -> None:
        super().__init__(**given)
        self._listener, self._max_bytes = listener, MAX_HEADER_BYTES + max_body_bytes
        self._connection: socket.socket | None = None
        self._bytes = 0
        self._whole = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection has the same time as a request."""
        super().connection_made(transport)
        self._connection = self._listener.find(transport.get_extra_info("socket").fileno())
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to wait for."""
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Data of a request that is not too large."""
        self._bytes += len(data)
        if self._bytes > self._max_bytes:
            self._abort()
            return
        self._start_deadline()
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """The next request may come on the same connection."""
        self._bytes = 0
        super().on_response_complete()
        self._update()

    def _update(self) -> None:
        whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if whole:
            self._stop_deadline()
        if whole != self._whole:
            self._whole = whole
            self._listener.mark(self._connection, whole=whole)

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(MAX_ARRIVAL_SECONDS, self._abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort(self) -> None:
        self._stop_deadline()
        if self._bytes and not self.transport.is_closing():  # browsers also open connections in advance
            self._listener.report_closing()
        self.transport.abort()


def _is_open(connection: socket.socket) -> bool:
    return connection.fileno() != -1


def _max_descriptors() -> int:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return 2 * MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft
