"""Verdicts from QuPath and QGIS: taken whole or refused whole, once, with their source, and never from another run."""

import gzip
import json
import subprocess
import sys
from uuid import UUID

import pytest

from equicam.errors import EquicamError
from equicam.rasters import geojson
from equicam.runs.feature_ids import feature_id
from equicam.runs.log import Log
from equicam.runs.review import verdict_import
from equicam.runs.review.verdict_files import write_verdicts
from equicam.runs.review.verdict_import import import_verdicts
from equicam.runs.store import RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog
from equicam.shards import read_table
from tests.audit.conftest import equicam_answer, equicam_command
from tests.audit.faked import fake_run
from tests.web.conftest import Server, key_of, rank


def queued(run):
    return read_table(run.folder / "triage.parquet")["id"].to_pylist()


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


def standing(run, who="ana"):
    log = ReviewLog(run.folder)
    log.refresh()
    return {name: v.verdict for name, v in log.standing(who).items()}


def refused(run, path, match, **options):
    before = len(Log(run.folder).events())
    with pytest.raises(EquicamError, match=match):
        import_verdicts(run, path, reviewer="ana", **options)
    assert len(Log(run.folder).events()) == before


def test_ids_are_uuids_of_this_run_only(run, tmp_path):
    first, second = queued(run)[:2]
    one = feature_id(run, first)
    assert UUID(one).version == 5
    assert one == feature_id(RunStore(run.folder), first)
    assert one != feature_id(run, second)
    text = (run.folder / "manifest.json").read_text()
    (run.folder / "manifest.json").write_text(text + " ")
    assert feature_id(RunStore(run.folder), first) != one
    assert UUID(feature_id(run, "half a letter \ud800"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_verdicts_of_qupath(run, tmp_path, packed, bare):
    names = queued(run)[:6]
    words = ["Supports", "SHORTCUT or artefact", "wrong region", "unsure", "second-reviewer"]
    features = [qupath(run, n, w) for n, w in zip(names, words, strict=False)] + [qupath(run, names[5], None)]
    content = json.dumps(features if bare else collection(*features)).encode()
    path = write(tmp_path, gzip.compress(content) if packed else content, "verdicts.json")
    found = import_verdicts(run, path, reviewer="ana")
    assert found.sentence == "5 verdicts taken, 1 feature without one, 0 already there"
    assert standing(run) == dict(zip(names, VERDICTS, strict=False))
    events = Log(run.folder).events("verdict")
    assert {e.payload["source"]["file"] for e in events} == {"verdicts.json"}
    assert all(len(e.payload["source"]["sha256"]) == 64 for e in events)
    assert not any(e.payload["blind"] for e in events)
    assert Log(run.folder).problems() == []


def test_verdicts_of_qgis(run, tmp_path):
    first, second, third, fourth = queued(run)[:4]
    features = [
        {
            "type": "Feature",
            "id": feature_id(run, first),
            "properties": {"verdict": "Unsure", "reason": "pale"},
        },
        {
            "type": "Feature",
            "id": 7,
            "properties": {"id": feature_id(run, second).upper(), "verdict": "supports"},
        },
        {"type": "Feature", "properties": {"id": "{" + feature_id(run, third) + "}", "verdict": None}},
        {"type": "Feature", "properties": {"id": feature_id(run, fourth), "verdict": ""}},
    ]
    found = import_verdicts(run, write(tmp_path, collection(*features)), reviewer="ana")
    assert (found.taken, found.without, found.already) == (2, 2, 0)
    log = ReviewLog(run.folder)
    log.refresh()
    assert log.standing("ana")[first].reason == "pale"


def test_an_object_that_was_copied_in_qupath_is_known_by_its_metadata(run, tmp_path):
    name = queued(run)[0]
    feature = qupath(run, name, "unsure", metadata={"equicam id": feature_id(run, name)})
    feature["id"] = "5e2fbeb5-0000-4000-8000-000000000000"
    twice = json.dumps(collection(feature)).replace(
        '"metadata": {', '"metadata": {"other": "x"}, "metadata": {'
    )
    assert twice.count('"metadata"') == 2
    import_verdicts(run, write(tmp_path, twice.encode()), reviewer="ana")
    assert standing(run) == {name: "unsure"}


def test_the_predicted_class_that_an_export_wrote_is_no_verdict(run, tmp_path):
    table = read_table(run.folder / "triage.parquet")
    name, predicted = table["id"][0].as_py(), table["class"][0].as_py()
    rest = next(i for i in run.sample()["id"].to_pylist() if i not in queued(run))
    features = [qupath(run, name, predicted)]
    features += [qupath(run, rest, words) for words in ("tumour", "normal <i>tissue</i>")]
    features = [
        f for f in features if f["properties"]["classification"]["name"] in (predicted, class_of(run, rest))
    ]
    own = {"type": "Feature", "id": "drawn by hand", "properties": {"classification": {"name": "Stroma"}}}
    found = import_verdicts(run, write(tmp_path, collection(*features, own)), reviewer="ana")
    assert (found.taken, found.without) == (0, len(features) + 1)
    wrong = next(c for c in ("tumour", "normal <i>tissue</i>") if c != predicted)
    refused(run, write(tmp_path, collection(qupath(run, name, wrong))), "which is none of")


def class_of(run, name):
    row = run.rows([name])[name]
    return None if row["target"] is None else run.manifest.classes[row["target"]]


def test_the_same_file_again_adds_nothing_even_after_a_change_on_the_page(run, tmp_path):
    first, second = queued(run)[:2]
    path = write(tmp_path, collection(qupath(run, first), qupath(run, second)))
    import_verdicts(run, path, reviewer="ana")
    assert import_verdicts(run, path, reviewer="ana").sentence.endswith("2 already there")
    client = Server(run).client("ana")
    before = client.get(f"/api/item/{key_of(run, first)}").json()["previous_event"]
    client.decide(key_of(run, first), "unsure", reason="looked again", previous_event=before)
    events = len(Log(run.folder).events())
    for replace in (False, True):
        assert import_verdicts(run, path, reviewer="ana", replace=replace).taken == 0
    assert len(Log(run.folder).events()) == events
    assert standing(run)[first] == "unsure"
    # another reviewer may give the same file
    assert import_verdicts(run, path, reviewer="bo").taken == 2


def test_an_earlier_verdict_is_replaced_only_on_request(run, tmp_path):
    first, second = queued(run)[:2]
    import_verdicts(run, write(tmp_path, collection(qupath(run, first))), reviewer="ana")
    other = write(
        tmp_path, collection(qupath(run, first, "Wrong region"), qupath(run, second)), "other.geojson"
    )
    refused(run, other, "supports would become wrong-region; try --replace")
    assert import_verdicts(run, other, reviewer="ana", replace=True).taken == 2
    log = ReviewLog(run.folder)
    log.refresh()
    assert [v.verdict for v in log.verdicts(first)] == ["supports", "wrong-region"]
    assert log.verdicts(first)[1].changes == log.verdicts(first)[0].number
    # the same verdict from another file changes nothing
    third = write(tmp_path, collection(qupath(run, second, "SUPPORTS")), "third.geojson")
    assert import_verdicts(run, third, reviewer="ana").already == 1


def test_blind_exports_give_blind_verdicts_and_others_end_blinding(run, tmp_path):
    first, second, third = queued(run)[:3]
    path = write(tmp_path, collection(qupath(run, first), equicam={"blind": True}))
    import_verdicts(run, path, reviewer="ana")
    import_verdicts(run, write(tmp_path, collection(qupath(run, second)), "open.geojson"), reviewer="bo")
    log = ReviewLog(run.folder)
    log.refresh()
    assert log.standing("ana")[first].blind
    assert not log.standing("bo")[second].blind
    each = qupath(run, first, metadata={"equicam blind": "true"})
    import_verdicts(run, write(tmp_path, [each], "each.geojson"), reviewer="cy")
    import_verdicts(run, write(tmp_path, [each, qupath(run, second)], "some.geojson"), reviewer="di")
    log.refresh()
    assert log.standing("cy")[first].blind
    assert not log.standing("di")[first].blind
    # ana goes on under blinding; bo has seen the signals of all images
    for who, blind in (("ana", True), ("bo", False)):
        made = log.add_verdict(third, who, "unsure", blind=True, previous_event=0, mark=f"later-{who}")
        assert made.blind is blind
    for odd in ("yes", 1, None):
        path = write(tmp_path, collection(qupath(run, first), equicam={"blind": odd}), f"{odd}.geojson")
        import_verdicts(run, path, reviewer=f"who {odd}")
        log.refresh()
        assert not log.standing(f"who {odd}")[first].blind


def test_an_imported_verdict_is_marked_on_the_page_and_in_the_export(run, tmp_path):
    name = queued(run)[0]
    import_verdicts(run, write(tmp_path, collection(qupath(run, name)), "<b>x.geojson"), reviewer="ana")
    text = Server(run).client("ana").get(f"/item/{key_of(run, name)}").text
    assert "imported from &lt;b&gt;x.geojson" in text
    write_verdicts(run, tmp_path / "all.json")
    (row,) = json.loads((tmp_path / "all.json").read_text())["verdicts"]
    assert row["source"] == "<b>x.geojson"


def other_run_feature(run, folder):
    other = rank(fake_run(folder / "other", count=13))
    return qupath(other, queued(other)[0])


def not_queued(run, folder):
    rest = [i for i in run.sample()["id"].to_pylist() if i not in queued(run)]
    return qupath(run, rest[0])


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (lambda run, _: qupath(run, queued(run)[1], "fine"), "feature 2 has the verdict 'fine', which is none of"),
        (lambda run, _: {"type": "Feature", "id": "x", "properties": {"verdict": "unsure"}}, "no id of this run"),
        (lambda run, _: {"type": "Feature", "properties": {"verdict": "unsure"}}, "no id of this run"),
        (other_run_feature, "no id of this run"),
        (not_queued, "feature 2 is not in the queue"),
        (lambda run, _: qupath(run, queued(run)[0], "Unsure"), "unsure of an image of which another says supports"),
        (
            lambda run, _: qupath(run, queued(run)[1], metadata={"equicam id": feature_id(run, queued(run)[2])}),
            "the ids of two images",
        ),
        (lambda run, _: qupath(run, queued(run)[1]) | {"properties": {"verdict": 5}}, "is no text"),
        (
            lambda run, _: qupath(run, queued(run)[1], "Unsure", reason="x" * 2001),
            "at most 2,000 characters",
        ),
        (lambda run, _: qupath(run, queued(run)[1], "Unsure", reason=["x"]), "reason that is no text"),
        (lambda run, _: qupath(run, queued(run)[1], "Unsure", verdict="supports"), "disagree"),
        (lambda run, _: 5, "feature 2 is no GeoJSON feature"),
        (lambda run, _: {"type": "Feature", "properties": [1]}, "feature 2 is no GeoJSON feature"),
    ],
)  # fmt: skip
def test_a_file_with_anything_wrong_is_refused_whole(run, tmp_path, bad, match):
    path = write(tmp_path, collection(qupath(run, queued(run)[0]), bad(run, tmp_path)))
    refused(run, path, match)


