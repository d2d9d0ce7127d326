"""The application of the live look: its page, the images sent to it, and maps at angles."""

import asyncio
import mimetypes
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParameter
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from equicam import review
from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.live.frames import (
    LIVE_METHODS,
    MAX_VIEWS,
    FrameComputer,
    Settings,
    SupersededError,
    class_name,
    pixels_of,
    render_input,
    single_view_method,
)
from equicam.live.images import MAX_UPLOAD_BYTES, OpenedImages
from equicam.methods import METHODS
from equicam.readers.model import Model
from equicam.runs.review.app import add_error_handlers
from equicam.runs.review.auth import Access, AuthMiddleware, json_error
from equicam.runs.review.context import session_of
from equicam.runs.review.images import Encoded, encode_scale

FOLDER = Path(__file__).parent
UPLOADS = {"/api/image": MAX_UPLOAD_BYTES}
Angle = Annotated[int, Query(ge=0, lt=360)]
mimetypes.add_type("text/javascript", ".js")


class LiveContext:
    """A model and the images it explains."""

    def __init__(self, model: Model, paths: Sequence[Path], *, method: str, views: int) -> None:
        if method not in LIVE_METHODS:
            raise EquicamError(
                "method", needs=f"one of {', '.join(LIVE_METHODS)}, which follow the dial", got=repr(method), fix="equigrad-cam"
            )  # fmt: skip
        self.model, self.method, self.views = model, method, views
        self.images, self.computer = OpenedImages(model, paths), FrameComputer(model)
        self.layers = self.computer.layers()

    def setup(self) -> dict[str, Any]:
        """What the page offers."""
        model = self.model
        return {
            "model": visible(model.name or type(model.module).__name__, 120),
            "device": str(model.device),
            "classes": list(model.classes or ()),
            "explains": "class" if model.has_probabilities else "output",
            "layers": self.layers,
            "methods": [
                {"name": name, "about": METHODS[name].about, "single": single_view_method(name)}
                for name in LIVE_METHODS
            ],
            "images": self.images.listed(),
            "chosen": {"method": self.method, "views": self.views, "layer": model.layer},
            "max_upload_bytes": MAX_UPLOAD_BYTES,
        }

    async def run(self, work: Any, *arguments: Any) -> Any:
        """Work in the thread of the model."""
        return await asyncio.wrap_future(self.computer.run(partial(work, *arguments)))

    def describe_image(self, id_: str) -> dict[str, Any]:
        """An image, decoded now if need be, and its most probable classes."""
        image = self.images.open(id_)
        height, width = pixels_of(image).shape[-2:]
        return {
            "id": image.id, "name": visible(image.name, 120), "size": image.size, "input": [width, height],
            "top": self.computer.top_classes(image),
        }  # fmt: skip


def make_app(context: LiveContext, access: Access) -> ASGIApp:
    """The page of a model."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.computer.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    _add_page(app, context)
    _add_api(app, context)
    _add_images(app, context)
    add_error_handlers(app)

    @app.exception_handler(SupersededError)
    def superseded(_: Request, _error: SupersededError) -> Response:
        # Not an error: dropping another image or a second tab does it, and the page asks again.
        return JSONResponse({"superseded": True})

    app.mount("/static/live", StaticFiles(directory=FOLDER / "static"))
    app.mount("/static", StaticFiles(directory=Path(str(review.__file__)).parent / "static"))
    return AuthMiddleware(app, access, UPLOADS)


def _add_page(app: FastAPI, context: LiveContext) -> None:
    templates = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip

    @app.get("/")
    def page(request: Request) -> Response:
        name = visible(context.model.name or "", 60)
        return HTMLResponse(
            templates.get_template("live.html.j2").render(csrf=session_of(request).csrf, model=name)
        )


def _add_api(app: FastAPI, context: LiveContext) -> None:
    @app.get("/api/setup")
    def setup() -> dict[str, Any]:
        return context.setup()

    @app.post("/api/image")
    async def add_image(request: Request, name: Annotated[str, Query(max_length=300)] = "image") -> Response:
        added = await context.run(context.images.add, name, await request.body())
        return JSONResponse({"id": added.id, "name": visible(added.name, 120)})

    @app.get("/api/image/{id_}")
    async def describe_image(id_: str) -> Response:
        return JSONResponse(await context.run(context.describe_image, id_))

    @app.get("/api/frame")
    async def frame(
        image: str, target: Annotated[int, Query(ge=0)], layer: str, method: str, angle: Angle,
        views: Annotated[int, Query(ge=1, le=MAX_VIEWS)],
    ) -> Response:  # fmt: skip
        if method not in LIVE_METHODS or layer not in context.layers:
            return json_error(422, "there is no such method or layer")
        settings = Settings(image, target, layer, method, views)
        settings = settings if views > 1 else settings.single()
        opened = context.images.find(image)
        if opened.x is None:
            opened = await context.run(context.images.open, image)
        found = await asyncio.wrap_future(context.computer.submit(opened, settings, angle))
        return JSONResponse(found.facts | {"target": class_name(context.model, target)})


def _add_images(app: FastAPI, context: LiveContext) -> None:
    @app.get("/image/scale")
    def scale() -> Response:
        return _respond(encode_scale())

    @app.get("/image/input/{id_}/{angle}")
    def rotated_input(id_: str, angle: Annotated[int, PathParameter(ge=0, lt=360)]) -> Response:
        return _respond(render_input(context.model, context.images.find(id_), angle))

    @app.get("/image/{key}/{kind}")
    def layer(key: str, kind: str) -> Response:
        found = context.computer.find(key)
        if found is None or kind not in found.layers:
            return json_error(404, "there is no such map any more")
        return _respond(found.layers[kind])


def _respond(encoded: Encoded) -> Response:
    return Response(encoded[0], media_type=encoded[1])
