"""Serve the live look on one port of this machine until Ctrl-C."""

from collections.abc import Callable, Sequence
from pathlib import Path

from equicam.live.app import LiveContext, make_app
from equicam.live.images import MAX_UPLOAD_BYTES
from equicam.readers.model import Model
from equicam.runs.review.auth import Access
from equicam.runs.review.server import listen, serve

PORT = 8322
HOST = "127.0.0.1"


def serve_live(
    model: Model,
    paths: Sequence[Path],
    *,
    announce: Callable[[str], None],
    method: str = "equigrad-cam",
    views: int = 18,
    port: int | None = None,
) -> None:
    """Serve the page; `announce` gets its address once the port listens. Other machines cannot reach it."""
    context = LiveContext(model, paths, method=method, views=views)
    with listen(HOST, port, PORT) as listener:
        access = Access(port=listener.getsockname()[1], command="open")
        app = make_app(context, access)
        announce(f"http://{HOST}:{access.port}/?token={access.tokens[None]}")
        serve(app, listener, MAX_UPLOAD_BYTES)
