"""Verdicts from QuPath and QGIS: taken whole or refused whole, once, with their source, and never from another run."""

import gzip
import json
import subprocess
import sys
from uuid import UUID

import pytest

from equicam.errors import EquicamError
from equicam.images import limited
from equicam.rasters import geojson
from equicam.runs.log import Log
from equicam.runs.queue_files import feature_id
from equicam.runs.review import verdict_files
from equicam.runs.review.verdict_files import import_verdicts, write_verdicts
from equicam.runs.store import RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog
from equicam.shards import read_table
from tests.audit.conftest import equicam_answer, equicam_command
from tests.audit.faked import fake_run
from tests.web.conftest import Server, events, key_of, rank
from tests.web.conftest import queued as arms


def queued(run):
    return list(arms(run))


def qupath(run, name, given="Supports", **more):
    """A feature as QuPath writes it back."""
    properties = {"objectType": "tile", "isLocked": True, "measurements": {"stability": 0.25}}
    if given is not None:
        properties["classification"] = {"name": given, "color": [200, 0, 0]}
    polygon = {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 9], [0, 0]]]}
    identity = feature_id(run, name)
    return {"type": "Feature", "id": identity, "geometry": polygon, "properties": properties | more}


def collection(*features, **more):
    return {"type": "FeatureCollection", "features": list(features), **more}


