"""Options that several commands share, each stated once."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Source = Annotated[
    str,
    Argument(help="Folder, glob pattern, CSV or Parquet manifest, or benchmark.", show_default=False),
]
RunFolder = Annotated[
    Path, Argument(metavar="RUN", help="Folder that `equicam audit` wrote.", show_default=False)
]

TrustedModel = Annotated[
    str | None,
    Option(
        "--model",
        help="The run's model, if it is not a library's: a run may name any code, and is not obeyed.",
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
        help="Number of views, auto, or a set: dihedral:18, scales:0.8,1,1.25 or shifts:0.05.",
        show_default="as many as the method has",
    ),
]
FixedViews = Annotated[
    str | None,
    Option(
        "--views",
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
        help="Cut rasters into windows of this many pixels of the model's.",
        show_default=False,
        rich_help_panel=_RASTERS,
    ),
]
Mpp = Annotated[
    float | None,
    Option(
        help="Micrometres a pixel of slides, or map units a pixel of maps, that the model sees.",
        show_default="as stored", rich_help_panel=_RASTERS,
    ),
]  # fmt: skip
MppIs = Annotated[
    float | None,
    Option(
        "--mpp-is",
        help="Resolution of rasters that do not say theirs.",
        show_default=False,
        rich_help_panel=_RASTERS,
    ),
]
Stride = Annotated[
    str | None,
    Option(
        help="Pixels from one window to the next, or disc: the inscribed discs cover everything.",
        show_default="the tile", rich_help_panel=_RASTERS,
    ),
]  # fmt: skip
Tissue = Annotated[
    float,
    Option(min=0, max=1, help="Least share of a slide's window that is tissue.", rich_help_panel=_RASTERS),
]
Regions = Annotated[
    str | None,
    Option(
        help="GeoJSON of QuPath or QGIS: only windows whose centre lies in its areas; a folder has one file a raster.",
        show_default=False, rich_help_panel=_RASTERS,
    ),
]  # fmt: skip
Bands = Annotated[
    str | None,
    Option(
        help="Bands of the model's channels, by name or number from 1: 4,3,2.",
        show_default="red, green, blue",
        rich_help_panel=_RASTERS,
    ),
]
Scale = Annotated[
    float | None,
    Option(
        help="Divide values by this, before mean and std.",
        show_default="255, of 8-bit rasters",
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
        help="Crop this many pixels a side from the centre: the model's input.",
        show_default="the model's",
        rich_help_panel=_PREPROCESSING,
    ),
]
Mean = Annotated[
    str | None,
    Option(
        help="Mean of each channel, separated by commas, of values from 0 to 1; of rasters, after --scale.",
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
AsPublished = Annotated[bool, Option(help="Use the paper authors' view grid, fill and method variants.")]
Dtype = Annotated[
    str | None,
    Option(help="Run the network in bfloat16 or float16.", show_default="the type of the weights"),
]
Compile = Annotated[
    bool,
    Option("--compile", help="Compile the network first (half a minute on a GPU) to run it faster."),
]
Seed = Annotated[int, Option(help="Seed of every random choice.")]

SampleSize = Annotated[
    int | None,
    Option("--n", help="Take a sample of this many images, spread over the classes.", show_default="all"),
]
Split = Annotated[str | None, Option(help="Split of the source: train, test, …", show_default=False)]
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

_OUTPUT = "Output"
Json = Annotated[
    bool,
    Option("--json", help="Print the result as one JSON document.", rich_help_panel=_OUTPUT),
]
Quiet = Annotated[
    bool,
    Option("--quiet", help="Print results only: no notices, no progress.", rich_help_panel=_OUTPUT),
]
Verbose = Annotated[
    bool,
    Option("--verbose", help="Print what the library logs, and tracebacks.", rich_help_panel=_OUTPUT),
]
