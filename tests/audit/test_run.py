"""A run is killed, refused, starved and lied to; nothing is lost and nothing is silent."""

import os
import pickle
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import equicam
from equicam.audit import compute
from equicam.audit import verify as verifying
from equicam.errors import EquicamError
from equicam.images import decoding
from equicam.images.files import file_digest
from equicam.images.items import open_image
from equicam.images.sources import find_items
from equicam.models.images import preprocess_image, visible_box
from equicam.reasons import Reason, describe
from equicam.runs.log import Log, complete, log_shard
from equicam.runs.store import MAPS, RunStore, StoredMaps
from equicam.shards import write_table
from tests.audit.conftest import ENV, OPTIONS, PATCHES, equicam_process, run_command
from tests.conftest import recipe


@pytest.fixture
def source(patches, tmp_path):
    """A copy of the patches, for a test that changes them."""
    return shutil.copytree(patches, tmp_path / "source")


@pytest.fixture
def model():
    return equicam.load("embedded")


def rows(folder: Path) -> list[dict]:
    """What a run says, without how long it took."""
    return RunStore(folder).read_items().drop_columns("seconds").to_pylist()


def same(one: Path, other: Path) -> bool:
    return rows(one) == rows(other) and drawn(one) == drawn(other)


def change_rows(path: Path, change) -> list[dict]:
    """The rows of a file as they are after a change of each; the file has them too."""
    changed = [row | change(i, row) for i, row in enumerate(pq.read_table(path).to_pylist())]
    pq.write_table(pa.Table.from_pylist(changed, schema=pq.read_schema(path)), path)
    return changed


def why(row: dict) -> str:
    return describe(Reason.from_row({"code": row["reason"], "values": row["reason_values"]}))


def drawn(folder: Path) -> dict[str, bytes]:
    maps = RunStore(folder).maps([r["id"] for r in rows(folder)])
    return {name: b"".join(a.tobytes() for a in (d.map, d.peum, d.view_maps)) for name, d in maps.items()}


def killed_and_resumed(patches, out, kills, seed):
    chance = random.Random(seed)
    for _ in range(kills):
        process = equicam_process("audit", patches, "--out", out, *OPTIONS)
        goal = chance.randrange(6)  # after how many parts of this go
        before = len(list(out.glob("items/*.parquet")))
        while process.poll() is None and len(list(out.glob("items/*.parquet"))) < min(before + goal, 6):
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()
        if out.is_dir():
            with RunStore(out).writing():  # nothing that is left of it holds the lock
                pass
    run_command("audit", patches, "--out", out, *OPTIONS)


@pytest.mark.parametrize(
    ("seeds", "kills"), [([1], 2), pytest.param(range(25), 4, marks=pytest.mark.slow)], ids=["twice", "often"]
)
def test_killed_it_ends_as_if_never_disturbed(patches, whole, tmp_path, seeds, kills):
    for seed in seeds:
        out = tmp_path / f"run{seed}"
        killed_and_resumed(patches, out, kills=kills, seed=seed)
        assert same(out, whole)
        assert not list(out.rglob("*.tmp"))


def test_rows_are_what_explain_and_evaluate_say(patches, whole, model):
    found, items = {row["id"]: row for row in rows(whole)}, find_items(patches)
    e = equicam.explain(model, [item.path for item in items], views=6)
    assert (
        [found[i.id]["target"] for i in items] == [found[i.id]["top5"][0] for i in items] == e.target.tolist()
    )
    assert [found[i.id]["peum_score"] for i in items] == pytest.approx(e.peum_score.tolist(), rel=1e-4)
    assert [found[i.id]["confidence"] for i in items] == pytest.approx(e.confidence.tolist(), abs=1e-5)
    maps = RunStore(whole).maps([i.id for i in items])
    for item, layer_map, view_maps in zip(items, e.layer_map.numpy(), e.view_maps.numpy(), strict=True):
        assert np.corrcoef(maps[item.id].map.ravel(), layer_map.ravel())[0, 1] > 0.9999
        assert maps[item.id].view_maps == pytest.approx(view_maps, abs=2e-3 * float(view_maps.max()))
    calibrated = [item for item in items if found[item.id]["eq"] is not None]
    assert len(calibrated) == 6
    table = equicam.evaluate(model, calibrated, methods=["grad-cam"]).to_pylist()
    eq = {r["id"]: r["value"] for r in table if (r["score"], r["region"], r["angle"]) == ("eq", "disc", None)}
    assert {i.id: found[i.id]["eq"] for i in calibrated} == pytest.approx(eq, abs=1e-4)