def write(folder, content, name="verdicts.geojson"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def take(run, folder, *features, name="verdicts.geojson", reviewer="ana", replace=False, **more):
    path = write(folder, collection(*features, **more), name)
    return import_verdicts(run, path, reviewer=reviewer, replace=replace)


def log_of(run):
    log = ReviewLog(run.folder)
    log.refresh()
    return log


def standing(run, who="ana"):
    return {name: v.verdict for name, v in log_of(run).standing(who).items()}


def refused(run, path, match, **options):
    before = len(Log(run.folder).events())
    with pytest.raises(EquicamError, match=match) as caught:
        import_verdicts(run, path, reviewer="ana", **options)
    assert len(Log(run.folder).events()) == before
    return str(caught.value)


def test_ids_are_uuids_of_this_run_only(run, tmp_path):
    first, second = queued(run)[:2]
    one = feature_id(run, first)
    assert UUID(one).version == 5
    assert one == feature_id(RunStore(run.folder), first)
    assert one != feature_id(run, second)
    manifest = run.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    assert feature_id(RunStore(run.folder), first) != one
    assert UUID(feature_id(run, "half a letter \ud800"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_verdicts_of_qupath(run, tmp_path, packed, bare):
    names = queued(run)[:6]
    words = ["Supports", "SHORTCUT or artefact", "wrong region", "unsure", "second-reviewer", None]
    features = [qupath(run, *pair) for pair in zip(names, words, strict=True)]
    content = json.dumps(features if bare else collection(*features)).encode()
    path = write(tmp_path, gzip.compress(content) if packed else content, "verdicts.json")
    found = import_verdicts(run, path, reviewer="ana")
    assert found.sentence == "5 verdicts taken, 1 feature without one, 0 already there"
    assert standing(run) == dict(zip(names, VERDICTS, strict=False))
    given = [e.payload for e in events(run)]
    sources = {(one["source"]["file"], len(one["source"]["sha256"]), one["blind"]) for one in given}
    assert sources == {("verdicts.json", 64, False)}
    assert Log(run.folder).problems() == []


def test_verdicts_of_qgis(run, tmp_path):
    ids = [feature_id(run, name) for name in queued(run)[:4]]
    features = [
        {"id": ids[0], "properties": {"verdict": "Unsure", "reason": "pale"}},
        {"id": 7, "properties": {"id": ids[1].upper(), "verdict": "supports"}},
        {"properties": {"id": "{" + ids[2] + "}", "verdict": None}},
        {"properties": {"id": ids[3], "verdict": ""}},
    ]
    found = take(run, tmp_path, *({"type": "Feature"} | one for one in features))
    assert (found.taken, found.without, found.already) == (2, 2, 0)
    assert log_of(run).standing("ana")[queued(run)[0]].reason == "pale"


def test_an_object_that_was_copied_in_qupath_is_known_by_its_metadata(run, tmp_path):
    name = queued(run)[0]
    feature = qupath(run, name, "unsure", metadata={"equicam id": feature_id(run, name)})
    feature["id"] = "5e2fbeb5-0000-4000-8000-000000000000"
    metadata = '"metadata": {'
    twice = json.dumps(collection(feature)).replace(metadata, f'{metadata}"other": "x"}}, {metadata}')
    assert twice.count(metadata) == 2
    import_verdicts(run, write(tmp_path, twice.encode()), reviewer="ana")
    assert standing(run) == {name: "unsure"}


def test_the_predicted_class_that_an_export_wrote_is_no_verdict(run, tmp_path):
    table = read_table(run.folder / "triage.parquet")
    name, predicted = table["id"][0].as_py(), table["class"][0].as_py()
    rest = next(i for i in run.sample()["id"].to_pylist() if i not in queued(run))
    row = run.rows([rest])[rest]
    own_class = None if row["target"] is None else run.manifest.classes[row["target"]]
    features = [qupath(run, name, predicted)]
    features += [qupath(run, rest, one) for one in run.manifest.classes if one in (predicted, own_class)]
    own = {"type": "Feature", "id": "drawn by hand", "properties": {"classification": {"name": "Stroma"}}}
    found = take(run, tmp_path, *features, own)
    assert (found.taken, found.without) == (0, len(features) + 1)
    wrong = next(one for one in run.manifest.classes if one != predicted)
    refused(run, write(tmp_path, collection(qupath(run, name, wrong))), "which is none of")


def test_the_same_file_again_adds_nothing_even_after_a_change_on_the_page(run, tmp_path):
    first, second = queued(run)[:2]
    path = write(tmp_path, collection(qupath(run, first), qupath(run, second)))
    import_verdicts(run, path, reviewer="ana")
    assert import_verdicts(run, path, reviewer="ana").sentence.endswith("2 already there")
    client, key = Server(run).client("ana"), key_of(run, first)
    before = client.facts(key)["previous_event"]
    client.decide(key, "unsure", reason="looked again", previous_event=before)
    count = len(Log(run.folder).events())
    for replace in (False, True):
        assert import_verdicts(run, path, reviewer="ana", replace=replace).taken == 0
    assert len(Log(run.folder).events()) == count
    assert standing(run)[first] == "unsure"
    # another reviewer may give the same file
    assert import_verdicts(run, path, reviewer="bo").taken == 2


def test_an_earlier_verdict_is_replaced_only_on_request(run, tmp_path):
    first, second = queued(run)[:2]
    take(run, tmp_path, qupath(run, first))
    features = [qupath(run, first, "Wrong region"), qupath(run, second)]
    other = write(tmp_path, collection(*features), "other.geojson")
    refused(run, other, "supports would become wrong-region; try --replace")
    assert import_verdicts(run, other, reviewer="ana", replace=True).taken == 2
    log = log_of(run)
    assert [v.verdict for v in log.verdicts(first)] == ["supports", "wrong-region"]
    assert log.verdicts(first)[1].changes == log.verdicts(first)[0].number
    # the same verdict from another file changes nothing
    assert take(run, tmp_path, qupath(run, second, "SUPPORTS"), name="third.geojson").already == 1


def test_blind_exports_give_blind_verdicts_and_others_end_blinding(run, tmp_path):
    first, second, third = queued(run)[:3]
    each = qupath(run, first, metadata={"equicam blind": "true"})
    take(run, tmp_path, qupath(run, first), equicam={"blind": True})
    take(run, tmp_path, qupath(run, second), reviewer="bo")
    take(run, tmp_path, each, reviewer="cy")
    take(run, tmp_path, each, qupath(run, second), reviewer="di")
    for odd in ("yes", 1, None):
        take(run, tmp_path, qupath(run, first), equicam={"blind": odd}, reviewer=f"who {odd}")
    log = log_of(run)
    assert not log.standing("bo")[second].blind
    blind = {
        who: log.standing(who)[first].blind for who in ("ana", "cy", "di", "who yes", "who 1", "who None")
    }
    assert blind == dict.fromkeys(blind, False) | {"ana": True, "cy": True}
    # ana goes on under blinding; bo has seen the signals of all images
    for who, blind in (("ana", True), ("bo", False)):
        made = log.add_verdict(third, who, "unsure", blind=True, previous_event=0, mark=f"later-{who}")
        assert made.blind is blind


def test_an_imported_verdict_is_marked_on_the_page_and_in_the_export(run, tmp_path):
    name = queued(run)[0]
    take(run, tmp_path, qupath(run, name), name="<b>x.geojson")
    text = Server(run).client("ana").get(f"/item/{key_of(run, name)}").text
    assert "imported from &lt;b&gt;x.geojson" in text
    write_verdicts(run, tmp_path / "all.json")
    (row,) = json.loads((tmp_path / "all.json").read_text())["verdicts"]
    assert row["source"] == "<b>x.geojson"


def second(word="Unsure", **more):
    """The feature of another image than the first of the queue, which is given correctly."""
    return lambda run, _: qupath(run, queued(run)[1], word, **more)


def unknown(**more):
    return lambda *_: {"type": "Feature", "properties": {"verdict": "unsure"}} | more


def of_another_run(run, folder):
    other = rank(fake_run(folder / "other", count=13))
    return qupath(other, queued(other)[0])


def not_queued(run, folder):
    return qupath(run, next(i for i in run.sample()["id"].to_pylist() if i not in queued(run)))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (second("fine"), "feature 2 has the verdict 'fine', which is none of"),
        (unknown(id="x"), "no id of this run"),
        (unknown(), "no id of this run"),
        (of_another_run, "no id of this run"),
        (not_queued, "feature 2 is not in the queue"),
        (lambda run, _: qupath(run, queued(run)[0], "Unsure"), "unsure of an image of which another says supports"),
        (lambda run, _: second(metadata={"equicam id": feature_id(run, queued(run)[2])})(run, _), "the ids of two images"),
        (lambda run, _: second()(run, _) | {"properties": {"verdict": 5}}, "is no text"),
        (second(reason="x" * 2001), "at most 2,000 characters"),
        (second(reason=["x"]), "reason that is no text"),
        (second(verdict="supports"), "disagree"),
        (lambda *_: 5, "feature 2 is no GeoJSON feature"),
        (unknown(properties=[1]), "feature 2 is no GeoJSON feature"),
    ],
)  # fmt: skip
def test_a_file_with_anything_wrong_is_refused_whole(run, tmp_path, bad, match):
    path = write(tmp_path, collection(qupath(run, queued(run)[0]), bad(run, tmp_path)))
    refused(run, path, match)


def test_of_many_problems_the_first_five_are_named(run, tmp_path):
    features = [qupath(run, name, f"odd {i}") for i, name in enumerate(queued(run)[:8])]
    path = write(tmp_path, collection(*features))
    assert "odd 5" not in refused(run, path, r"odd 0.*odd 4.*and 3 more")


def test_nan_is_allowed_in_measurements_alone(run, tmp_path):
    name, nan = queued(run)[0], float("nan")
    take(run, tmp_path, qupath(run, name, measurements={"a": nan, "b": float("inf")}))
    take(run, tmp_path, qupath(run, name, measurements=[{"name": "a", "value": nan}]), reviewer="bo")
    for feature in (qupath(run, name, other=nan), qupath(run, name) | {"id": nan}):
        refused(run, write(tmp_path, collection(feature)), "NaN or infinity")


HOSTILE_FILES = (
    b"", b"{", b"\xff\xfe\x00", b"null", b"5", b'{"type": "FeatureCollection"}', b'{"features": {}}', b"[" * 100_000,
    b'{"a":' * 100_000, b"[" + b"9" * 10_000 + b"]", b"\x1f\x8b", gzip.compress(b"[]")[:-9],
    gzip.compress(b"[]")[:12] + b"\0" * 20,
)  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE_FILES, ids=range(len(HOSTILE_FILES)))
def test_hostile_files_are_refused(run, tmp_path, content):
    refused(run, write(tmp_path, content), "GeoJSON|FeatureCollection|feature 1")


