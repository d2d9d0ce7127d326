"""Serve the review page of a run on one port until Ctrl-C."""

import getpass
import socket
from collections.abc import Callable

import uvicorn

from equicam.auditing.log import Log
from equicam.auditing.queue_files import refuse_unranked
from equicam.auditing.review_log import reviewer_name
from equicam.auditing.store import RunStore
from equicam.errors import EquicamError
from equicam.review.app import make_app
from equicam.review.auth import Access

PORT = 8321
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_review(
    store: RunStore,
    *,
    announce: Callable[[str], None],
    reviewer: str | None = None,
    blind: bool = True,
    port: int | None = None,
    host: str = "127.0.0.1",
    expose: bool = False,
) -> None:
    """Serve the page; `announce` gets its address, which holds the token, once the port listens."""
    if host not in LOOPBACK and not expose:
        raise EquicamError(
            f"--host {host}", needs="--expose, because others can then reach the page", got="no --expose",
            fix="leaving --host out and ssh -L from elsewhere",
        )  # fmt: skip
    refuse_unranked(store)
    name = reviewer_name(reviewer) if reviewer else None if expose else _login_name()
    with _listen(host, port) as listener:
        port = listener.getsockname()[1]
        hosts = (host, socket.gethostname()) if expose else ()
        access = Access(port=port, hosts=hosts, exposed=expose, reviewer=name)
        app = make_app(store, access, blind=blind)
        Log(store.folder).add("review opened", {"blind": blind, "exposed": expose}, who=name or "equicam")
        shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
        announce(f"http://{shown}:{port}/?token={access.token}")
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3
        )
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on the given port; without one, on PORT if it is free, else on any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (port,) if port else (PORT, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if candidate == PORT and port is None:
                continue
            raise EquicamError(
                f"port {candidate} of {host}", needs="to be free", got=error.strerror, fix="another --port"
            ) from error
        return listener
    raise AssertionError("unreachable")


def _login_name() -> str | None:
    """The login name, if it can be a reviewer's name; else None, and the page shows a form for it."""
    try:
        return reviewer_name(getpass.getuser())
    except (EquicamError, OSError, KeyError):
        return None
