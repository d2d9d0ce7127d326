"""DICOM images: values against a slow twin and pydicom, frames as items, hostile files as reasons.

EQUICAM_PICTURES      a folder with rasters/ct_image.dcm, dx_image.dcm and sm_image.dcm
EQUICAM_RASTERS       a folder with RG1_UNCR.dcm, eCT_Supplemental.dcm, …; .rasters, which `make rasters` fills, if not given
"""

import contextlib
import hashlib
import logging
import os
import struct
import sys
import warnings
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.dicom import check_window, frames, read_frame
from equicam.images.items import Item, digest_files, open_image, open_item, read_item
from equicam.images.sources import find_items
from tests.conftest import recipe

pydicom = pytest.importorskip("pydicom")
from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402
from pydicom.uid import (  # noqa: E402
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
)

RASTERS = Path(os.environ.get("EQUICAM_PICTURES", "/nowhere")) / "rasters"
PYDICOM_DATA = Path(os.environ.get("EQUICAM_RASTERS", Path(__file__).parents[2] / ".rasters"))
SECRET = "Doe^Jane"
CT, SLIDE = "1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.77.1.6"
RAMP = np.arange(40 * 30).reshape(40, 30)
TWELVE = (RAMP * 4095 // RAMP.max()).astype(np.uint16)
EIGHT = (RAMP * 255 // RAMP.max()).astype(np.uint8)
TWELVE_BITS = {"BitsStored": 12, "HighBit": 11}
WINDOW = TWELVE_BITS | {"WindowCenter": 2000, "WindowWidth": 3000}
ELEMENTS = ("WindowCenter", "WindowWidth", "RescaleSlope", "RescaleIntercept")


def made(values: np.ndarray, syntax=ExplicitVRLittleEndian, **elements) -> Dataset:
    """A dataset of one or several frames, with elements replaced, or left out where they are None."""
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = syntax
    ds.file_meta.MediaStorageSOPClassUID = ds.SOPClassUID = CT
    ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID = "1.2.3"
    ds.PatientName, ds.PatientID = SECRET, SECRET
    colour = values.ndim > 2 and values.shape[-1] == 3
    if values.ndim - colour == 3:
        ds.NumberOfFrames = len(values)
    ds.Rows, ds.Columns = values.shape[-2 - colour : values.ndim - colour]
    ds.SamplesPerPixel = 3 if colour else 1
    if colour:
        ds.PlanarConfiguration = 0
    ds.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    bits = 8 * values.dtype.itemsize
    ds.BitsAllocated, ds.BitsStored, ds.HighBit = bits, bits, bits - 1
    ds.PixelRepresentation = int(values.dtype.kind == "i")
    order = ">" if syntax == ExplicitVRBigEndian else "<"
    data = values.astype(values.dtype.newbyteorder(order)).tobytes()
    ds.PixelData = data + b"\0" * (len(data) % 2)
    ds["PixelData"].VR = "OW" if bits > 8 else "OB"
    for name, value in elements.items():
        setattr(ds, name, value)
        if value is None:
            delattr(ds, name)
    return ds


def as_bytes(ds: Dataset) -> bytes:
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pydicom.dcmwrite(buffer, ds, enforce_file_format=True)
    return buffer.getvalue()


def written(path: Path, values: np.ndarray, syntax=ExplicitVRLittleEndian, **elements) -> Path:
    path.write_bytes(as_bytes(made(values, syntax, **elements)))
    return path


def grey(path: Path, frame: int = 0, voi=None) -> np.ndarray:
    found = read_frame(path, frame, voi)
    assert found.dtype == np.uint8
    assert (found == found[..., :1]).all()
    return found[..., 0].astype(int)


def twin(values, centre, width, slope=1.0, intercept=0.0):
    """PS3.3 C.11.2.1.2, one value at a time."""
    out = np.empty(values.shape, int)
    for at, stored in np.ndenumerate(values):
        x = float(stored) * slope + intercept
        if x <= centre - 0.5 - (width - 1) / 2:
            y = 0.0
        elif x > centre - 0.5 + (width - 1) / 2:
            y = 255.0
        else:
            y = ((x - (centre - 0.5)) / (width - 1) + 0.5) * 255
        out[at] = int(np.rint(y))
    return out


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian])
def test_rescaling_and_window_are_the_twins(tmp_path, syntax):
    signed = (TWELVE.astype(np.int16) - 2048).astype(np.int16)
    more = ((signed, -600, 1500, 2, -100), (signed, 0, 1, 1, 0))
    for values, *given in ((TWELVE, 40, 400, 1, -1024), (TWELVE, 1000, 1800, 0.5, 10), *more):
        stated = TWELVE_BITS | dict(zip(ELEMENTS, given, strict=True))
        path = written(tmp_path / "a.dcm", values, syntax, **stated)
        expected = twin(values, *given)
        assert expected.std() > 10
        assert np.array_equal(grey(path), expected)
        assert np.array_equal(grey(path, voi=(100.0, 300.0)), twin(values, 100, 300, *given[2:]))


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_every_window_function_is_pydicoms(tmp_path, function):
    window = {"WindowCenter": [900, 1], "WindowWidth": [1700, 2], "VOILUTFunction": function}
    ds = made(TWELVE, RescaleSlope=1, RescaleIntercept=-500, **TWELVE_BITS | window)
    (tmp_path / "a.dcm").write_bytes(as_bytes(ds))
    real = pydicom.pixels.apply_modality_lut(TWELVE, ds)
    shown = pydicom.pixels.apply_windowing(real, ds)
    low, high = -500, 4095 - 500
    assert np.abs(grey(tmp_path / "a.dcm") - (shown - low) / (high - low) * 255).max() <= 0.5001