def test_the_frame_is_what_the_model_saw(tmp_path):
    from torchvision.transforms import v2

    half = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    numbers = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(**half)]
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
    for steps, size, expected in (
        ([v2.Resize(64), v2.CenterCrop(48)], (300, 200), (75.0, 25.0, 225.0, 175.0)),
        ([v2.Resize((48, 48))], (300, 200), (0.0, 0.0, 300.0, 200.0)),
        ([v2.CenterCrop(48)], (100, 80), (26.0, 16.0, 74.0, 64.0)),
    ):
        model = equicam.wrap(net, layer="0", preprocess=v2.Compose([*steps, *numbers]), **half)
        assert visible_box(model, size) == pytest.approx(expected, abs=2.5)


def test_ctrl_c_finishes_the_part_and_says_how_to_go_on(patches, whole, tmp_path):
    out = tmp_path / "run"
    process = equicam_process("audit", patches, "--out", out, *OPTIONS)
    while not list(out.glob("items/*.parquet")):
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes" in said
    assert "Traceback" not in said
    assert 0 < len(rows(out)) < PATCHES
    run_command("audit", patches, "--out", out, *OPTIONS)
    assert rows(out) == rows(whole)
    kinds = [e.kind for e in Log(out).events()]
    assert [kind for kind in kinds if kind != "shard"] == ["started", "resumed", "completed"]


def test_a_second_process_and_a_folder_of_other_files_are_refused(patches, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert "other files" in run_command("audit", patches, "--out", tmp_path, *OPTIONS, code=2)
    with (run := RunStore(tmp_path / "run")).writing():
        said = run_command("audit", patches, "--out", run.folder, *OPTIONS, code=2)
    assert f"process {os.getpid()} writing it" in said


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (14500, 14500))
from equicam.cli.app import app
app()
"""


def test_a_full_disk_is_said_and_loses_nothing(patches, whole, tmp_path):
    """No file may grow past 14.5 kB: the system refuses the write of the first part's maps."""
    arguments = ["audit", str(patches), "--out", str(out := tmp_path / "run"), *OPTIONS]
    command = [sys.executable, "-c", FULL_DISK, *arguments]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(out.rglob("*.tmp"))
    run_command(*arguments)
    assert rows(out) == rows(whole)


def test_what_changed_is_named_and_not_resumed(patches, source, model, tmp_path):
    options = {"views": 4, "shard_size": 8}
    run = equicam.audit(source, model, tmp_path / "run", **options)
    run.store.path("items", 1).unlink()  # something is left to do

    def refused(match, model=model, **more):
        with pytest.raises(EquicamError, match=match):
            equicam.audit(source, model, run.folder, **options | more)

    refused(r"views was .* is ", views=6)
    refused("seed was 0, is 1", recipe=equicam.Recipe(seed=1))
    refused('fill was "reflect", is "zeros"', recipe=equicam.Recipe(fill="zeros"))
    Image.new("RGB", (96, 96), "red").save(source / "00.png")
    refused(r"'00.png' changed since it was explained")
    shutil.copy2(patches / "00.png", source / "00.png")
    (source / "new.png").write_bytes((source / "01.png").read_bytes())
    refused(r"1 new \('new.png'\)")
    (source / "new.png").rename(source / "01.png")
    os.utime(source / "01.png", ns=(0, 0))  # another time, the same bytes
    (source / "23.png").rename(source / "away")
    refused(r"1 gone \('23.png'\)")
    (source / "away").rename(source / "23.png")
    os.utime(source / "02.png")  # touched, but the same
    other = replace(model, module=equicam.load("embedded").module)
    with torch.no_grad():
        next(other.module.parameters()).mul_(1.01)
    refused("weights was", model=other)
    equicam.audit(source, model, run.folder, **options)
    assert not run.store.pending()