def test_of_many_problems_the_first_five_are_named(run, tmp_path):
    path = write(
        tmp_path, collection(*(qupath(run, name, f"odd {i}") for i, name in enumerate(queued(run)[:8])))
    )
    refused(run, path, r"odd 0.*odd 4.*and 3 more")
    with pytest.raises(EquicamError) as caught:
        import_verdicts(run, path, reviewer="ana")
    assert "odd 5" not in str(caught.value)


def test_nan_is_allowed_in_measurements_alone(run, tmp_path):
    name = queued(run)[0]
    feature = qupath(run, name, measurements={"a": float("nan"), "b": float("inf")})
    import_verdicts(run, write(tmp_path, collection(feature)), reviewer="ana")
    listed = qupath(run, name, measurements=[{"name": "a", "value": float("nan")}])
    import_verdicts(run, write(tmp_path, collection(listed), "old.json"), reviewer="bo")
    refused(
        run, write(tmp_path, collection(qupath(run, name, other=float("nan"))), "nan.json"), "NaN or infinity"
    )
    refused(run, write(tmp_path, collection(qupath(run, name) | {"id": float("nan")}), "id.json"), "NaN")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"5",
        b'{"type": "FeatureCollection"}',
        b'{"features": {}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" + b"9" * 10_000 + b"]",
        b"\x1f\x8b",
        gzip.compress(b"[]")[:-9],
        gzip.compress(b"[]")[:12] + b"\0" * 20,
    ],
    ids=range(13),
)
def test_hostile_files_are_refused(run, tmp_path, content):
    refused(run, write(tmp_path, content), "GeoJSON|FeatureCollection|feature 1")


