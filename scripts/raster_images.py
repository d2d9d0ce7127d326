"""Draw a raster, the stitched map of one class over it, and the stability of its windows: images of docs/slides.md and docs/geo.md.

python scripts/raster_images.py RUN EXPORTED CLASS OUT.png

EXPORTED is what `equicam export RUN --to ome-tiff` or `--to geotiff` wrote.
"""

import sys

import matplotlib
import numpy as np
import rasterio
import tifffile

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import equicam
from equicam.images.files import as_path
from equicam.rasters.windows import show_raster


def main() -> None:
    """One row of three."""
    folder, exported, name, out = sys.argv[1:]
    store = equicam.open_run(folder).store
    (raster,) = store.rasters().to_pylist()
    path, given = as_path(raster["path"]), store.manifest.tiling.input
    shown = np.asarray(show_raster(path, given, 900))
    bands = read_bands(exported)
    cell = 8 * store.read_items(["side"])["side"][0].as_py() / store.manifest.tiling.tile
    extent = (0, raster["width"], raster["height"], 0)
    figure, axes = plt.subplots(
        1, 3, figsize=(12, 3.6 * raster["height"] / raster["width"] + 0.8), layout="constrained"
    )
    figure.colorbar(plt.cm.ScalarMappable(), ax=axes[0], location="bottom").ax.set_visible(
        False
    )  # the same height
    for axis, title in zip(axes, ("Raster", f"Map of {name}", "Stability of each place"), strict=True):
        axis.imshow(shown, extent=extent)
        axis.set_title(title, fontsize=11)
        axis.set_axis_off()
    height, width = bands.shape[1:]
    of_cells = (0, width * cell, height * cell, 0)
    strength = bands[0] / np.nanpercentile(bands[0], 99.5)
    painted = axes[1].imshow(
        np.clip(strength, 0, 1), extent=of_cells, cmap="inferno", alpha=0.55, vmin=0, vmax=1
    )
    figure.colorbar(
        painted,
        ax=axes[1],
        location="bottom",
        label="strength of the map, as a share of its 99.5th percentile",
    )
    painted = axes[2].imshow(bands[2], extent=of_cells, cmap="viridis", alpha=0.6, vmin=0, vmax=1)
    figure.colorbar(
        painted, ax=axes[2], location="bottom", label="stability: 1 where maps rotate with the image"
    )
    for axis in axes:
        axis.set_xlim(0, raster["width"])
        axis.set_ylim(raster["height"], 0)
    figure.suptitle(
        f"{raster['id']}: {store.manifest.recipe.method} on {store.manifest.model}, {store.manifest.images} windows",
        fontsize=12,
    )
    figure.savefig(out, dpi=100)


def read_bands(exported: str) -> np.ndarray:
    """Map, PEUM, stability and coverage."""
    if exported.endswith(".ome.tif"):
        return tifffile.imread(exported)
    with rasterio.open(exported) as file:
        return file.read()


if __name__ == "__main__":
    main()
