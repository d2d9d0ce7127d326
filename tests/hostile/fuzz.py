"""Damage generated images, rasters and source lists at random, and open them as an audit does.

    python tests/hostile/fuzz.py --minutes 3

A finding is an exception other than EquicamError, an image that takes too long or kills its worker, a list or raster that
does so to the process that asks for it, or memory above the limit. Rasters and lists that end the limited process that
opens them are rows with that reason; they are counted. Every case has a number; seed and number make it again:
--seed S --only N.
"""

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from random import Random

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import equicam
from equicam.audit.compute import preprocess_to_array
from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.decoding import DecodedImage, DecoderPool
from equicam.images.items import Item, load_item
from equicam.images.limited import _limit_memory, limit_time
from equicam.images.sources import list_source
from equicam.models.images import VisibleBoxes, input_bytes
from equicam.rasters.options import Input, Tiling
from equicam.rasters.tiling import cut_windows
from equicam_paper.benchmarks import find_items

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.hostile.generate import SAVED, WITH_EXIF, encode, exif, mutate

SHARD = 250
SOURCES_PER_SHARD = 50
SECONDS, MEMORY = 20.0, 4 * 2**30
ENDED = ("killed", "slow")
"""Of sources: the limited process that opened one was ended by it, or by the limit of time."""
EXPECTED = {"unreadable", "out-of-memory"}
"""Reasons that are no finding; an unreadable image must be so by an EquicamError."""


def make_image(seed: int, number: int) -> tuple[str, bytes]:
    """Case `number`: its format, and the bytes of the image."""
    random = Random(f"image {seed} {number}")
    name = random.choice(list(SAVED))
    shape = random.choice(((48, 64, 3), (48, 64, 3), (9, 5, 3), (48, 64), (300, 200, 3)))
    pixels = np.random.default_rng(random.randrange(8)).integers(0, 255, shape, dtype=np.uint8)
    options: dict[str, object] = {}
    if name in WITH_EXIF and random.random() < 0.7:
        options["exif"] = exif(random.randrange(10))
        if random.random() < 0.5:
            options["exif"] = b"Exif\0\0" + mutate(exif(random.randrange(10))[6:], random)[:60_000]
    if name in ("jpeg", "png", "webp", "tiff") and random.random() < 0.3:
        options["icc_profile"] = mutate(random.randbytes(200), random)
    if name == "tiff" and random.random() < 0.5:
        options["tiffinfo"] = {274: random.randrange(10), 282: 72.0, 305: "x" * random.randrange(40)}
    data = encode(name, pixels, **options)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        data = mutate(data, random)
    return name, data