def hostile(folder: Path) -> dict[str, str]:
    """Files an auditor's folder may hold, and what becomes of them."""
    good = Image.open(folder / "good.png")
    png = (folder / "good.png").read_bytes()
    expected = {"good.png": "ok"}

    def put(name: str | bytes, data: bytes, status: str) -> None:
        Path(os.fsdecode(os.fsencode(folder) + b"/" + os.fsencode(name))).write_bytes(data)
        expected[name if isinstance(name, str) else name.decode(errors="surrogateescape")] = status

    put("truncated.png", png[: len(png) // 2], "bad")
    put("empty.png", b"", "bad")
    put("really-a-png.jpg", png, "ok")
    put("text.png", b"hello, I am an image", "bad")
    put("script.svg.png", b"<svg onload='alert(1)'></svg>", "bad")
    header = png[:16] + (100_000).to_bytes(4, "big") * 2 + png[24:]
    put("huge.png", header, "bad")
    frames = [good, good.rotate(90)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    good.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.asarray(good.convert("L")).astype(np.uint16) * 257).save(folder / "deep.png")
    expected |= {"animated.gif": "ok", "cmyk.jpg": "ok", "deep.png": "ok"}
    for name in ("new\nline", "quote'\"", "<script>alert(1)<script>", "emoji-🔬", "rtl-\u202egnp", "x" * 246):
        put(f"{name}.png", png, "ok")
    put(b"\xff\xfe-bytes.png", png, "ok")
    return expected


def test_every_hostile_file_is_a_row_and_nothing_escapes(patches, tmp_path):
    source, out = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    shutil.copy(patches / "00.png", source / "good.png")
    expected = hostile(source)
    options = ("--views", "4", *recipe("run.shard_size = 5", "run.calibrate = 10"))
    run_command("audit", source, "--out", out, *options)
    found = RunStore(out).read_items().to_pylist()
    assert sorted(row["status"] for row in found) == sorted(expected.values())
    for row in found:
        assert row["reason"] if row["status"] == "bad" else row["peum_score"] >= 0
        row["id"].encode()  # ids are text that any tool can read
    for command in ("triage --budget 5", "causal", "report", "verify --sample 4"):
        run_command(*command.split(), out)
    page = (out / "report.html").read_text()
    assert "<script" not in page
    assert "onload" not in page


def test_an_image_that_kills_its_process_is_a_row_with_a_reason(patches, model, tmp_path, monkeypatch):
    real, deadly = decoding.read_item, ("05.png", "06.png")
    monkeypatch.setattr(decoding, "read_item", lambda i: os._exit(9) if i.id in deadly else real(i))
    run = equicam.audit(patches, model, tmp_path / "run", views=4, shard_size=8)
    bad = {row["id"]: why(row) for row in run.items.to_pylist() if row["status"] == "bad"}
    assert tuple(bad) == deadly
    assert "killed the process" in bad["05.png"]
    assert len(run.items) == PATCHES


def test_a_malicious_pickle_as_weights_does_not_run(patches, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"state_dict": Evil()}))
    options = ("--out", tmp_path / "run", "--model", "resnet18", "--weights", tmp_path / "evil.pt")
    assert "loads without running code" in run_command("audit", patches, *options, code=2)
    assert not (tmp_path / "ran").exists()


def log_and_complete_again(out):
    """What somebody with write access can do: give every file its digest in the log, and complete the run again."""
    store, log = RunStore(out), Log(out)
    for number in range(store.shard_count):
        log_shard(log, number, {kind: file_digest(store.path(kind, number)) for kind in ("items", "maps")})
    complete(store, log)


def test_verify_names_what_was_tampered_with(patches, out, tmp_path):
    said = run_command("verify", out, "--sample", "3")
    assert "3 recomputed images" in said
    assert "no differences" in said
    forged, changed = shutil.copytree(out, tmp_path / "forged"), RunStore(out).path("items", 2)
    table = change_rows(changed, lambda i, _row: {"peum_score": 0.0} if i == 1 else {})
    shutil.copy(changed, RunStore(forged).path("items", 2))
    database = sqlite3.connect(out / "events.sqlite")
    database.executescript("DROP TRIGGER no_change; UPDATE events SET payload = '{}' WHERE number = 1")
    database.close()
    said = run_command("verify", out, "--sample", "24", code=1)
    for words in (
        "shard-000002.parquet is not as it was written",
        "event 1 was changed",
        "0 recomputed images",
    ):
        assert words in said
    log_and_complete_again(forged)
    said = run_command("verify", forged, "--sample", "24", code=1)
    assert f"{table[1]['id']!r}: peum_score 0.00000, now" in said
    assert "1 difference" in said