def test_monochrome1_is_inverted_and_eight_bits_need_no_window(tmp_path):
    dark = written(tmp_path / "1.dcm", TWELVE, PhotometricInterpretation="MONOCHROME1", **WINDOW)
    light = written(tmp_path / "2.dcm", TWELVE, **WINDOW)
    assert np.array_equal(grey(dark), 255 - grey(light))
    assert np.array_equal(grey(written(tmp_path / "a.dcm", EIGHT)), EIGHT)
    signed = (EIGHT.astype(int) - 128).astype(np.int8)
    assert np.array_equal(grey(written(tmp_path / "a.dcm", signed)), EIGHT)
    rescaled = written(tmp_path / "a.dcm", EIGHT, RescaleSlope=-2, RescaleIntercept=7)
    assert np.array_equal(grey(rescaled), 255 - EIGHT.astype(int))


def test_more_bits_need_a_window_and_are_never_stretched(tmp_path):
    path = written(tmp_path / "a.dcm", TWELVE, **TWELVE_BITS)
    with pytest.raises(
        EquicamError, match=r"a VOI window.* got none in 12 bits; try .*voi = \[CENTER, WIDTH"
    ):
        read_frame(path, 0)
    dim = written(tmp_path / "b.dcm", TWELVE // 8, **TWELVE_BITS)
    assert np.array_equal(grey(dim, voi=(2048.0, 4096.0)), twin(TWELVE // 8, 2048, 4096))
    assert grey(dim, voi=(2048.0, 4096.0)).max() < 40


def test_colour(tmp_path):
    rgb = np.stack([EIGHT, EIGHT[::-1], np.full_like(EIGHT, 9)], -1)
    assert np.array_equal(open_image(written(tmp_path / "a.dcm", rgb)), rgb)
    ybr = pydicom.pixels.convert_color_space(rgb, "RGB", "YBR_FULL")
    found = np.asarray(open_image(written(tmp_path / "b.dcm", ybr, PhotometricInterpretation="YBR_FULL")))
    assert np.abs(found.astype(int) - rgb).max() <= 2
    with pytest.raises(EquicamError, match="colours of 8 bits, got 16"):
        open_image(written(tmp_path / "c.dcm", rgb.astype(np.uint16)))


def table(entries, first: int, bits: int) -> Dataset:
    item = Dataset()
    item.add_new("LUTDescriptor", "US", [len(entries), first, bits])
    item.add_new("LUTData", "OW", np.asarray(entries, "<u2").tobytes())
    return item


def test_tables_in_the_file(tmp_path):
    """More than 256 entries of 8 bits, which pydicom 3.0 indexes with 8 bits."""
    entries = np.rint(np.sqrt(np.linspace(0, 1, 3000)) * 255)
    path = written(tmp_path / "a.dcm", TWELVE, VOILUTSequence=[table(entries, 500, 8)], **TWELVE_BITS)
    expected = [[entries[min(max(int(v) - 500, 0), 2999)] for v in row] for row in TWELVE]
    assert np.array_equal(grey(path), expected)
    stated = TWELVE_BITS | {"WindowCenter": 128, "WindowWidth": 256}
    modality = written(tmp_path / "b.dcm", TWELVE, ModalityLUTSequence=[table(entries, 500, 8)], **stated)
    assert np.array_equal(grey(modality), twin(np.array(expected), 128, 256))


def test_palette(tmp_path):
    names = [f"{c}PaletteColorLookupTable" for c in ("Red", "Green", "Blue")]
    tables = [np.arange(256)[::step] for step in (1, -1, 1)]
    for bits, factor in ((8, 1), (16, 257)):
        elements = {f"{n}Descriptor": [256, 0, bits] for n in names}
        elements |= {f"{n}Data": (t * factor).astype("<u2").tobytes() for n, t in zip(names, tables, strict=True)}  # fmt: skip
        path = written(tmp_path / "a.dcm", EIGHT, PhotometricInterpretation="PALETTE COLOR", **elements)
        assert np.array_equal(open_image(path), np.stack([t[EIGHT] for t in tables], -1))


def enhanced(count: int) -> dict[str, object]:
    """A window and rescaling of its own for every frame."""
    groups = []
    for i in range(count):
        window, rescale, group = Dataset(), Dataset(), Dataset()
        window.WindowCenter, window.WindowWidth = 500 + 300 * i, 800
        rescale.RescaleSlope, rescale.RescaleIntercept = 1, -10 * i
        group.FrameVOILUTSequence, group.PixelValueTransformationSequence = [window], [rescale]
        groups.append(group)
    return {"PerFrameFunctionalGroupsSequence": groups, "WindowCenter": 1, "WindowWidth": 2}


def test_every_frame_is_an_item_with_a_window_of_its_own(tmp_path):
    stack = np.stack([np.roll(TWELVE, 5 * i) for i in range(4)])
    written(tmp_path / "many.dcm", stack, **TWELVE_BITS | enhanced(4))
    written(tmp_path / "one.dcm", EIGHT)
    assert frames(tmp_path / "many.dcm") == 4
    found = find_items(tmp_path)
    assert [item.id for item in found] == [*(f"many.dcm#frame={i}" for i in range(4)), "one.dcm"]
    assert [item.index for item in found] == [0, 1, 2, 3, None]
    for i, item in enumerate(found[:4]):
        expected = twin(stack[i], 500 + 300 * i, 800, intercept=-10 * i)
        assert np.array_equal(np.asarray(open_item(item))[..., 0], expected)
        content = read_item(item)
        assert content.sha256 == hashlib.sha256(content.decode().image.tobytes()).hexdigest()
    assert read_item(found[4]).sha256 == hashlib.sha256((tmp_path / "one.dcm").read_bytes()).hexdigest()
    with pytest.raises(EquicamError, match="needs one frame, got 4"):
        open_image(tmp_path / "many.dcm")
    with pytest.raises(EquicamError, match="frames 0 to 3"):
        read_frame(tmp_path / "many.dcm", 4)


def test_sources_of_every_kind(tmp_path):
    stack = np.stack([EIGHT, EIGHT[::-1]])
    (tmp_path / "class").mkdir()
    path = written(tmp_path / "class" / "a.DCM", stack)
    found = [(i.id, i.label) for i in find_items(tmp_path)]
    assert found == [("class/a.DCM#frame=0", "class"), ("class/a.DCM#frame=1", "class")]
    assert len(find_items(path)) == len(find_items(tmp_path / "*" / "a.*")) == 2
    bare = path.rename(tmp_path / "IM0001")  # no suffix: by content, if the user names it
    assert [i.index for i in find_items(bare)] == [0, 1]
    assert np.array_equal(np.asarray(open_item(find_items(bare)[1]))[..., 0], EIGHT[::-1])
    (tmp_path / "items.csv").write_text("path,id,label\nIM0001.dcm,x,3\n")
    bare.rename(tmp_path / "IM0001.dcm")
    found = [(i.id, i.label, i.index) for i in find_items(tmp_path)]
    assert found == [("x#frame=0", 3, 0), ("x#frame=1", 3, 1)]
    (tmp_path / "items.csv").write_text("path,id\nIM0001.dcm,x\na.png,x#frame=1\n")
    with pytest.raises(EquicamError, match="ids of their own"):
        find_items(tmp_path)
    # by content, whatever the suffix
    Image.fromarray(EIGHT).save(tmp_path / "png.dcm", "PNG")
    assert np.asarray(open_image(tmp_path / "png.dcm")).std() > 10
    assert np.array_equal(np.asarray(open_image(written(tmp_path / "dicom.png", EIGHT)))[..., 0], EIGHT)


def test_windows_distinguish_items(tmp_path):
    item = Item("a", written(tmp_path / "a.dcm", TWELVE, **TWELVE_BITS))
    one, two = replace(item, voi=(2000.0, 3000.0)), replace(item, voi=(1000.0, 3000.0))
    assert not np.array_equal(open_item(one), open_item(two))
    assert len({digest_files([i]) for i in (item, one, two)}) == 3
    for wrong in ((1.0, 0.0), (float("nan"), 5.0), (1.0, float("inf")), (1.0, 2.0, 3.0)):
        with pytest.raises(EquicamError, match="a centre and a width"):
            check_window(wrong)


def test_without_pydicom_an_item_has_a_reason(tmp_path, monkeypatch):
    path = written(tmp_path / "a.dcm", EIGHT)
    for name in ("pydicom", "pydicom.pixels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(limited, "inside", lambda: True)  # it would import by itself
    (item,) = find_items(path)
    with pytest.raises(EquicamError, match=r"needs pydicom.*pip install 'equicam\[dicom\]'"):
        open_item(item)


def spliced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


def meta(*elements: tuple[int, bytes, bytes]) -> bytes:
    body = b"".join(struct.pack("<HH2sH", 2, tag, vr, len(value)) + value for tag, vr, value in elements)
    return bytes(128) + b"DICM" + body


def nested(depth: int) -> bytes:
    start = meta((0x10, b"UI", b"1.2.840.10008.1.2.1\0"))
    sequence = struct.pack("<HH2sHI", 0x0028, 0x3010, b"SQ", 0, 0xFFFFFFFF)
    return start + (sequence + struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF)) * depth


HOSTILE = {
    "text": lambda: b"DICM",
    "preamble only": lambda: bytes(128) + b"DICM",
    "no prefix": lambda: spliced(as_bytes(made(EIGHT)), b"DICM", b"XXXX"),
    "deflated": lambda: meta((0x10, b"UI", b"1.2.840.10008.1.2.1.99")) + bytes(1000),
    "two syntaxes": lambda: meta((0x10, b"UI", b"1.2.840.10008.1.2.1\0"), (0x10, b"UI", b"1.2.840.10008.1.2.1.99")) + bytes(99),
    "unknown syntax": lambda: spliced(as_bytes(made(EIGHT)), b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.9.9.9\0"),
    "wrong syntax": lambda: as_bytes(made(EIGHT)).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.2\0"),
    "not really JPEG 2000": lambda: as_bytes(made(EIGHT)).replace(b"\x14\x001.2.840.10008.1.2.1\0", b"\x16\x00" + JPEG2000Lossless.encode()),
    "pixels cut off": lambda: as_bytes(made(TWELVE, **WINDOW))[:-500],
    "header cut off": lambda: as_bytes(made(EIGHT))[:300],
    "no pixels": lambda: as_bytes(made(EIGHT, PixelData=None)),
    "no rows": lambda: as_bytes(made(EIGHT, Rows=None)),
    "no bits": lambda: as_bytes(made(EIGHT, BitsStored=None)),
    "zero rows": lambda: as_bytes(made(EIGHT, Rows=0)),
    "huge": lambda: as_bytes(made(EIGHT, Rows=65535, Columns=65535)),
    "absurd frames": lambda: as_bytes(made(EIGHT, NumberOfFrames=2**31 - 1)),
    "negative frames": lambda: as_bytes(made(EIGHT, NumberOfFrames=-3)),
    "more frames than pixels": lambda: as_bytes(made(TWELVE, NumberOfFrames=3, **WINDOW)),
    "other colours": lambda: as_bytes(made(EIGHT, PhotometricInterpretation=SECRET)),
    "one sample for three": lambda: as_bytes(made(EIGHT, PhotometricInterpretation="RGB")),
    "width 0": lambda: as_bytes(made(TWELVE, **WINDOW | {"WindowWidth": 0})),
    "window of text": lambda: spliced(as_bytes(made(TWELVE, **WINDOW)), b"3000", b"Jane"),
    "endless window": lambda: spliced(as_bytes(made(TWELVE, **WINDOW)), b"3000", b"1E99").replace(b"2000", b" inf"),
    "slope 0": lambda: as_bytes(made(EIGHT, RescaleSlope=0, RescaleIntercept=0)),
    "table cut off": lambda: as_bytes(made(EIGHT, VOILUTSequence=[table(range(4), 0, 8)])).replace(struct.pack("<HHH", 4, 0, 8), struct.pack("<HHH", 900, 0, 8)),
    "empty table": lambda: as_bytes(made(EIGHT, VOILUTSequence=[Dataset()])),
    "no palette": lambda: as_bytes(made(EIGHT, PhotometricInterpretation="PALETTE COLOR")),
    "deep nesting": lambda: nested(50_000),
    "slide": lambda: as_bytes(made(np.stack([EIGHT] * 3), SOPClassUID=SLIDE)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_have_a_reason(tmp_path, name, caplog):
    """Never another exception, never an image, and nothing of the patient in messages, ids or logs."""
    path = tmp_path / "a.dcm"
    path.write_bytes(HOSTILE[name]())
    caplog.clear()  # pydicom quotes values when it writes them
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        items = find_items(tmp_path)
        assert len(items) <= 3
        with pytest.raises(EquicamError) as error:
            [read_item(item).decode() for item in items]
    spoken = str(error.value) + caplog.text + "".join(i.id for i in items) + "".join(str(w) for w in warned)
    assert "Jane" not in spoken
    assert error.value.__cause__ is None or "Jane" not in str(error.value.__cause__)
    for advice in ("--tile 224", "equicam[wsi]") if name == "slide" else ():
        assert advice in error.value.fix


def compressed(pixels: np.ndarray, kind: str, **stated) -> Dataset:
    """JPEG or JPEG 2000, of a header that may state another size."""
    from pydicom.encaps import encapsulate
    from pydicom.uid import JPEGBaseline8Bit

    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {"no_jp2": True}))
    ds = made(pixels, JPEGBaseline8Bit if kind == "JPEG" else JPEG2000Lossless, **stated)
    ds.PixelData = encapsulate([buffer.getvalue()])
    ds["PixelData"].is_undefined_length = True
    return ds


@pytest.mark.parametrize("kind", ["JPEG", "JPEG2000"])
def test_compressed_frames_are_of_the_size_that_the_header_states(tmp_path, kind):
    path, whole = tmp_path / "a.dcm", as_bytes(compressed(EIGHT, kind))
    path.write_bytes(whole)
    assert np.abs(grey(path) - EIGHT).max() <= (3 if kind == "JPEG" else 0)
    form, size, most = (">HH", (40, 30), 65535) if kind == "JPEG" else (">II", (30, 40), 60000)
    endless = whole.replace(struct.pack(form, *size), struct.pack(form, most, most))
    for content, got in ((as_bytes(compressed(EIGHT, kind, Rows=20)), ""), (endless, ".*ValueError")):
        path.write_bytes(content)
        with pytest.raises(EquicamError, match=f"pixels that can be decoded{got}"):
            read_frame(path, 0)


def test_odd_files_that_are_images(tmp_path):
    """Private elements, and a character set that does not exist, are no reason to refuse pixels."""
    ds = made(EIGHT, SpecificCharacterSet="NO SUCH SET")
    ds.private_block(0x0029, "VENDOR", create=True).add_new(1, "UN", b"\xff" * 900)
    (tmp_path / "a.dcm").write_bytes(as_bytes(ds))
    assert np.array_equal(grey(tmp_path / "a.dcm"), EIGHT)


def test_damage_anywhere_is_an_image_or_an_error(tmp_path):
    from random import Random

    from tests.hostile.generate import mutate

    random = Random(3)
    stack = np.stack([TWELVE[:8, :8]] * 2)
    whole = as_bytes(made(stack, **WINDOW | enhanced(2), VOILUTSequence=[table(range(300), 0, 8)]))
    for _ in range(300):
        (tmp_path / "a.dcm").write_bytes(mutate(whole, random))
        spoken = ""
        try:
            for item in find_items(tmp_path)[:3]:
                assert read_item(item).decode().image.mode == "RGB"
        except EquicamError as error:
            spoken = str(error)
        assert "Jane" not in spoken


def xrays(folder: Path) -> Path:
    folder.mkdir()
    smooth = np.asarray(Image.fromarray(TWELVE[::8, ::6].astype(np.float32)).resize((96, 96)))
    for i in range(3):
        values = np.rot90(smooth, i).astype(np.uint16)
        written(folder / f"{i}.dcm", values, **TWELVE_BITS | ({} if i else WINDOW))
    written(folder / "many.dcm", np.stack([TWELVE] * 2), **TWELVE_BITS)
    return folder


def test_an_audit_of_dicom_images(tmp_path):
    source, model = xrays(tmp_path / "xrays"), equicam.load("embedded")
    run = equicam.audit(source, model, tmp_path / "run", views=2)
    status = {row["id"]: row["status"] for row in run.items.to_pylist()}
    bad = ("1.dcm", "2.dcm", "many.dcm#frame=0", "many.dcm#frame=1")
    assert status == {"0.dcm": "ok"} | dict.fromkeys(bad, "bad")
    assert run.manifest.voi is None
    assert dict(run.manifest.versions)["pydicom"] == pydicom.__version__
    reasons = [row["reason_values"] or "" for row in run.items.to_pylist()]
    assert any("voi = [CENTER, WIDTH] in the recipe file" in one for one in reasons)
    with pytest.raises(EquicamError, match="voi"):
        equicam.audit(source, model, tmp_path / "run", views=2, voi=(2000.0, 3000.0))

    arguments = ["audit", str(source), "--out", str(tmp_path / "windowed"), "--views", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, *recipe("preprocessing.voi = [-50, 3000]")])
    assert result.exit_code == 0, result.output
    run = equicam.open_run(tmp_path / "windowed")
    assert run.manifest.voi == (-50.0, 3000.0)
    assert {row["status"] for row in run.items.to_pylist()} == {"ok"}
    run.triage(budget=5, control=0.0)
    assert len(run.causal(model=model).images) == 5
    found = run.verify(5, model=model)
    assert (found.ok, found.recomputed) == (True, 5), found.problems
    text = run.report().read_text()
    assert "can no longer be read" not in text
    assert "has changed since" not in text
    result = CliRunner().invoke(app, [*arguments, *recipe("preprocessing.voi = [40]")])
    assert result.exit_code == 2
    assert "try voi = [40, 400] in the recipe file" in " ".join(result.output.split())


def test_explain_and_evaluate(tmp_path):
    source, model = xrays(tmp_path / "xrays"), equicam.load("embedded")
    assert equicam.explain(model, source / "0.dcm", views=2).map.shape == (1, 96, 96)
    items = [replace(item, voi=(2000.0, 3000.0)) for item in find_items(source)]
    rows = equicam.evaluate(model, items, methods=["grad-cam"], scores=["eq"])
    assert {row["id"] for row in rows.to_pylist()} == {item.id for item in items}
    assert {row["reason"] for row in rows.to_pylist()} == {None, "no label"}


def test_the_window_of_explain(tmp_path):
    values = np.random.default_rng(0).integers(0, 4096, (128, 128)).astype(np.uint16)
    path = written(tmp_path / "ct.dcm", values)
    command = ["explain", str(path), "--out", str(tmp_path / "out"), "--views", "2"]
    without = CliRunner().invoke(app, command)
    assert without.exit_code == 1
    assert "try equicam audit or explain with voi = [CENTER, WIDTH] in the recipe file" in without.output
    assert CliRunner().invoke(app, [*command, *recipe("preprocessing.voi = [2000, 3000]")]).exit_code == 0


def real(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not there")
    return folder / name


@pytest.mark.real
def test_real_small_files():
    dx = read_frame(real(RASTERS, "dx_image.dcm"), 0)
    assert dx.std() > 20
    stored = pydicom.dcmread(RASTERS / "dx_image.dcm").pixel_array
    assert np.abs(dx[..., 0].astype(int) - (255 - stored.astype(int))).max() <= 1
    ct = real(RASTERS, "ct_image.dcm")
    with pytest.raises(EquicamError, match="a VOI window"):
        read_frame(ct, 0)
    values = pydicom.dcmread(ct).pixel_array
    assert np.array_equal(grey(ct, voi=(40.0, 400.0)), twin(values, 40, 400, intercept=-1024))
    with pytest.raises(EquicamError, match="whole slide"):
        read_frame(real(RASTERS, "sm_image.dcm"), 0)


@pytest.mark.real
@pytest.mark.parametrize("name", ["RG1_UNCR", "RG3_UNCR", "MR2_UNCR", "eCT_Supplemental", "vlut_04"])
def test_real_files_as_pydicom_shows_them(name):
    path = real(PYDICOM_DATA, f"{name}.dcm")
    ds = pydicom.dcmread(path)
    assert frames(path) == int(ds.get("NumberOfFrames", 1))
    found = read_frame(path, 0)
    assert found.std() > 20
    if "WindowCenter" in ds:
        window = (float(np.ravel(ds[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
        slope, intercept = float(ds.get("RescaleSlope", 1)), float(ds.get("RescaleIntercept", 0))
        expected = twin(ds.pixel_array[::40, ::40], *window, slope, intercept)
        inverted = ds.PhotometricInterpretation == "MONOCHROME1"
        assert np.array_equal(found[::40, ::40, 0].astype(int), 255 - expected if inverted else expected)


def test_pydicoms_own_files():
    """Those that its wheel has: every one an image or a reason."""
    from pydicom.data import get_testdata_file

    opened = 0
    for name in ("CT_small.dcm", "MR_small.dcm", "RG1_UNCR.dcm", "SC_rgb_small_odd.dcm", "JPEG2000.dcm", "rtplan.dcm", "examples_palette.dcm", "examples_ybr_color.dcm", "no_meta.dcm"):  # fmt: skip
        path = get_testdata_file(name, download=False)
        if path is None:
            continue
        with contextlib.suppress(EquicamError):
            opened += read_frame(Path(path), 0, (300.0, 2000.0)).std() > 1
    if not opened:
        pytest.skip("pydicom has no test files here")