def test_large_files_are_refused_packed_and_unpacked(run, tmp_path, monkeypatch):
    monkeypatch.setattr(limited, "inside", lambda: True)
    for module in (verdict_files, geojson):
        monkeypatch.setattr(module, "MAX_BYTES", 10_000)
    refused(run, write(tmp_path, b" " * 10_001), "at most 10,000 bytes")
    packed = gzip.compress(b" " * 10_000_000)[:10_000]
    refused(run, write(tmp_path, packed), "more than 10,000 bytes when unpacked")
    refused(run, tmp_path, "a folder")
    refused(run, tmp_path / "none.geojson", "No such file")


def test_hostile_text_in_messages_is_visible(run, tmp_path):
    path = write(tmp_path, collection(qupath(run, queued(run)[0], "\u202e\x1b[31m" + "x" * 500)))
    message = refused(run, path, "which is none of")
    assert not any(c in message for c in "\u202e\x1b")
    assert len(message) < 600


def test_an_empty_list_takes_nothing_and_a_run_needs_a_queue(run, tmp_path):
    path = write(tmp_path, [])
    assert import_verdicts(run, path, reviewer="ana").taken == 0
    (run.folder / "triage.parquet").unlink()
    refused(run, path, "equicam triage first")


def test_the_command(run, tmp_path):
    taking = ("--import", write(tmp_path, collection(qupath(run, queued(run)[0]))))
    status, said = equicam_command("review", run.folder, *taking, "--reviewer", "ana")
    assert (status, said.strip()) == (0, "1 verdict taken, 0 features without one, 0 already there")
    again = equicam_answer("review", run.folder, *taking, "--reviewer", "ana")
    assert again["imported"] == {"taken": 0, "without": 0, "already": 1}
    for options, message in (
        (taking, "one --reviewer and no --export, got 0 reviewers"),
        ((*taking, "--reviewer", "a", "--reviewer", "b"), "got 2 reviewers"),
        ((*taking, "--reviewer", "a", "--export", "x.csv"), "and --export"),
        (("--replace",), "--replace needs --import"),
    ):
        status, said = equicam_command("review", run.folder, *options)
        assert (status != 0, message in " ".join(said.split())) == (True, True)


def test_importing_needs_no_torch_and_no_web_server():
    without = "import sys; sys.modules['torch'] = sys.modules['fastapi'] = None"
    code = f"{without}; import equicam.runs.review.verdict_files"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