def test_verify_sees_a_changed_image_and_an_unfinished_run(source, model, tmp_path):
    run = equicam.audit(source, model, tmp_path / "run", views=4, shard_size=8)
    Image.new("RGB", (96, 96), "red").save(source / "03.png")
    problems = run.verify(4, seed=5, model=model).problems
    assert problems == ("'03.png': the image is not the one that was explained",)
    run.store.path("items", 0).unlink()
    _, problems = verifying.check_files(run.store)
    assert problems[0] == "the run is not finished: 1 of 3 shards are missing; equicam audit goes on"
    assert problems[1] == "items/shard-000000.parquet cannot be read: No such file or directory"


def test_an_image_on_resnet50_takes_less_than_ten_kilobytes(whole, tmp_path):
    """Rows and maps of 32 images with a 7×7 grid, 18 views and 1,000 classes, random so that they do not compress."""
    rng, items = np.random.default_rng(0), RunStore(whole).read_items()
    many, grids = [], []
    for i in range(32):
        row = {k: rng.random(18).astype(np.float32).tolist() for k in ("view_confidence", "view_agreement")}
        row |= {"id": f"folder/ILSVRC2012_val_{i:08d}.JPEG", "sha256": rng.bytes(32).hex()}
        row |= {"view_top1": rng.integers(0, 1000, 18).tolist(), "peum_score": rng.random()}
        many.append(items.slice(0, 1).to_pylist()[0] | row)
        arrays = [rng.random(shape, dtype=np.float32) for shape in ((7, 7), (7, 7), (18, 7, 7))]
        grids.append(StoredMaps(*arrays).to_row(row["id"]))
    write_table(tmp_path / "items.parquet", pa.Table.from_pylist(many, schema=items.schema))
    write_table(tmp_path / "maps.parquet", pa.Table.from_pylist(grids, schema=MAPS))
    assert sum(p.stat().st_size for p in tmp_path.glob("*.parquet")) / 32 < 10_000


@pytest.mark.slow
def test_two_thousand_images_leave_memory_flat(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    rng = np.random.default_rng(0)
    for i in range(2000):
        image = Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).resize((96, 96))
        image.save(source / f"{i:04d}.png")
    process = equicam_process("audit", source, "--out", tmp_path / "run", "--views", "2")
    sizes = {}
    while process.poll() is None:
        done = len(list((tmp_path / "run").glob("items/*.parquet")))
        with suppress(OSError, StopIteration):
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            sizes[done] = int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024
        time.sleep(0.2)
    assert process.returncode == 0
    last = max(sizes)  # then all shards are written, and the run is summarised
    early = max(v for k, v in sizes.items() if 5 <= k <= 20)
    late = max(v for k, v in sizes.items() if 50 < k < last)
    assert late < early + 60, sizes
    assert sizes[last] < early + 200, sizes


@pytest.mark.parametrize("lost", ["parts", "all before the manifest", "the last event"])
def test_what_is_lost_is_computed_again_and_the_run_completed_again(patches, out, whole, lost):
    if lost == "parts":
        RunStore(out).path("maps", 3).unlink()
        RunStore(out).path("items", 1).unlink()
    elif lost == "all before the manifest":
        for name in ("manifest.json", "digests.json", "events.sqlite"):
            (out / name).unlink()
        for part in [*out.glob("items/*"), *out.glob("maps/*")]:
            part.unlink()
        (out / ".manifest.json.x.tmp").write_text("half")
    else:
        events = Log(out).events()
        (out / "events.sqlite").unlink()
        for event in events[:-1]:
            Log(out).add(event.kind, event.payload)
    run_command("audit", patches, "--out", out, *OPTIONS)
    assert same(out, whole)
    assert verifying.check_files(RunStore(out))[1] == []
    assert [e.kind for e in Log(out).events()].count("completed") == (2 if lost == "parts" else 1)


