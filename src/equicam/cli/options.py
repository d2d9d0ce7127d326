"""Options that several commands share, each stated once."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Source = Annotated[
    str,
    Argument(help="Folder, glob pattern, or CSV or Parquet manifest.", show_default=False),
]
RunFolder = Annotated[
    Path, Argument(metavar="RUN", help="Folder that `equicam audit` wrote.", show_default=False)
]

TrustedModel = Annotated[
    str | None,
    Option(
        "--model",
        help="The run's model, unless a library publishes it: a run may name any code, so you name it.",
        show_default="the run's, if a library publishes it",
    ),
]
ModelName = Annotated[str, Option("--model", help="Name from `equicam models`, or FILE.py:FACTORY.")]
Weights = Annotated[
    str | None,
    Option(help="Weights file, name of published weights, or random.", show_default="published weights"),
]
Layer = Annotated[str | None, Option(help="Target layer by name.", show_default="chosen from the network")]
Classes = Annotated[
    str | None, Option(help="Class names of a zero-shot model, separated by commas.", show_default=False)
]

MethodName = Annotated[str, Option("--method", help="Name from `equicam methods`.")]
Views = Annotated[
    str | None,
    Option(
        help="Number of views, or a set: dihedral:18, scales:0.8,1,1.25 or shifts:0.05.",
        show_default="as many as the method has",
    ),
]
Fill = Annotated[
    str | None,
    Option(
        help="Border of aligned views: reflect, zeros or coverage.",
        show_default="reflect; coverage with context, scales or shifts",
    ),
]
Tau = Annotated[
    float | None,
    Option(help="Confidence below which a +pcf method drops a view.", show_default="0.1"),
]
Gamma = Annotated[float | None, Option(help="Exponent of the gate of a +soft method.", show_default="1")]
Context = Annotated[
    str,
    Option(
        help="auto: cut views from what the model's preprocessing crops away; none: reflect at the input's border.",
    ),
]
_RASTERS = "Slides and maps"
Tile = Annotated[
    int | None,
    Option(
        min=2,
        help="Cut rasters into square windows of this many pixels a side, at the model's resolution.",
        show_default=False,
        rich_help_panel=_RASTERS,
    ),
]
Mpp = Annotated[
    float | None,
    Option(
        help="Resolution that the model sees: micrometres per pixel of slides, map units per pixel of maps.",
        show_default="as stored", rich_help_panel=_RASTERS,
    ),
]  # fmt: skip
MppIs = Annotated[
    float | None,
    Option(
        "--mpp-is",
        help="Resolution of rasters that do not state their own.",
        show_default=False,
        rich_help_panel=_RASTERS,
    ),
]
Stride = Annotated[
    str | None,
    Option(
        help="Pixels from one window to the next; disc: so few that the windows' inscribed discs cover everything.",
        show_default="the tile", rich_help_panel=_RASTERS,
    ),
]  # fmt: skip
Tissue = Annotated[
    float,
    Option(min=0, max=1, help="Smallest share of tissue in a window of a slide.", rich_help_panel=_RASTERS),
]
Regions = Annotated[
    str | None,
    Option(
        help="GeoJSON from QuPath or QGIS: take only windows whose centre lies in its areas. A folder holds one file for each raster.",
        show_default=False, rich_help_panel=_RASTERS,
    ),
]  # fmt: skip
Bands = Annotated[
    str | None,
    Option(
        help="Bands for the model's channels, by name or by number from 1: 4,3,2.",
        show_default="red, green, blue",
        rich_help_panel=_RASTERS,
    ),
]
Scale = Annotated[
    float | None,
    Option(
        help="Divide values by this, before mean and std.",
        show_default="255 for 8-bit rasters",
        rich_help_panel=_RASTERS,
    ),
]
_PREPROCESSING = "Preprocessing"
Size = Annotated[
    int | None,
    Option(
        min=1,
        help="Resize the short side of images to this many pixels.",
        show_default="the model's",
        rich_help_panel=_PREPROCESSING,
    ),
]
Crop = Annotated[
    int | None,
    Option(
        min=1,
        help="Side, in pixels, of the square cut out of the centre: the model's input.",
        show_default="the model's",
        rich_help_panel=_PREPROCESSING,
    ),
]
Mean = Annotated[
    str | None,
    Option(
        help="Mean of each channel, for values from 0 to 1, separated by commas.",
        show_default="the model's",
        rich_help_panel=_PREPROCESSING,
    ),
]
MeanOrRaster = Annotated[
    str | None,
    Option(
        "--mean",
        help="Mean of each channel, for values from 0 to 1 (with --tile: after --scale), separated by commas.",
        show_default="the model's", rich_help_panel=_PREPROCESSING,
    ),
]  # fmt: skip
Std = Annotated[
    str | None,
    Option(
        help="Standard deviation of each channel, separated by commas.",
        show_default="the model's",
        rich_help_panel=_PREPROCESSING,
    ),
]
Display = Annotated[
    str | None,
    Option(
        help="One or three bands to show.",
        show_default="the first three of --bands",
        rich_help_panel=_RASTERS,
    ),
]
Voi = Annotated[
    str | None,
    Option(
        metavar="CENTER,WIDTH",
        help="Window of DICOM images: 40,400.",
        show_default="the one in each file",
        rich_help_panel=_PREPROCESSING,
    ),
]
Protocol = Annotated[
    str, Option(help="ours, or paper: its authors' view grid, fill, and variants of methods and metrics.")
]
Dtype = Annotated[
    str | None,
    Option(help="Run the network in bfloat16 or float16.", show_default="the type of the weights"),
]
_COMPILE_HELP = "Compile the network first (half a minute on a GPU) to run it faster."
Compile = Annotated[bool, Option("--compile", help=_COMPILE_HELP)]
CompileIfRepaid = Annotated[
    bool | None,
    Option(
        "--compile/--no-compile",
        help=_COMPILE_HELP,
        show_default="auto: on a GPU, if there are images enough to repay it",
    ),
]
Fast = Annotated[bool, Option("--fast", help="On a GPU: --dtype bfloat16 --compile.")]
Seed = Annotated[int, Option(help="Seed of every random choice.")]

SampleSize = Annotated[
    int | None,
    Option(
        "--n",
        help="Take this many images, spread over the classes: the first of each class by name, not at random.",
        show_default="all",
    ),
]
Split = Annotated[str | None, Option(help="Split of the source: train, test, …", show_default=False)]
GroupBy = Annotated[
    str | None,
    Option(
        help="Column of the image list with each image's group, such as patient: intervals are by group.",
        show_default="a column group",
    ),
]
MovedSource = Annotated[
    str | None, Option("--source", help="Where the images are now, if they were moved.", show_default=False)
]
MovedWeights = Annotated[
    str | None,
    Option("--weights", help="The weights file of the run, if it used one.", show_default=False),
]

_BEST = "a GPU if there is one"
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:1.", show_default=_BEST)]
Devices = Annotated[
    str | None,
    Option("--device", help="cpu, cuda, cuda:1, or several: cuda:0,cuda:1.", show_default=_BEST),
]
Engine = Annotated[str, Option(help="local, or ray for many machines (needs equicam\\[ray]).")]
Address = Annotated[
    str | None,
    Option(help="Ray cluster to use: auto, or host:port.", show_default="start one here"),
]
Actors = Annotated[
    int | None,
    Option(min=1, help="Ray actors, each with its own model.", show_default="one per GPU, or per CPU"),
]
