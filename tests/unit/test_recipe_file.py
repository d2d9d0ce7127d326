"""Recipe files: what they may hold, what wins, and what a saved one gives back."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.cli.recipe_file import MAX_BYTES, SECTIONS, Settings
from equicam.demo import synthetic_patches
from equicam.rasters.options import Input, Tiling
from equicam.recipe import Recipe
from tests.conftest import recipe

EVERYTHING = """
[recipe]
method = "equigrad-cam+pcf"
views = "dihedral:8"
fill = "zeros"
protocol = "ours"
context = "none"
tau = 0.2
gamma = 2
dtype = "bfloat16"
compiled = false
seed = 7
[tiling]
tile = 96
stride = "disc"
mpp = 0.5
mpp_is = 0.25
bands = ["4", "3", "2"]
scale = 10000
display = "1"
tissue = 0.1
valid = 0.7
regions = "areas \\"x\\".geojson"
[preprocessing]
mean = 0.5
std = [0.1, 0.2, 0.3]
voi = [40, 400]
[model]
layer = "layer4"
classes = ["a cat", "chien é"]
[run]
split = "test"
calibrate = 3
shard_size = 4
workers = 2
engine = "ray"
address = "auto"
actors = 2
"""


def settings(text, tmp_path, **typed):
    (tmp_path / "recipe.toml").write_text(text)
    return Settings.of(tmp_path / "recipe.toml", **typed)


def test_a_file_holds_every_option_and_a_saved_one_gives_it_back(tmp_path):
    assert set(SECTIONS["recipe"]) == {field.name for field in dataclasses.fields(Recipe)}
    both = {field.name for kind in (Tiling, Input) for field in dataclasses.fields(kind)}
    assert set(SECTIONS["tiling"]) == both - {"input", "mean", "std"}
    found = settings(EVERYTHING, tmp_path)
    names, known = ({k: set(v) for k, v in one.items()} for one in (found.sections, SECTIONS))
    assert names | {"preprocessing": set()} == known | {"preprocessing": set()}
    views = equicam.Views.dihedral(8)
    expected = Recipe("equigrad-cam+pcf", views, "zeros", "ours", "none", 0.2, 2, "bfloat16", False, 7)
    assert found.recipe == expected
    chosen = Input(("4", "3", "2"), 10000, (0.5,), (0.1, 0.2, 0.3), 0.5, "1")
    assert found.tiling == Tiling(96, "disc", 0.1, 0.7, 0.25, 'areas "x".geojson', chosen)
    assert found.voi == (40.0, 400.0)
    found.save(tmp_path / "saved.toml")
    again = Settings.of(tmp_path / "saved.toml")
    assert again == found
    again.save(tmp_path / "saved.toml")  # the same: nothing is lost
    with pytest.raises(equicam.EquicamError, match="--save-recipe needs a new file, got"):
        settings("", tmp_path).save(tmp_path / "saved.toml")


def test_what_is_typed_wins_and_the_rest_stays(tmp_path):
    typed = {"recipe": {"views": "6", "method": None}, "tiling": {"tile": 64, "stride": "32", "mpp": None}}
    found = settings(EVERYTHING, tmp_path, **typed)
    assert (found.recipe.views, found.recipe.method) == (6, "equigrad-cam+pcf")
    assert (found.tiling.tile, found.tiling.stride, found.tiling.input.mpp) == (64, 32, 0.5)
    assert Settings.of(None).recipe == Recipe()
    assert Settings.of(None).tiling is None
    assert settings("recipe.views = [0, 45.5]", tmp_path).recipe.views == (0, 45.5)


def test_a_saved_recipe_names_what_was_chosen_by_default_and_awkward_text(tmp_path):
    text = 'é"\\\n\x7f\U0001f600'
    Settings.of(None, recipe={"views": "6"}, model={"layer": text}).save(tmp_path / "saved.toml")
    found = Settings.of(tmp_path / "saved.toml").sections
    assert found["model"] == {"layer": text}
    assert found["recipe"] == {"method": "equigrad-cam", "views": 6, "protocol": "ours", "seed": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[recipes]", "needs one of recipe, tiling, preprocessing, model, run, got 'recipes'"),
        ("tau = 0.1", "needs one of recipe, tiling, preprocessing, model, run, got 'tau'"),
        ("recipe = 3", "got 'recipe'"),
        ("recipe.tua = 0.1", "needs one of method, views, fill, protocol, context, tau, .*, got 'tua'"),
        ("recipe.tau = 'a'", "tau in .* needs a number, got 'a'"),
        ("recipe.tau = nan", "needs a number, got nan"),
        ("recipe.tau = true", "needs a number, got True"),
        ("recipe.gamma = 1" + "0" * 400, "needs a number"),
        ("recipe.gamma = 0x1" + "0" * 9000, "needs a number, got more than can be shown"),
        ("recipe.compiled = 1", "needs true or false"),
        ("recipe.views = [0, 'a']", "needs a whole number or text or a list of numbers"),
        ("recipe.views = [[0, 1]]", "needs a whole number or text or a list of numbers"),
        ("recipe.views = []", "Views needs at least one"),
        ("recipe.views = 99999999999", "views needs a number from 1 to 10,000"),
        ("recipe.views = 'dihedral:99999999998'", "views needs a number from 1 to 10,000"),
        ("recipe.context = 'some'", "context needs one of none, auto"),
        ("recipe.dtype = 'save'", "dtype needs one of bfloat16"),
        ("run.shard_size = 0", "needs a whole number from 1 on, got 0"),
        ("model.classes = [1]", "needs a list of names"),
        ("tiling.mpp = 1", "mpp needs tile"),
        ("tiling.tile = 1", "tile needs 2 to 4096"),
        ("tiling = {tile = 96, stride = 'dics'}", 'try stride="disc"'),
        ("tiling.tile = 96\npreprocessing.crop = 64", "size and crop needs images"),
        ("preprocessing.voi = [1]", "try voi=40,400"),
        ("recipe", "needs TOML"),
        ("a = " + "[" * 5000, "needs TOML"),
        ("#" * MAX_BYTES + "\n", "needs at most 65,536 bytes"),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text, message):
    def read():
        found = settings(text, tmp_path)
        return found.recipe, found.tiling, found.voi

    with pytest.raises(equicam.EquicamError, match=message):
        read()


def test_only_regular_files_of_text_are_read(tmp_path):
    (tmp_path / "recipe.toml").write_bytes(b"\xff\xfe")
    missing = dict.fromkeys(["none.toml", ".", "/dev/zero"], "needs an existing file")
    for name, message in (missing | {"recipe.toml": "needs TOML"}).items():
        with pytest.raises(equicam.EquicamError, match=message):
            Settings.of(tmp_path / name)


@pytest.mark.parametrize("command", ["explain", "audit", "evaluate"])
def test_commands_read_and_save_a_recipe(command, tmp_path):
    """What is saved by one command is what the next one does, and other commands read it too."""
    image, saved = tmp_path / "images" / "a.png", tmp_path / "saved.toml"
    image.parent.mkdir()
    synthetic_patches(1)[0].save(image)
    source = image if command == "explain" else image.parent
    out = {"evaluate": tmp_path / "rows.parquet"}.get(command, tmp_path / "out")
    asked = ["--out", str(out), "--views", "4", "--layer", "layer3", "--save-recipe", str(saved)]
    lines = ("recipe.method = 'equigrad-cam+pcf'", "recipe.tau = 0.3", "recipe.views = 9", "run.workers = 1")
    done = CliRunner().invoke(app, [command, str(source), *asked, *recipe(*lines)])
    assert done.exit_code == 0, done.output
    found = Settings.of(saved)
    assert found.recipe == Recipe("equigrad-cam+pcf", views=4, tau=0.3)
    assert (found.sections["model"], found.sections["run"]) == ({"layer": "layer3"}, {"workers": 1})
    if command == "audit":
        chosen = equicam.open_run(out).manifest
        made = chosen.recipe
        assert (made.method, made.tau, len(made.views)) == ("equigrad-cam+pcf", 0.3, 4)
        assert (chosen.layer, made.context, made.compiled) == ("layer3", "none", False)
    elif command == "explain":
        assert len(json.loads((out / "a.json").read_text())["views"]) == 4
    more = ["explain", str(image), "--out", str(tmp_path / "again"), "--recipe", str(saved)]
    assert CliRunner().invoke(app, more).exit_code == 0
    facts = json.loads((tmp_path / "again" / "a.json").read_text())
    assert (facts["method"], facts["layer"], len(facts["views"])) == ("equigrad-cam+pcf", "layer3", 4)
