"""Serve the review page of a run on one port until Ctrl-C."""

import getpass
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from equicam.errors import EquicamError
from equicam.runs.log import Log
from equicam.runs.queue_files import refuse_unranked
from equicam.runs.review.app import make_app
from equicam.runs.review.auth import MAX_BODY_BYTES, Access
from equicam.runs.review.connections import MAX_HEADER_BYTES, Listener, ReviewProtocol
from equicam.runs.store import RunStore
from equicam.runs.verdicts import reviewer_name

PORT = 8321
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Links = dict[str | None, str]
"""The addresses of the page with their tokens, by the reviewer whom each is for; None: for everybody."""


def serve_review(
    store: RunStore,
    *,
    announce: Callable[[Links], None],
    reviewers: Sequence[str] = (),
    blind: bool = True,
    blind_class: bool = False,
    port: int | None = None,
    host: str = "127.0.0.1",
    expose: bool = False,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serve the page; `announce` gets its addresses once the port listens.

    Several reviewers, or those of an exposed page, get a link each, and the names of its sessions are fixed.
    """
    if host not in LOOPBACK and not expose:
        raise EquicamError(
            f"--host {host}", needs="--expose, because others can then reach the page", got="no --expose",
            fix="leaving --host out and ssh -L from elsewhere",
        )  # fmt: skip
    refuse_unranked(store)
    tls = _tls_options(certificate, key)
    names = list(dict.fromkeys(map(reviewer_name, reviewers)))
    personal = names if expose or len(names) > 1 else []
    name = names[0] if names and not personal else None
    with listen(host, port) as listener:
        port = listener.getsockname()[1]
        access = Access(
            port=port, hosts=(host, socket.gethostname()) if expose else (), exposed=expose, reviewer=name,
            login=None if expose or names else _login_name(), personal=personal, tls=bool(tls),
        )  # fmt: skip
        app = make_app(store, access, blind=blind, blind_class=blind_class)
        opened = {"blind": blind, "blind_class": blind and blind_class, "exposed": expose} | (
            {"reviewers": personal} if personal else {}
        )
        Log(store.folder).add("review opened", opened, who=name or access.login or "equicam")
        shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
        home = f"{'https' if tls else 'http'}://{shown}:{port}"
        announce({who: f"{home}/?token={token}" for who, token in access.tokens.items()})
        serve(app, listener, **tls)


def serve(app: ASGIApp, listener: Listener, max_body_bytes: int = MAX_BODY_BYTES, **tls: Any) -> None:
    """Serve an application until Ctrl-C."""
    protocol: Any = partial(ReviewProtocol, listener, max_body_bytes)
    config = uvicorn.Config(
        app, http=protocol, ws="none", log_level="error", access_log=False, server_header=False,
        backlog=listener.accepts_at_once, h11_max_incomplete_event_size=MAX_HEADER_BYTES, timeout_graceful_shutdown=3, **tls,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])


def _tls_options(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    """Options of uvicorn for TLS, after loading both files once; empty without a certificate."""
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        missing, given = ("--certificate", "--key") if certificate is None else ("--key", "--certificate")
        raise EquicamError("TLS", needs="--certificate and --key", got=f"only {given}", fix=missing)
    for option, path in (("--certificate", certificate), ("--key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise EquicamError(
                f"{option} {path}", needs="a PEM file that can be read", got=error.strerror,
                fix="its path, and its permissions",
            ) from error  # fmt: skip
    locked = False

    def refuse_password() -> str:
        nonlocal locked
        locked = True
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, refuse_password)
    except (ssl.SSLError, ValueError) as error:
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        got = "a key of another certificate" if mismatch else "a file that is damaged or no PEM"
        raise EquicamError(
            f"--certificate {certificate} --key {key}", needs="a PEM certificate and its key without a password",
            got="a key with a password" if locked else got, fix="the pair that belongs together",
        ) from error  # fmt: skip
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


def listen(host: str, port: int | None, usual: int = PORT) -> Listener:
    """A bound socket on the given port; without one, on the usual port if it is free, else on any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (port,) if port else (usual, 0):
        listener = Listener(family)
        # else the body of an answer waits 40 ms for the header to be acknowledged; connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind((host, candidate))
            listener.listen()
        except OSError as error:
            listener.close()
            if candidate == usual and port is None:
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
