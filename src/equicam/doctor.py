"""Check this machine: versions, devices, caches and extras, each with the command that repairs it."""

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "matplotlib", "safetensors")
EXTRAS = {
    "clip": ("open_clip", "open_clip zero-shot models"),
    "hf": ("transformers", "Hugging Face models"),
    "review": ("fastapi", "the review page"),
    "wsi": ("openslide", "whole slides"),
    "geo": ("rasterio", "GeoTIFF and satellite scenes"),
    "dicom": ("pydicom", "DICOM images"),
    "dicom-out": ("highdicom", "maps exported as DICOM"),
    "ray": ("ray", "audits and evaluations on many machines"),
}


@dataclass(frozen=True)
class _Finding:
    """One check: its name, the result, and the command to type if something is missing."""

    name: str
    found: str
    fix: str = ""


def findings() -> Iterator[_Finding]:
    """Versions, devices, caches and extras, in that order."""
    enough = sys.version_info >= (3, 11)
    yield _Finding("Python", platform.python_version(), "" if enough else "install Python 3.11 or newer")
    for package in ("equicam", *PACKAGES):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        yield _Finding(package, version or "missing", "" if version else f"pip install {package}")
    yield from _devices_and_caches()
    for extra, (module, purpose) in EXTRAS.items():
        installed = importlib.util.find_spec(module) is not None
        fix = "" if installed else f"pip install 'equicam[{extra}]'"
        state = "is installed" if installed else "is missing"
        yield _Finding(f"extra [{extra}]", f"{module} {state}: {purpose}", fix)


def _devices_and_caches() -> Iterator[_Finding]:
    import torch
    from huggingface_hub import constants

    yield _Finding("CPU", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    if not torch.cuda.is_available():
        yield _Finding("GPU", "none that torch can use: everything runs on the CPU")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield _Finding(f"cuda:{index}", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
    checkpoints, hub = Path(torch.hub.get_dir()) / "checkpoints", Path(constants.HF_HUB_CACHE)
    for name, folder, pattern in (("TORCH_HOME", checkpoints, "*.pth"), ("HF_HOME", hub, "models--*")):
        count = len(list(folder.glob(pattern)))
        yield _Finding(f"{name} cache", f"{count} models in {folder}")