def test_verify_checks_the_queue_the_eq_and_a_noted_hash(patches, out):
    run_command("triage", out, "--budget", "8")
    run_command("causal", out)
    run_command("verify", out, "--sample", "24", "--hash", Log(out).last())
    queue = (out / "queue.csv").read_bytes()
    (out / "queue.csv").write_bytes(queue + b"more\n")
    parts = (RunStore(out).path("items", number) for number in range(6))
    part = next(part for part in parts if pq.read_table(part)["eq"].null_count < 4)
    table = change_rows(part, lambda _i, row: {} if row["eq"] is None else {"eq": 0.99})
    said = run_command("verify", out, "--sample", "24", "--hash", "f" * 64, code=1)
    assert "queue.csv is not as it was written" in said
    assert "ffffffffffff… is not there" in said
    log_and_complete_again(out)
    (out / "queue.csv").write_bytes(queue)
    said = run_command("verify", out, "--sample", "24", code=1)
    first = next(row["id"] for row in table if row["eq"] is not None)
    assert f"{first!r}: eq 0.99000, now" in said


def test_gated_runs_and_random_weights_verify(patches, tmp_path):
    for name, more in (
        ("gated", ("--method", "equigrad-cam+pcf", *recipe("recipe.tau = 0.9"))),
        ("random", ("--weights", "random")),
    ):
        run_command("audit", patches, "--out", tmp_path / name, "--views", "4", "--n", "8", *more)
        run_command("verify", tmp_path / name, "--sample", "6")


def test_a_report_is_of_the_queue_that_was_written(patches, out):
    assert "try equicam triage first" in run_command("report", out, code=2)
    for kind in ("items", "maps"):
        RunStore(out).path(kind, 5).unlink()
    assert "20 of 24 images so far" in run_command("triage", out, "--budget", "6")
    run_command("audit", patches, "--out", out, *OPTIONS)
    assert "try equicam triage again" in run_command("report", out, code=2)
    (out / "triage.json").unlink()  # it is the last that a triage writes
    said = run_command("report", out, code=2)
    assert "needs a queue to report, got none; try equicam triage first" in said


def test_everything_is_found_from_another_folder_and_after_a_move(patches, tmp_path, monkeypatch):
    home, another = tmp_path / "home", tmp_path / "another"
    for folder in (home / "pics", another):
        folder.mkdir(parents=True)
    for path in sorted(patches.iterdir())[:8]:
        shutil.copy(path, home / "pics")
    monkeypatch.chdir(home)
    run_command("audit", "pics/*.png", "--out", "run", "--views", "4")
    monkeypatch.chdir(another)
    run_command("triage", run := home / "run", "--budget", "4")
    run_command("causal", run)
    (home / "pics").rename(home / "moved")
    run_command("verify", run, "--sample", "3", "--source", f"{home}/moved/*.png")
    run_command("report", run, "--source", f"{home}/moved/*.png")
    assert "no longer where it was" not in (run / "report.html").read_text()


