"""Predictions of masked images, compiled: the network alone, without its gradient."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.readers.forward import Network, predict, run_module
from equicam.readers.logits import Logits, read_output
from equicam.runtime.call_size import fits_memory, is_long
from equicam.runtime.deferred import DeferredChecks
from equicam.runtime.graphs import CompiledCall, Tensors, graphs_of, shape_key


def predict_compiled(network: Network, x: Float[Tensor, "n c H W"]) -> Logits:
    """Logits and probabilities by a compiled call, one for each batch size; eagerly where memory does not suffice."""
    model, eager = network.model, replace(network, predict=None)

    def work(images: Tensor, _target: Tensor | None) -> tuple[Tensors, DeferredChecks]:
        found, checks = read_output(model, run_module(eager, images), count=len(images)), DeferredChecks()
        checks.add(found.checks)
        known = {} if found.probabilities is None else {"probabilities": found.probabilities}
        return {"logits": found.logits} | known, checks

    def capture() -> CompiledCall:
        with eager.frozen():
            tensors = (*model.module.parameters(), *model.module.buffers())
            return CompiledCall(work, work, (x, None), tensors, long=is_long(x, len(x)))

    key = ("predict", model.task, model.classes, model.value, network.autocast, shape_key((x,)))
    with torch.no_grad():
        replayed = graphs_of(model.module).attempt(
            key, capture, (x, None), fits=lambda: fits_memory(x, len(x))
        )
        if replayed is None:
            return predict(eager, x)
        found = replayed.finish()
    return Logits(found["logits"], found.get("probabilities"), ())