def test_large_files_are_refused_packed_and_unpacked(run, tmp_path, monkeypatch):
    for module in (verdict_import, geojson):
        monkeypatch.setattr(module, "MAX_BYTES", 10_000)
    refused(run, write(tmp_path, b" " * 10_001), "at most 10,000 bytes")
    refused(
        run,
        write(tmp_path, gzip.compress(b" " * 10_000_000)[:10_000]),
        "more than 10,000 bytes when unpacked",
    )
    refused(run, tmp_path, "a folder")
    refused(run, tmp_path / "none.geojson", "No such file")


def test_hostile_text_in_messages_is_visible(run, tmp_path):
    path = write(tmp_path, collection(qupath(run, queued(run)[0], "\u202e\x1b[31m" + "x" * 500)))
    with pytest.raises(EquicamError) as caught:
        import_verdicts(run, path, reviewer="ana")
    assert not any(c in str(caught.value) for c in "\u202e\x1b")
    assert len(str(caught.value)) < 600


def test_an_empty_list_takes_nothing(run, tmp_path):
    assert import_verdicts(run, write(tmp_path, []), reviewer="ana").taken == 0


def test_the_command(run, tmp_path):
    path = write(tmp_path, collection(qupath(run, queued(run)[0])))
    status, said = equicam_command("review", run.folder, "--import", path, "--reviewer", "ana")
    assert (status, said.strip()) == (0, "1 verdict taken, 0 features without one, 0 already there")
    again = equicam_answer("review", run.folder, "--import", path, "--reviewer", "ana")
    assert again["imported"] == {"taken": 0, "without": 0, "already": 1}
    for options, message in (
        (("--import", path), "one --reviewer and no --export, got 0 reviewers"),
        (("--import", path, "--reviewer", "a", "--reviewer", "b"), "got 2 reviewers"),
        (("--import", path, "--reviewer", "a", "--export", "x.csv"), "and --export"),
        (("--replace",), "--replace needs --import"),
    ):
        status, said = equicam_command("review", run.folder, *options)
        assert status != 0
        assert message in " ".join(said.split())


def test_a_run_without_a_queue_names_the_command(tmp_path):
    run = fake_run(tmp_path, count=11)
    with pytest.raises(EquicamError, match="equicam triage first"):
        import_verdicts(run, write(tmp_path, []), reviewer="ana")


def test_importing_needs_no_torch_and_no_web_server():
    code = "import sys; sys.modules['torch'] = sys.modules['fastapi'] = None; import equicam.runs.review.verdict_import"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
