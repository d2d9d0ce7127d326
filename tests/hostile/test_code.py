"""Data never becomes code: what a run, a weights file or a cache names or contains is never executed."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from safetensors.torch import save_file

import equicam
from equicam.audit import verify
from equicam.errors import EquicamError
from equicam.models import libraries
from equicam.readers.names import is_library_model
from equicam.runs.log import Log, log_start
from equicam.runs.store import RunStore
from tests.audit.conftest import run_command
from tests.audit.test_run import log_and_complete_again


class Touch:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def edit_manifest(out: Path, **values: object) -> None:
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | values))


def forget_and_log_again(out: Path, **values: object) -> None:
    """Other values in the manifest, and a new log for the files as they are."""
    edit_manifest(out, **values)
    (out / "events.sqlite").unlink()
    log_start(RunStore(out), Log(out), 0)
    log_and_complete_again(out)


@pytest.fixture
def strangers_run(out, tmp_path) -> tuple[Path, Path]:
    """A run whose manifest names a factory that leaves a file, with digests, log and chain in order."""
    factory, left = tmp_path / "evil.py", tmp_path / "ran"
    factory.write_text(
        f"from pathlib import Path\nPath({str(left)!r}).touch()\n"
        "import equicam\ndef build(): return equicam.load('embedded')\n"
    )
    forget_and_log_again(out, model=f"{factory}:build")
    return out, left


def test_a_factory_in_a_run_is_not_executed_by_any_command(strangers_run):
    out, left = strangers_run
    said = run_command("verify", out, "--sample", "4", code=1)
    assert "0 recomputed images: no differences" in said
    assert "4 maps were NOT recomputed: " in said
    assert "evil.py:build" in said
    assert "--model" in said
    run_command("triage", out, "--budget", "4")
    said = run_command("causal", out, code=2)
    assert "evil.py:build" in said
    assert "--model" in said
    assert not (out / "causal.json").exists()
    run_command("report", out)
    run_command("verify", out, "--sample", "0")
    assert not left.exists()


def test_the_command_line_may_name_it(strangers_run):
    out, left = strangers_run
    name = RunStore(out).manifest.model
    assert "4 recomputed images" in run_command("verify", out, "--sample", "4", "--model", name)
    assert left.exists()
    run_command("triage", out, "--budget", "4")
    run_command("causal", out, "--model", name)
    assert (out / "causal.json").is_file()
    run_command("verify", out, "--sample", "4", "--model", "embedded")  # the same weights


def test_differences_stop_any_loading_and_all_are_named(strangers_run, monkeypatch):
    out, left = strangers_run
    path = RunStore(out).path("items", 1)
    path.write_bytes(path.read_bytes()[:-4] + b"PAR2")
    (out / "sample.parquet").write_bytes(b"no")

    def load(*_args, **_options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(verify, "load", load)
    said = run_command("verify", out, "--sample", "4", "--model", RunStore(out).manifest.model, code=1)
    assert "items/shard-000001.parquet is not as it was written" in said
    assert "sample.parquet is not as it was written" in said
    assert "nothing was computed again" in said
    assert not left.exists()


def test_a_missing_image_does_not_hide_the_other_differences(patches, tmp_path):
    source = shutil.copytree(patches, tmp_path / "source")
    run = equicam.audit(source, equicam.load("embedded"), tmp_path / "run", views=2, shard_size=8)
    (source / "03.png").unlink()
    assert any("needs the images it was computed from" in p for p in run.verify(24).problems)
    run.store.path("maps", 0).write_bytes(b"no")
    assert any(p.startswith("maps/shard-000000.parquet") for p in run.verify(24).problems)


LIBRARIES = ("resnet50", "embedded", "timm:vit_small_patch16_224.augreg_in21k", "open_clip:ViT-B-16/openai")
FILES = ("models.py:build", "./models.py", "timm:local-dir:/tmp/x", "open_clip:local-dir:/tmp/x", "..\\e", "")
HUBS = ("hf:stranger/model", "timm:hf-hub:stranger/model", "open_clip:hf-hub:a/b", "stranger:thing")


@pytest.mark.parametrize("name", [*LIBRARIES, *FILES, *HUBS, "open_clip:ViT-B-16//tmp/evil.pt"])
def test_only_names_of_libraries_are_taken_from_a_run(name):
    assert is_library_model(name) is (name in LIBRARIES)


def test_a_run_at_a_url_is_not_fetched(out):
    forget_and_log_again(out, source="http://127.0.0.1:9/images")
    found = equicam.open_run(out).verify(2)
    assert (found.problems, found.recomputed, found.left_out, found.ok) == ((), 0, 2, False)
    assert "--source" in found.left_out_reason


@pytest.fixture
def weights(tmp_path) -> Path:
    save_file(dict(equicam.load("embedded").module.state_dict()), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_a_weights_file_that_only_a_run_names_is_not_opened(patches, tmp_path, weights):
    out, named = tmp_path / "run", ("--weights", weights)
    run_command("audit", patches, "--out", out, "--views", "2", "--n", "4", *named)
    said = run_command("verify", out, "--sample", "20", code=1)
    assert "0 recomputed images: no differences" in said
    (left_out,) = [line for line in said.splitlines() if line.startswith("4 maps were NOT recomputed: ")]
    assert left_out.endswith(f"try --weights {weights}")
    run_command("verify", out, "--sample", "0")
    assert "2 recomputed images" in run_command("verify", out, "--sample", "2", *named)
    run_command("triage", out, "--budget", "2")
    assert f"--weights {weights}" in run_command("causal", out, code=2)  # it names the file to trust
    run_command("causal", out, *named)


def test_a_pickle_in_the_cache_of_torchvision_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    name = Path(torchvision.models.ResNet18_Weights.IMAGENET1K_V1.url).name
    (cache / name).write_bytes(pickle.dumps({"fc.weight": Touch(tmp_path / "ran")}, protocol=2))
    with pytest.raises(EquicamError, match="loads without running code"):
        equicam.load("resnet18")
    torch.save({"fc.weight": Touch(tmp_path / "ran")}, cache / name)
    with pytest.raises(EquicamError, match=r"imports posix\.system"):
        equicam.load("resnet18")
    assert not (tmp_path / "ran").exists()
    # the file that belongs there is loaded
    torch.manual_seed(0)
    honest = torchvision.models.resnet18()
    torch.save(honest.state_dict(), cache / name)
    assert torch.equal(equicam.load("resnet18").module.fc.weight, honest.fc.weight)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_code_of_a_repository_is_never_trusted(monkeypatch):
    """`trust_remote_code` is False in every call."""
    told = []

    class Auto:
        @staticmethod
        def from_pretrained(_name, **options):
            told.append(options.get("trust_remote_code"))
            raise OSError("not here")

    class Fake:
        AutoConfig = AutoImageProcessor = AutoModel = AutoModelForImageClassification = AutoTokenizer = Auto

    monkeypatch.setattr(libraries, "_import", lambda *_a, **_k: Fake)
    monkeypatch.setattr("equicam.models.weights._reachable", lambda: True)
    with pytest.raises(EquicamError):
        equicam.load("hf:stranger/model")
    assert set(told) == {False}
    source = Path(libraries.__file__).read_text()
    calls = source.count("from_pretrained(request.name") + source.count("from_config(config")
    assert calls == source.count("**safe)") == 5


def test_a_tag_of_open_clip_is_not_a_file(tmp_path):
    pytest.importorskip("open_clip")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(EquicamError, match="weights of open_clip's ViT-B-16"):
        equicam.load(f"open_clip:ViT-B-16/{tmp_path / 'evil.pt'}", classes=["a", "b"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("classes", ["[" * 100_000, '{"a": 1}', "[1, 2]", "nonsense", '["a", ["b"]]'])
def test_odd_metadata_of_weights_is_ignored(tmp_path, classes):
    model, file = equicam.load("embedded"), tmp_path / "w.safetensors"
    save_file(dict(model.module.state_dict()), file, {"classes": classes})
    assert equicam.load("embedded", weights=file).classes == model.classes


NO_MANIFESTS = (b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b'"text"', b'{"schema": []}', b'{"schema": 2}')
OTHERS = (b'{"schema": 2, "recipe": []}', b'{"schema": 1, "method": {}}')


@pytest.mark.parametrize("text", [*NO_MANIFESTS, *OTHERS])
def test_a_manifest_that_is_none_is_refused_in_a_sentence(out, text):
    (out / "manifest.json").write_bytes(text)
    with pytest.raises(EquicamError, match=r"manifest\.json|schema version"):
        equicam.open_run(out)


ODD_VALUES = {
    "images": (-1, 10**15, "24"), "shard_size": (0, 1.5), "classes": ("ab", [1, 2], ["\ud800", "b"]), "versions": ("x",),
    "model": (["evil.py:build"],), "layer": (None,), "source": (3,),
    "recipe": ({"views": "many"}, {"views": [0.0, "x"]}, {"method": {"a": [1]}}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, some in ODD_VALUES.items() for v in some], ids=str)
def test_a_manifest_with_odd_values_is_refused_in_a_sentence(out, name, value):
    if name == "recipe":
        value = json.loads((out / "manifest.json").read_text())["recipe"] | value
    edit_manifest(out, **{name: value})
    with pytest.raises(EquicamError, match=r"manifest\.json"):
        equicam.open_run(out)


@pytest.fixture(scope="module")
def ranked(whole, tmp_path_factory) -> Path:
    out = shutil.copytree(whole, tmp_path_factory.mktemp("ranked") / "run")
    equicam.open_run(out).triage(budget="100%")
    equicam.open_run(out).causal()
    return out


ODD_OPTIONS = ([], None, {"control": ["x"]}, {"budget": {"a": 1}}, {"seed": 1e308}, {"evil": 1})
ODD_TEST = {"trained": [[]], "random": {"drift": -1}, "images": -1, "explained": "x", "recipe": None}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [*(("triage", "options", v) for v in ODD_OPTIONS), *(("causal", k, v) for k, v in ODD_TEST.items())],
    ids=str,
)
def test_odd_values_in_the_files_of_a_queue_are_refused_in_a_sentence(ranked, tmp_path, name, key, value):
    file = shutil.copytree(ranked, out := tmp_path / "run") / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(EquicamError):
        equicam.open_run(out).report()


TABLES = {
    "a column of another type": lambda table: table.set_column(0, "id", pa.array(range(table.num_rows))),
    "a column less": lambda table: table.drop_columns(["id"]),
    "another table": lambda _: pa.table({"x": [1, 2, 3]}),
}


@pytest.mark.parametrize("name", ["items/shard-000001", "maps/shard-000001", "triage"])
@pytest.mark.parametrize("damage", TABLES)
def test_tables_with_other_columns_are_refused_in_a_sentence(ranked, tmp_path, name, damage):
    out = shutil.copytree(ranked, tmp_path / "run")
    file = out / f"{name}.parquet"
    pq.write_table(TABLES[damage](pq.read_table(file)), file)
    with pytest.raises(EquicamError, match="the columns it was written with"):
        equicam.open_run(out).report()
    assert not equicam.open_run(out).verify(0).ok
