"""Helpers of several commands: the model, and the engine that computes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from equicam.console import note, resolve_device, split_commas
from equicam.errors import EquicamError

if TYPE_CHECKING:
    from equicam.cli.recipe_file import Settings
    from equicam.engines.devices import Devices
    from equicam.engines.ray import Cluster
    from equicam.engines.worker import ModelFromName
    from equicam.readers.model import Model


def set_preprocessing(model: "Model", settings: "Settings") -> "Model":
    """The model with the preprocessing of the settings; a line says what it is."""
    from equicam.models.preprocessing import preprocessing_facts, preprocessing_sentence

    model = settings.preprocess(model)
    if model.name == "embedded":  # which is the model where none is named
        note(
            "model embedded: small, synthetic, for demonstrations only; name yours, such as --model resnet50"
        )
    note(preprocessing_sentence(preprocessing_facts(model)))
    return model


def load_here(settings: "Settings", name: str, weights: str | None, device: str | None) -> "Model":
    """The model, in this process."""
    import equicam

    of_model = settings.sections["model"]
    model = equicam.load(
        name, weights=weights, classes=of_model.get("classes"), layer=of_model.get("layer"), device=resolve_device(device)
    )  # fmt: skip
    return set_preprocessing(model, settings)


def load_on_engine(
    settings: "Settings", name: str, weights: str | None, device: str | None, *, tiled: bool = False
) -> "tuple[Model, Devices | Cluster | None]":
    """The model, and the engine that computes, if not this process alone; `tiled` images are windows if the settings say so."""
    from equicam.engines.worker import ModelFromName
    from equicam.models.preprocessing import Preprocessing, preprocessing_facts, preprocessing_sentence
    from equicam.readers.names import absolute_model, absolute_weights

    of_model, tiling = settings.sections["model"], settings.tiling if tiled else None
    names = tuple(of_model["classes"]) if "classes" in of_model else None
    compiled = settings.recipe.compiled
    if compiled is None:  # an audit compiles where it is repaid
        compiled = tiled and resolve_device(device).startswith("cuda")
    source = ModelFromName(
        absolute_model(name), absolute_weights(weights), names, of_model.get("layer"), compiled
    )
    device, engine = _resolve_engine(settings.sections["run"], device, source)
    model = source(device)
    if tiling is not None:  # whose input has the mean and std of the settings
        whole = replace(tiling, input=tiling.input.or_else(model.input))
        note(preprocessing_sentence(preprocessing_facts(model, whole), tiles=True))
        return model, engine
    model = set_preprocessing(model, settings)
    if engine is not None and isinstance(model.preprocess, Preprocessing):
        engine = replace(engine, model_source=replace(source, preprocessing=model.preprocess))
    return model, engine


def _resolve_engine(
    of_run: Mapping[str, Any], device: str | None, source: "ModelFromName"
) -> "tuple[str, Devices | Cluster | None]":
    """The device of this process's own model, and the engine that computes, if not this process alone."""
    from equicam.engines.devices import Devices

    engine, address, actors = (of_run.get(name) for name in ("engine", "address", "actors"))
    if address not in (None, "auto"):
        raise EquicamError(
            "address in a recipe file", "auto: nothing connects to an address that only a file names", repr(address),
            "RAY_ADDRESS=host:port in the environment",
        )  # fmt: skip
    if engine == "ray":
        from equicam.engines.ray import Cluster, best_device

        return "cpu", Cluster(device or best_device(address), address, actors, source)
    if engine not in (None, "local"):
        raise EquicamError("engine", "local or ray", repr(engine), 'engine="ray"')
    if address is not None or actors is not None:
        raise EquicamError("address and actors", "engine ray", "engine local", 'engine="ray"')
    names = split_commas(device) or []
    return ("cpu", Devices(tuple(names), source)) if len(names) > 1 else (resolve_device(device), None)