def make_source(seed: int, number: int, folder: Path) -> str:
    """Source `number`, written into the folder; returns its kind."""
    random = Random(f"source {seed} {number}")
    kind = random.choice(("csv", "parquet", "cub", "xml", "mat", "hdf5", "arrow", *RASTERS, *RASTERS))
    buffer = io.BytesIO()
    if kind in RASTERS:
        make_raster(kind, random, folder)
    elif kind == "arrow":
        image = encode("png", np.zeros((8, 9, 3), np.uint8))
        table = pa.table({"image": [{"bytes": image, "path": None}] * 5, "label": list(range(5))})
        with pa.ipc.new_stream(buffer, table.schema) as stream:
            stream.write_table(table)
        (folder / "data.arrow").write_bytes(mutate(buffer.getvalue(), random))
        lists = {"state.json": b'{"_data_files": [{"filename": "data.arrow"}]}', "dataset_info.json": b"{}"}
        for name, text in lists.items():
            (folder / name).write_bytes(text if random.random() < 0.8 else mutate(text, random))
    elif kind == "csv":
        rows = ["path,id,label,boxes,region,split", "a.png,1,cat,0 0 1 1;2 2 3 3,0 0 9 9,test"]
        rows += [f"{i}.png,i{i},{i},,,train" for i in range(20)]
        (folder / "items.csv").write_bytes(mutate("\n".join(rows).encode(), random))
    elif kind == "parquet":
        paths = [f"{i}.png" for i in range(50)]
        columns = {"path": paths, "label": list(range(50)), "boxes": ["0 0 1 1"] * 50}
        pq.write_table(pa.table(columns), buffer, compression=random.choice(("snappy", "zstd", "none")))
        (folder / "items.parquet").write_bytes(mutate(buffer.getvalue(), random))
    elif kind == "cub":
        lines = {"image_class_labels": "1", "bounding_boxes": "0 0 5.0 5.0", "train_test_split": "0"}
        for name, text in {"images": "a/b.jpg", **lines}.items():
            data = "\n".join(f"{i} {text}{i if name == 'images' else ''}" for i in range(1, 20)).encode()
            (folder / f"{name}.txt").write_bytes(mutate(data, random) if random.random() < 0.5 else data)
    elif kind == "xml":
        (folder / "n01440764").mkdir()
        (folder / "bbox").mkdir()
        (folder / "n01440764/a.JPEG").touch()
        box = b"<xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax>"
        text = b"<a><object><bndbox>" + box + b"</bndbox></object></a>"
        (folder / "bbox/a.xml").write_bytes(mutate(text, random))
    elif kind == "mat":
        import scipy.io

        (folder / "ILSVRC2012_val_00000001.JPEG").touch()
        (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n")
        dtype = [("ILSVRC2012_ID", "O"), ("WNID", "O")]
        synsets = np.array([(i, f"n{i:08}") for i in range(1, 20)], dtype=dtype)
        scipy.io.savemat(buffer, {"synsets": synsets}, do_compression=random.random() < 0.5)
        (folder / "meta.mat").write_bytes(mutate(buffer.getvalue(), random))
    else:
        for name, shape in (("x", (6, 8, 8, 3)), ("y", (6, 1, 1, 1))):
            compression = "gzip" if random.random() < 0.5 else None
            with h5py.File(buffer := io.BytesIO(), "w") as file:
                file.create_dataset(name, data=np.zeros(shape, np.uint8), compression=compression)
            data = buffer.getvalue()
            data = mutate(data, random) if random.random() < 0.7 else data
            (folder / f"camelyonpatch_level_2_split_test_{name}.h5").write_bytes(data)
    return kind


RASTERS = ("geotiff", "cog", "jp2", "ome", "pyramid", "aperio", "dicom", "mrxs")
"""Kinds of raster; regions, companions and metadata are damaged with them."""


@cache
def raster_templates() -> dict[str, bytes]:
    """A whole raster of each kind, as bytes: written once, and damaged in each case."""
    import rasterio
    from rasterio.io import MemoryFile

    from tests.hostile.rasters import dicom
    from tests.rasters.conftest import scene, write_pyramid

    image, found = scene(size=(300, 420)), {}
    place = {"crs": "EPSG:32618", "transform": rasterio.Affine(10, 0, 500_000, 0, -10, 4_500_000)}
    profile = {"count": 3, "height": 300, "width": 420, "dtype": "uint8"} | place
    tiled = {"tiled": True, "blockxsize": 128, "blockysize": 128, "nodata": 0, "compress": "deflate"}
    for kind, driver in (("geotiff", "GTiff"), ("cog", "COG"), ("jp2", "JP2OpenJPEG")):
        with MemoryFile() as memory:
            with memory.open(**profile, driver=driver, **(tiled if driver == "GTiff" else {})) as file:
                file.write(image)
                if kind == "geotiff":
                    file.update_tags(ns="OTHERS", OTHER_FILE="/vsimem/a.tif")
            found[kind] = memory.read()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tif"
        for kind in ("ome", "pyramid"):
            write_pyramid(path, image, ome=kind == "ome")
            found[kind] = path.read_bytes()
        found["aperio"] = found["pyramid"].replace(b"tifffile.py", b"Aperio Imag")
        found["dicom"] = dicom(path).read_bytes()
    found["mrxs"] = (
        b"[GENERAL]\nSLIDE_VERSION = 01.02\nSLIDE_ID = A\nIMAGENUMBER_X = 2\nIMAGENUMBER_Y = 2\n[HIERARCHICAL]\n"
        b"HIER_COUNT = 0\nINDEXFILE = Index.dat\n[DATAFILE]\nFILE_COUNT = 1\nFILE_0 = Data0000.dat\n"
    )
    return found


def make_raster(kind: str, random: Random, folder: Path) -> None:
    """Write a damaged raster of this kind, perhaps with damaged companions."""
    from tests.hostile.rasters import NODATA

    data = raster_templates()[kind]
    for _ in range(random.choice((0, 1, 1, 2, 4))):
        data = mutate(data, random)
    if kind == "mrxs":
        (folder / "a").mkdir()
        (folder / "a" / "Slidedat.ini").write_bytes(data)
        (folder / "a" / "Index.dat").write_bytes(mutate(b"01.02A" + bytes(200), random))
        (folder / "a" / "Data0000.dat").write_bytes(random.randbytes(300))
        data = b""
    suffix = {"dicom": ".dcm", "mrxs": ".mrxs", "jp2": ".jp2", "ome": ".ome.tif"}.get(kind, ".tif")
    (folder / f"a{suffix}").write_bytes(data)
    if random.random() < 0.2:
        (folder / f"a{suffix}.aux.xml").write_bytes(mutate(NODATA.encode(), random))
    if random.random() < 0.2:
        area = '{"type":"FeatureCollection","features":[{"type":"Feature","properties":{},"geometry":{"type":"Polygon","coordinates":[[[0,0],[300,0],[300,300],[0,0]]]}}]}'
        (folder / "regions.geojson").write_bytes(mutate(area.encode(), random))


def open_source(kind: str, folder: Path) -> None:
    """List a source and open some of it, as an audit does."""
    if kind not in RASTERS:
        for item in find_items(folder)[:3]:
            with contextlib.suppress(EquicamError):
                load_item(item)
        return
    regions = folder / "regions.geojson"
    tiling = Tiling(96, 96, regions=str(regions) if regions.exists() else None, input=Input(scale=255))
    windows, _ = cut_windows(list_source(folder, frames=False), tiling, 20)
    for item in windows[:2]:
        load_item(item)


def check_image(found: DecodedImage) -> str:
    """What is wrong with the outcome; empty if nothing."""
    if found.reason is None:
        return "" if found.x is not None and np.isfinite(found.x).all() else "no pixels and no reason"
    if found.reason.code not in EXPECTED:
        return found.reason.code
    if found.reason.code == "unreadable" and found.reason.values["error"] != "EquicamError":
        return f"{found.reason.values['error']}: {found.reason.values['message'][:200]}"
    return ""


def read_sources(seed: int, numbers: Sequence[int], sender: object) -> None:
    """In a process of its own: read each source, and send the number before and the outcome after."""
    _limit_memory(MEMORY)
    for number in numbers:
        folder = Path(tempfile.mkdtemp(prefix="source-"))
        try:
            kind = make_source(seed, number, folder)
            sender.send((number, kind, None))
            limit_time(8 * SECONDS)
            outcome = ""
            try:
                open_source(kind, folder)
            except EquicamError as error:
                text = str(error).encode().decode()
                slow = "slow" if "to be read within" in text else ""
                outcome = "killed" if "the end of the process" in text else slow
            except Exception as error:  # noqa: BLE001  # the finding
                outcome = f"{type(error).__name__}: {error}"[:300]
            limit_time(0)
            sender.send((number, kind, outcome))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def try_sources(seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Numbers of sources, each with its finding or an empty text."""
    left = list(numbers)
    while left:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=read_sources, args=(seed, left, sender))
        process.start()
        sender.close()
        at, kind = left[0], "?"
        with receiver, contextlib.suppress(EOFError):
            while left:
                at, kind, outcome = receiver.recv()
                if outcome is not None:
                    left.remove(at)
                    yield at, outcome if outcome in ENDED else f"{kind} source: {outcome}" if outcome else ""
        process.join()
        if left:  # it died on this one
            left.remove(at)
            code = process.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else code
            yield at, f"{kind} source: the process ended by {name}"


def shards(options: argparse.Namespace, folder: Path, end: float) -> Iterator[list[Item]]:
    """Files of damaged images, written as they are needed."""
    numbers = range(options.images) if options.only is None else range(options.only, options.only + 1)
    for start in range(0, len(numbers), SHARD):
        if time.monotonic() > end:
            return
        items = []
        for number in numbers[start : start + SHARD]:
            name, data = make_image(options.seed, number)
            path = folder / f"{number}-{name}"
            path.write_bytes(data)
            items.append(Item(str(number), path))
        yield items


def main() -> int:
    """Run until the images or the minutes are used up."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="processes that decode")
    parser.add_argument("--only", type=int, default=None, help="one number, to make a finding again")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    if options.only is None:  # decoders in C complain about every file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    limited.MAX_SECONDS, limited.MAX_MEMORY_BYTES = SECONDS, MEMORY
    model = equicam.load("embedded")
    preprocess, boxes = partial(preprocess_to_array, model), VisibleBoxes(model)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    findings: list[str] = []
    outcomes: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    done = sources = 0
    end = start + options.minutes * 60
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    sizes = {"image_bytes": input_bytes(model), "shard_size": SHARD}

    def find(what: str, number: int, problem: str) -> None:
        if problem:
            findings.append(f"{what} {number}: {problem}")
            again = f"{sys.executable} {sys.argv[0]} --seed {options.seed} --only {number}"
            print(f"\nFINDING {findings[-1]}\n  again: {again}", flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder,
        closing(DecoderPool(preprocess, boxes, workers=options.processes, **sizes)) as pool,
    ):
        for decoded in pool.decode_shards(shards(options, Path(folder), end)):  # type: ignore[arg-type]
            for found in decoded:
                find("image", int(found.item.id), check_image(found))
                outcomes[found.reason.code if found.reason else "ok"] += 1
                found.item.path.unlink()
            done += len(decoded)
            one = options.only is not None
            numbers = [options.only] if one else range(sources, sources + SOURCES_PER_SHARD)
            for number, problem in try_sources(options.seed, numbers):
                ends[problem] += 1
                find("source", number, "" if problem in ENDED else problem)
                sources += 1
            rate = done / (time.monotonic() - start)
            text = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
            ended = f"{ends['killed']} killed their process, {ends['slow']} slow"
            print(f"\r{done} images ({text}), {sources} lists and rasters ({ended})", end=", ")
            print(f"{rate:.0f} images/s, {len(findings)} findings", end=" ", flush=True)
    peak = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss - base) * 1024
    if peak > MEMORY:
        findings.append(f"a worker took {peak / 2**30:.1f} GiB")
    print(f"\nlargest worker: {max(0, peak) / 2**30:.2f} GiB more than this process; seed {options.seed}")
    print("\n".join(findings) or "no findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
