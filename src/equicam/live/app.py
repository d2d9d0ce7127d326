"""The live look: its start, its page, the images sent to it, and maps at angles."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParameter
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from equicam.core.views import rotate
from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.live.frames import (
    LIVE_METHODS,
    MAX_VIEWS,
    FrameComputer,
    Settings,
    SupersededError,
    single_view_method,
)
from equicam.live.images import MAX_UPLOAD_BYTES
from equicam.methods import METHODS
from equicam.models.images import denormalise
from equicam.readers.model import Model
from equicam.readers.names import output_name
from equicam.runs.report.facts import load_templates
from equicam.runs.review.app import STATIC, new_app
from equicam.runs.review.auth import Access, AuthMiddleware, json_error
from equicam.runs.review.context import session_of
from equicam.runs.review.images import Encoded, encode_input, encode_scale
from equicam.runs.review.server import Links, listen, serve

PORT = 8322
FOLDER = Path(__file__).parent
UPLOADS = {"/api/image": MAX_UPLOAD_BYTES}
Angle = Annotated[int, Query(ge=0, lt=360)]


def serve_live(
    model: Model,
    paths: Sequence[Path],
    *,
    announce: Callable[[Links], None],
    method: str = "equigrad-cam",
    views: int = 18,
    port: int | None = None,
) -> None:
    """Serve the page; `announce` gets its address once the port listens."""
    if method not in LIVE_METHODS:
        needs = f"one of {', '.join(LIVE_METHODS)}, which follow the dial"
        raise EquicamError("method", needs, repr(method), "equigrad-cam")
    computer = FrameComputer(model, paths)
    with listen(port, PORT) as listener:
        access = Access(listener.getsockname()[1], command="open")
        serve(make_app(computer, access, method=method, views=views), access, listener, announce)


def make_app(computer: FrameComputer, access: Access, *, method: str, views: int) -> ASGIApp:
    """The page of a model, which begins with a method and a number of views."""
    app = new_app(computer.close)
    _add_routes(app, computer, {"method": method, "views": views, "layer": computer.model.layer})

    @app.exception_handler(SupersededError)
    def superseded(_: Request, _error: SupersededError) -> Response:
        # Not an error: dropping another image or a second tab does it, and the page asks again.
        return JSONResponse({"superseded": True})

    app.mount("/static/live", StaticFiles(directory=FOLDER / "static"))
    app.mount("/static", StaticFiles(directory=STATIC))
    return AuthMiddleware(app, access, UPLOADS)


def _add_routes(app: FastAPI, computer: FrameComputer, chosen: dict[str, Any]) -> None:
    """The page and what it begins with; descriptions and maps of images; and images themselves."""
    templates, model = load_templates(FOLDER / "templates"), computer.model

    @app.get("/")
    def page(request: Request) -> Response:
        values = {"csrf": session_of(request).csrf, "model": visible(model.name or "", 60)}
        return HTMLResponse(templates.get_template("live.html.j2").render(values))

    @app.get("/api/setup")
    def setup() -> dict[str, Any]:
        return {
            "model": visible(model.name or type(model.module).__name__, 120),
            "device": str(model.device),
            "classes": list(model.classes or ()),
            "explains": "class" if model.has_probabilities else "output",
            "layers": computer.layers,
            "methods": [
                {"name": name, "about": METHODS[name].about, "single": single_view_method(name)}
                for name in LIVE_METHODS
            ],
            "images": computer.images.listed(),
            "chosen": chosen,
            "max_upload_bytes": MAX_UPLOAD_BYTES,
        }

    @app.post("/api/image")
    async def add_image(
        request: Request, name: Annotated[str, Query(max_length=300)] = "image"
    ) -> dict[str, str]:
        data = await request.body()
        added = await asyncio.wrap_future(computer.run(computer.images.add, name, data))
        return {"id": added.id, "name": visible(added.name, 120)}

    @app.get("/api/image/{id_}")
    async def describe_image(id_: str) -> dict[str, Any]:
        return await asyncio.wrap_future(computer.run(computer.describe_image, id_))

    @app.get("/api/frame")
    async def frame(
        image: str, target: Annotated[int, Query(ge=0)], layer: str, method: str, angle: Angle,
        views: Annotated[int, Query(ge=1, le=MAX_VIEWS)],
    ) -> Response:  # fmt: skip
        if method not in LIVE_METHODS or layer not in computer.layers:
            return json_error(422, "there is no such method or layer")
        computer.images.find(image)  # an image that is not kept ends no other's computation
        method = method if views > 1 else single_view_method(method)
        settings = Settings(image, target, layer, method, views)
        found = await asyncio.wrap_future(computer.submit(settings, angle))
        return JSONResponse(found.facts | {"target": output_name(target, model.classes, model.task)})

    def respond(encoded: Encoded) -> Response:
        return Response(encoded[0], media_type=encoded[1])

    @app.get("/image/scale")
    def scale() -> Response:
        return respond(encode_scale())

    @app.get("/image/input/{id_}/{angle}")
    def rotated_input(id_: str, angle: Annotated[int, PathParameter(ge=0, lt=360)]) -> Response:
        x = rotate(computer.images.find(id_).pixels, angle)
        return respond(encode_input(denormalise(x, model.mean, model.std)[0]))

    @app.get("/image/{key}/{kind}")
    def layer(key: str, kind: str) -> Response:
        found = computer.find(key)
        if found is None or kind not in found.layers:
            return json_error(404, "there is no such map any more")
        return respond(found.layers[kind])