def test_a_run_without_a_good_image_and_one_of_one_view_say_so(patches, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no")
    run_command("audit", tmp_path / "a.png", "--out", tmp_path / "bad", "--views", "4", code=1)
    said = run_command("triage", tmp_path / "bad")
    assert "nothing to rank" in said
    assert "next:" not in said
    said = run_command("audit", patches, "--out", tmp_path / "one", "--views", "1", "--n", "2")
    assert "cannot be ranked" in said
    assert "equicam triage" not in said
    assert "one view, which has no stability" in run_command("triage", tmp_path / "one", code=2)


def test_an_image_the_model_cannot_answer_is_a_row(patches, model, tmp_path):
    first = preprocess_image(model, open_image(patches / "00.png"))[0, 0, 0]

    def spoil(_module, inputs, output):
        return output.masked_fill((inputs[0][:, 0, 0, 0] == first)[:, None], torch.nan)

    model.module.register_forward_hook(spoil)
    run = equicam.audit(patches, model, tmp_path / "run", views=4, shard_size=8)
    bad = [row for row in run.items.to_pylist() if row["status"] == "bad"]
    assert "00.png" in [row["id"] for row in bad]
    assert all(row["reason"] == "refused" and "finite class logits" in why(row) for row in bad)
    assert len(bad) < PATCHES / 2


def test_a_command_that_was_refused_leaves_nothing_in_the_way_of_the_next(patches, tmp_path):
    for no_run in ("triage", "report", "verify"):
        said = run_command(no_run, tmp_path, code=2)
        assert "no manifest.json in it; try equicam audit first" in said
    command = ("audit", patches, "--out", tmp_path / "run", "--views")
    run_command(*command, "2", "--method", "rollout", code=2)
    run_command(*command, "2")
    assert "the settings it was started with" in run_command(*command, "3", code=2)


def test_a_triage_that_is_refused_changes_nothing(out, tmp_path):
    run_command("triage", out, "--budget", "6")
    before = {p.name: p.read_bytes() for p in out.glob("*.*") if p.suffix != ".sqlite"}
    for wrong in (("--source", tmp_path / "nowhere"), ("--unstable", "5"), ("--by", "size")):
        run_command("triage", out, "--budget", "9", *wrong, code=2)
    assert {p.name: p.read_bytes() for p in out.glob("*.*") if p.suffix != ".sqlite"} == before
    run_command("verify", out, "--sample", "0")


def test_a_part_is_heard_of_before_the_next_and_written_by_whatever_way_it_ends(
    patches, model, tmp_path, monkeypatch
):
    """Ctrl-C is asked about after every part: the first must not wait for the second."""
    begun, honest, options = [], compute.start_shard, {"views": 2, "shard_size": 4}

    def start(plans, found):
        if len(begun) == 3:
            raise EquicamError("a test", "to fail", "that", "nothing")
        begun.append(found)
        return honest(plans, found)

    def stop(done, _all, _now):
        assert len(begun) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(compute, "start_shard", start)
    with pytest.raises(KeyboardInterrupt):
        equicam.audit(patches, model, out := tmp_path / "run", **options, progress=stop)
    assert len(RunStore(out).read_items()) == 4
    with pytest.raises(EquicamError, match="a test"):
        equicam.audit(patches, model, out, **options)
    assert len(RunStore(out).read_items()) == 12


def refuses(error: Exception):
    """A function that only raises."""

    def refuse(*_args, **_options):
        raise error

    return refuse


def test_a_part_that_cannot_be_written_is_said(patches, model, tmp_path, monkeypatch):
    monkeypatch.setattr(RunStore, "write_shard", refuses(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        equicam.audit(patches, model, tmp_path / "run", views=2, n=4)


def test_an_archived_run_that_cannot_log_verifies_with_a_note(whole, monkeypatch):
    monkeypatch.setattr(Log, "add", refuses(OSError("attempt to write a readonly database")))
    found = equicam.open_run(whole).verify(0)
    assert (found.ok, found.problems) == (True, ())
    assert found.log_error == "attempt to write a readonly database"
    output = run_command("verify", whole, "--sample", "0")
    assert "0 recomputed images: no differences" in output
    assert "note: this result is not in the log, which could not be written: attempt to write" in output


def test_nothing_recomputed_agrees_with_nothing(out, source):
    for path in source.iterdir():
        Image.new("RGB", (96, 96), "red").save(path)
    output = run_command("verify", out, "--sample", "2", "--source", source, code=1)
    assert "0 recomputed images: 2 differences" in output


def test_a_report_refuses_a_queue_whose_reasons_or_values_changed(out):
    run = equicam.open_run(out)
    run.triage(6)
    written = pq.read_table(out / "triage.parquet")
    # the run's key decides the order; a control has no reasons in a report
    queued = written["arm"].index("queue").as_py()
    for column in ("confidence", "reasons"):
        cells = written[column].to_pylist()
        cells[queued] = next(cell for cell in cells if cell != cells[queued])
        changed = pa.array(cells, written.schema.field(column).type)
        table = written.set_column(written.column_names.index(column), written.schema.field(column), changed)
        pq.write_table(table, out / "triage.parquet")
        with pytest.raises(EquicamError, match="try equicam triage again"):
            run.report()
    pq.write_table(written, out / "triage.parquet")
    run.report()
