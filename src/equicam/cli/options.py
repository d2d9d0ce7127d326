"""Options that several commands share, each stated once."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Source = Annotated[
    str, Argument(help="Folder, glob pattern, or CSV or Parquet manifest.", show_default=False)
]
RunFolder = Annotated[
    Path, Argument(metavar="RUN", help="Folder that `equicam audit` wrote.", show_default=False)
]

_TRUSTED = "The run's model, unless a library publishes it: a run may name any code, so you name it."
_FROM_RUN = "the run's, if a library publishes it"
TrustedModel = Annotated[str | None, Option("--model", help=_TRUSTED, show_default=_FROM_RUN)]
ModelName = Annotated[str, Option("--model", help="Name from `equicam models`, or FILE.py:FACTORY.")]
_WEIGHTS = "Weights file, name of published weights, or random."
Weights = Annotated[str | None, Option(help=_WEIGHTS, show_default="published weights")]
Layer = Annotated[str | None, Option(help="Target layer by name.", show_default="chosen from the network")]
_CLASSES = "Class names of a zero-shot model, separated by commas."
Classes = Annotated[str | None, Option(help=_CLASSES, show_default=False)]

Target = Annotated[
    str | None, Option(help="Class to explain, by name or number.", show_default="each image's top-1")
]
_METHOD = "Name from `equicam methods`."
MethodName = Annotated[str | None, Option("--method", help=_METHOD, show_default="equigrad-cam")]
_VIEWS = "Number of views, or a set: dihedral:18, scales:0.8,1,1.25 or shifts:0.05."
Views = Annotated[str | None, Option(help=_VIEWS, show_default="as many as the method has")]
_CONTEXT = (
    "auto: cut views from what the model's preprocessing crops away; none: reflect at the input's border."
)
Context = Annotated[str | None, Option(help=_CONTEXT, show_default="none")]
_RECIPE = "TOML file with these and all other options (docs/commands.md); those typed here win."
RecipeFile = Annotated[Path | None, Option(help=_RECIPE, show_default=False)]
_SAVE = "Write the options of this command as a recipe file."
SaveRecipe = Annotated[Path | None, Option(help=_SAVE, show_default=False)]

_RASTERS = "Slides and maps"
_TILE = "Cut rasters into square windows of this many pixels a side, at the model's resolution."
Tile = Annotated[int | None, Option(min=2, help=_TILE, show_default=False, rich_help_panel=_RASTERS)]
_MPP = "Resolution that the model sees: micrometres per pixel of slides, map units per pixel of maps."
Mpp = Annotated[float | None, Option(help=_MPP, show_default="as stored", rich_help_panel=_RASTERS)]
_MPP_IS = "Resolution of rasters that do not state their own."
MppIs = Annotated[float | None, Option(help=_MPP_IS, show_default=False, rich_help_panel=_RASTERS)]
_STRIDE = (
    "Pixels from one window to the next; disc: so few that the windows' inscribed discs cover everything."
)
Stride = Annotated[str | None, Option(help=_STRIDE, show_default="the tile", rich_help_panel=_RASTERS)]
_BANDS = "Bands for the model's channels, by name or by number from 1: 4,3,2."
Bands = Annotated[str | None, Option(help=_BANDS, show_default="red, green, blue", rich_help_panel=_RASTERS)]

_SAMPLE = "Take this many images, spread over the classes: the first of each class by name, not at random."
SampleSize = Annotated[int | None, Option("--n", help=_SAMPLE, show_default="all")]
Seed = Annotated[int, Option(help="Seed of every random choice.")]
_MOVED_SOURCE = "Where the images are now, if they were moved."
MovedSource = Annotated[str | None, Option("--source", help=_MOVED_SOURCE, show_default=False)]
_MOVED_WEIGHTS = "The weights file of the run, if it used one."
MovedWeights = Annotated[str | None, Option("--weights", help=_MOVED_WEIGHTS, show_default=False)]

_BEST = "a GPU if there is one"
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:1.", show_default=_BEST)]
_DEVICES = "cpu, cuda, cuda:1, or several: cuda:0,cuda:1."
Devices = Annotated[str | None, Option("--device", help=_DEVICES, show_default=_BEST)]
Browser = Annotated[bool, Option(help="Open the page in a browser.")]
