"""Weights from files and caches. Code in a file is never executed."""

import contextlib
import hashlib
import json
import mmap
import os
import pickle
import pickletools
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from huggingface_hub import constants
from torch import Tensor, nn

from equicam.errors import EquicamError

T = TypeVar("T")
UNREADABLE = (
    pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, struct.error,
)  # fmt: skip
"""Errors of torch's reader on bytes that it did not write."""
FORCE_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""An environment variable of torch."""
LEGACY_PICKLES = 5
"""The pickles in a row that torch.save wrote before its zip files."""


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Tensors by name from a safetensors or PyTorch file, loaded without running code."""
    if not file.is_file():
        raise EquicamError("weights", "an existing file", repr(str(file)), "its full path")
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(file))
        except SafetensorError as error:
            what, needs = f"weights {str(file)!r}", "a whole safetensors file"
            raise EquicamError(what, needs, error, "a fresh copy of it") from error
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise _not_tensors(file, error) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise EquicamError(
            f"weights {str(file)!r}", "a state dict of tensors", type(found).__name__, "saving model.state_dict()",
        )  # fmt: skip
    return {key.removeprefix("module."): value for key, value in found.items()}


def stored_classes(file: Path) -> tuple[str, ...] | None:
    """The class names that `finetune` stored in a safetensors file."""
    if file.suffix != ".safetensors" or not file.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as found:
            names = json.loads((found.metadata() or {}).get("classes", "null"))
    except (SafetensorError, ValueError, RecursionError, OSError):
        return None
    return tuple(names) if isinstance(names, list) and all(isinstance(n, str) for n in names) else None


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over every tensor of a network: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\0".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _only_tensors() -> Iterator[None]:
    """Inside `with`, torch.load takes nothing but tensors, whoever calls it and with whatever options.

    torchvision loads the files of its cache without that. The switch is the process's, and only ever stricter.
    """
    before = os.environ.get(FORCE_TENSORS)
    os.environ[FORCE_TENSORS] = "1"
    try:
        yield
    finally:
        os.environ.pop(FORCE_TENSORS, None)
        os.environ |= {} if before is None else {FORCE_TENSORS: before}


def _not_tensors(file: Path, error: Exception) -> EquicamError:
    return EquicamError(
        f"weights {str(file)!r}", "a file of tensors alone, which loads without running code", _describe(file, error),
        "saving model.state_dict() or a safetensors file",
    )  # fmt: skip


def _describe(file: Path, error: Exception) -> str:
    """Why a file was refused, without torch's message, which advises to load the file unsafely."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (ValueError, RuntimeError, OSError, pickle.UnpicklingError):
        names = list(_pickle_imports(file))  # torch reads only its zip files
    if names:
        return f"a pickle that imports {', '.join(sorted(names))}"
    return f"bytes that are not tensors ({type(error).__name__})"


def _pickle_imports(file: Path) -> set[str]:
    """Every name that the pickles of a file import; the opcodes are listed, never executed."""
    names: set[str] = set()
    # overflow: a length beyond any file. Anything else that is no pickle is a ValueError, an empty file too
    with (
        suppress(ValueError, OverflowError),
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        for _ in range(LEGACY_PICKLES):
            names |= _imports(list(pickletools.genops(cast("IO[bytes]", data))))
    return names


def _imports(opcodes: Sequence[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> set[str]:
    """The names one pickle imports: arguments of an opcode, or the two strings pushed before it."""
    names: set[str] = set()
    strings, memo = ["?", "?"], dict[int, str]()
    for opcode, argument, _ in opcodes:
        if opcode.name in ("GLOBAL", "INST"):
            names.add(argument.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            names.add(".".join(strings[-2:]))
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = strings[-1]
        elif opcode.name.endswith("PUT"):
            memo[argument] = strings[-1]
        elif opcode.name.endswith("GET"):
            strings.append(memo.get(argument, "?"))
        elif isinstance(argument, str):
            strings.append(argument)
    return names


def build_with_weights(build: Callable[[int | None], nn.Module], file: Path) -> tuple[nn.Module, bool]:
    """A network with the weights of a file and the number of classes they have; whether that is the architecture's own."""
    weights = read_state_dict(file)
    module = build(None)
    shapes = {key: value.shape for key, value in module.state_dict().items()}
    known = [(key, value.shape, shapes[key]) for key, value in weights.items() if key in shapes]
    differ = [key for key, found, own in known if found != own and found[1:] == own[1:]]
    if differ:
        module = build(weights[differ[-1]].shape[0])
    load_weights(module, weights, file)
    return module, not differ


def load_weights(module: nn.Module, weights: dict[str, Tensor], file: Path) -> None:
    """Copy every tensor of the file into the module; names and shapes must match."""
    own = module.state_dict()
    # older files lack this counter of training steps, and inference does not use it
    missing = sorted(k for k in own.keys() - weights.keys() if not k.endswith("num_batches_tracked"))
    unknown = sorted(weights.keys() - own.keys())
    known = own.keys() & weights.keys()
    shapes = [f"{k} {tuple(weights[k].shape)}" for k in known if own[k].shape != weights[k].shape]
    if missing or unknown or shapes:
        raise EquicamError(
            f"weights {str(file)!r}", f"the tensors of {type(module).__name__}",
            f"missing {missing[:3]}, unknown {unknown[:3]}, of another shape {shapes[:3]}",
            "the architecture they were trained with",
        )  # fmt: skip
    module.load_state_dict(weights, strict=False)


def from_torch_hub(name: str, build: Callable[[], nn.Module], *, file: str) -> nn.Module:
    """The module that `build` makes from torch's cache, or from a download into it."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / file
    try:
        # torch prints on stdout what it downloads; results go there, and nothing else
        with _only_tensors(), contextlib.redirect_stdout(sys.stderr):
            return build()
    except OSError as error:
        raise _absent(name, str(path), error) from error
    except UNREADABLE as error:
        if not path.is_file():
            raise
        raise _not_tensors(path, error) from error


def from_hf_hub(name: str, build: Callable[[], T]) -> T:
    """The result of `build` from Hugging Face's cache, or from a download; an unreachable hub fails at once."""
    try:
        with _offline(), _only_tensors():
            return build()
    except (OSError, RuntimeError) as missing:
        if not _reachable():
            raise _absent(name, str(constants.HF_HUB_CACHE), missing) from missing
    try:
        with _only_tensors():
            return build()
    except (OSError, RuntimeError) as error:
        raise _absent(name, str(constants.HF_HUB_CACHE), error) from error


@contextmanager
def _offline() -> Iterator[None]:
    """Inside `with`, the hub's clients use only the cache; they read this flag at every call."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable() -> bool:
    """One short request, because the hub's clients retry for half a minute per file."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=5):  # noqa: S310  # an https constant
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _absent(name: str, cache: str, error: Exception) -> EquicamError:
    reason = next(iter(str(error).splitlines()), "no network")
    return EquicamError(
        f"loading {name!r}", f"a download, or a copy in the cache ({cache})", f"{type(error).__name__}: {reason}",
        'running once with a network, weights="FILE", or weights="random" to try things out',
    )  # fmt: skip
