"""Runs work on images: in groups that fit memory, with deferred checks, compiled and captured where it helps.

What is computed is the caller's business (`explain`, `evaluate`, `audit`); how it runs is decided here alone.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.views import Window, crop_centre
from equicam.errors import EquicamError, ModelError
from equicam.readers.failures import (
    Check,
    finite,
    finite_images,
    not_finite,
    not_scaled,
    raise_failed,
    unscaled,
)
from equicam.readers.forward import Network, views_per_forward
from equicam.readers.model import Model
from equicam.readers.reading import Reader
from equicam.recipe import Recipe
from equicam.runtime.compiled import predict_compiled, run_compiled
from equicam.runtime.graphs import keep_constants, replay
from equicam.runtime.pending import DeferredChecks, Pending, Tensors
from equicam.runtime.view_reader import ViewReader

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES, LARGEST_BLOCK = 2**31 - 1, 2**30
# beginnings of the names of environment variables with which somebody has chosen how memory is allocated
CHOSEN_BY_USER = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks of up to 1 GiB, 2 GiB in all, in this process; whether it does.

    Otherwise it gives blocks above 32 MiB back, as every layer on a CPU frees, and page faults take a third of the time.
    """
    if sys.platform != "linux" or any(name.startswith(CHOSEN_BY_USER) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # other C libraries have none
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


LOG = logging.getLogger(__name__)
Work = Callable[[ViewReader, Float[Tensor, "b c H W"], Int[Tensor, " b"] | None], Tensors]
"""(view reader, images, target) → tensors by name, one row per image."""


@dataclass(frozen=True)
class Executor:
    """A model and the part of a recipe that says how it runs."""

    model: Model | None  # None: a reader without a model
    recipe: Recipe
    max_views_per_forward: int | None = None  # None: by memory
    refuse_unscaled: bool = False  # images whose values are pixels from 0 to 255

    def __post_init__(self) -> None:
        given = self.max_views_per_forward
        if given is not None and (not isinstance(given, int) or given < 1):
            raise EquicamError("max_views_per_forward", "1 view or more", given, "max_views_per_forward=None")

    def start(
        self,
        reader: Reader,
        work: Work,
        x: Float[Tensor, "b c H W"],
        target: Int[Tensor, " b"] | None = None,
        *,
        views_per_image: int,
        key: Hashable | None = None,
        window: Window | None = None,
        pad_to: int | None = None,
    ) -> Pending[Tensors]:
        """Start the work on all images, or on a window in them; a captured call returns before the device is done.

        Calls with equal keys and shapes must do the same; without a key, as for work that may synchronise with the device,
        it runs eagerly. Captured calls are filled up to `pad_to` images: a last, smaller batch is not compiled on its own.
        """
        presented = x if window is None else crop_centre(x, window.size)
        if key is not None and self._compiles(x):
            count = max(len(x), pad_to or 0)
            with self.context(x.device, constants=False):
                inputs, views = (_pad(x, count), _pad(target, count)), count * views_per_image
                replayed = self._replay(reader, work, inputs, key, window, presented, views)
            if replayed is not None and count > len(x):
                cut, whole = partial(_first, count=len(x)), replayed
                return Pending(cut(whole.tensors), lambda: cut(whole.finish()), whole.check)
            if replayed is not None:
                return replayed
        with self.context(x.device):
            raise_failed(self._checks(x))

            def run_group(rows: slice, fit: int) -> Tensors:
                views = self.view_reader(reader, fit, window=window)
                try:
                    found = work(views, x[rows], None if target is None else target[rows])
                except (ModelError, RuntimeError) as error:
                    if not isinstance(error, torch.OutOfMemoryError):
                        _raise_failed_before(error, views.checks)
                    raise
                views.checks.raise_failed()  # all of a group together
                return found

            network = self._network(reader, compiled=False)
            parts = list(self.groups(presented, views_per_image, run_group, network))
            found = parts[0]
            if len(parts) > 1:
                found = {name: torch.cat([part[name] for part in parts]) for name in found}
            return Pending(found, lambda: found, lambda: None)

    @contextmanager
    def context(self, device: torch.device, *, constants: bool = True) -> Iterator[None]:
        """No autograd but our own, no autocast but the network's, and constants kept unless a graph keeps them."""
        if device.type == "cpu":
            keep_freed_memory()
        # inference tensors cannot join a backward pass
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False)
            if torch.is_autocast_enabled(device.type)
            else nullcontext(),
            keep_constants() if constants else nullcontext(),
        ):
            yield

    def groups(
        self,
        x: Float[Tensor, "b c H W"],
        views_per_image: int,
        run: Callable[[slice, int], Tensors],
        network: Network | None = None,
    ) -> Iterator[Tensors]:
        """`run` on groups of images whose views fit one pass of the network; groups are halved when memory runs out."""
        fit = self.max_views_per_forward or views_per_forward(network, x, len(x) * views_per_image)
        LOG.info("images: %d, views of each: %d, at most %d in a forward pass", len(x), views_per_image, fit)
        done = 0
        while done < len(x):
            count = -(-(len(x) - done) // max(1, fit // views_per_image))
            rows = slice(done, done - (-(len(x) - done) // count))  # groups of even size, none left small
            try:
                found = run(rows, fit)
            except torch.OutOfMemoryError:
                if fit == 1:
                    raise
                fit = -(-min(fit, views_per_image * (rows.stop - rows.start)) // 2)
                LOG.info("out of memory: from now on at most %d views in a forward pass", fit)
                continue
            yield found
            done = rows.stop

    def view_reader(
        self,
        reader: Reader,
        max_views_per_forward: int,
        *,
        window: Window | None = None,
        compiled: bool = True,
    ) -> ViewReader:
        """A reader of views for one group of images; its network is compiled if the recipe says so and this does."""
        network = self._network(reader, compiled=compiled)
        return ViewReader(network, reader, max_views_per_forward, self.autocast, window)

    @property
    def autocast(self) -> torch.dtype | None:
        """The type to run the network in, if it is not the model's own."""
        return None if self.recipe.dtype is None else getattr(torch, self.recipe.dtype)

    @property
    def ahead(self) -> int:
        """Pieces of work to start before one is finished: compiled calls on a GPU return before it is done."""
        return int(bool(self.recipe.compiled) and self.model is not None and self.model.device.type == "cuda")

    def _network(self, reader: Reader, *, compiled: bool = True) -> Network | None:
        # an explainer without a forward pass of ours may run the same module with its own hooks: leave it alone
        if self.model is None or reader.forward is None:
            return None
        compiled = bool(self.recipe.compiled) and compiled
        on_cuda = self.model.device.type == "cuda"
        run, predict = run_compiled if compiled else None, predict_compiled if compiled and on_cuda else None
        return Network(self.model, self.autocast, run, predict)

    def _checks(self, images: Float[Tensor, "b c H W"]) -> list[Check]:
        """What images must pass."""
        found = [Check(lambda: finite(images), lambda: not_finite(finite_images(images)))]
        if self.refuse_unscaled and self.model is not None:
            mean, std = self.model.mean, self.model.std
            found.append(Check(lambda: ~unscaled(images, mean, std), not_scaled))
        return found

    def _compiles(self, x: Float[Tensor, "b c H W"]) -> bool:
        """Whether calls that fit memory are compiled whole."""
        return bool(self.recipe.compiled) and x.is_cuda and self.max_views_per_forward is None

    def _replay(
        self,
        reader: Reader,
        work: Work,
        inputs: tuple[Tensor, Tensor | None],
        key: Hashable,
        window: Window | None,
        presented: Float[Tensor, "b c H W"],
        views: int,
    ) -> Pending[Tensors] | None:
        """`replay` of the work, with its checks."""
        network = self._network(reader)
        assert network is not None  # noqa: S101  # only work on a network has a key
        model = network.model

        def whole(images: Tensor, wanted: Tensor | None, *, compiled: bool) -> tuple[Tensors, DeferredChecks]:
            views = self.view_reader(reader, sys.maxsize, window=window, compiled=compiled)
            views.checks.add(self._checks(images))
            return work(views, images, wanted), views.checks

        about = (
            model.layer, model.layout, model.rectify_weights, model.classes, model.task, tuple(model.mean), tuple(model.std),
            self.autocast, self.refuse_unscaled,
        )  # fmt: skip
        captured, traceable = partial(whole, compiled=True), partial(whole, compiled=False)
        whole_key = (about, reader, key, window)
        return replay(network, whole_key, traceable, captured, inputs, presented=presented, views=views)


def _pad(rows: Tensor | None, count: int) -> Any:
    """Rows filled up with the first one."""
    if rows is None or len(rows) >= count:
        return rows
    return torch.cat((rows, rows[:1].expand(count - len(rows), *rows.shape[1:])))


def _first(found: Tensors, count: int) -> Tensors:
    """The results without the rows that were filled up."""
    return {name: value[:count] for name, value in found.items()}


def _raise_failed_before(error: Exception, checks: DeferredChecks) -> None:
    """A failed check explains a failure further on."""
    try:
        checks.raise_failed()
    except EquicamError as refused:
        raise refused from error
