"""Text for pages: explanations of flags, and foreign text made safe to look at."""

import unicodedata

from equicam.steadiness import STEADY_FROM

MAX_CHARACTERS = 300
MAX_COMBINING_MARKS = 3  # in a row; real scripts need no more
RANDOM_EQ = {"random": ".992", "trained": ".981"}
"""Eq of EquiGrad-CAM on MobileNetV2 with random and with trained weights, on 100 images (docs/reproduce.md)."""
FLAGS = {
    "blank": "the map is zero everywhere: nothing in the image raises what is explained, or a dead layer",
    "constant": "the map has the same value everywhere",
    "flipped": "in at least one view the model predicts another class",
    "none-kept": "no view kept the prediction with enough confidence: the map is that of the presented view alone, and its PEUM of 0 means nothing",
    "low-coverage": "no weighted view covers some cells",
    "edge": "views reach beyond the image, where it is reflected",
    "odd-size": "the image is not square, or the feature grid does not divide it: rotations are less exact",
    "nodata": "part of the window has no data",
    "orientation-unread": "the EXIF orientation of the file cannot be read: the map is of the image as stored",
}

VERDICT_MEANINGS = {
    "supports": "It marks what one would recognise the class by.",
    "shortcut": "It marks what only comes with the class: ink, text, a border, background.",
    "wrong-region": "It marks what is no evidence for the class, or misses what is.",
    "unsure": "You cannot decide; never counted as right.",
    "second-reviewer": "It goes to the other reviewers’ lists.",
}
"""What each verdict says of a map."""
OF_VALUES = {
    "supports": "It marks what the output should depend on.",
    "shortcut": "It marks what only comes with it: ink, text, a border, background.",
    "wrong-region": "It marks what the output should not depend on, or misses what it should.",
}
"""The same where a value is explained and not a class."""

STEADINESS_REASONS = {
    "follows": "the network’s own map follows the image in the views",
    "moves": "the network’s own map does not follow the image",
    "prediction-changes": "the prediction changes in most views",
    "too-close": f"{STEADY_FROM:g} lies within the uncertainty of the stability",
    "too-few-views": "too few views",
    "blank": "the map is blank",
    "constant": "the map has one value everywhere",
    "none-kept": "no view kept the prediction",
}
"""The reasons for a word of steadiness, in short, by code."""

SIGNAL_MEANINGS = {
    "stability": "the mean correlation of the presented view’s own map with every other view’s, aligned",
    "peum": "the variance between the views’ maps of an image",
    "risk": "the mean of two ranks, by low stability and by a low mean probability of the class over the views",
}


def verdict_meanings(has_values: bool) -> dict[str, str]:
    """What each verdict says of a map of a class, or of a value."""
    return VERDICT_MEANINGS | (OF_VALUES if has_values else {})


def visible(text: object, most: int = MAX_CHARACTERS) -> str:
    """Foreign text on one line: controls, direction marks and piles of accents are escaped, and the length is bounded."""
    shown, marks = [], 0
    for c in str(text)[:most]:
        category = unicodedata.category(c)
        marks = marks + 1 if category.startswith("M") else 0
        hidden = category.startswith("C") or category in ("Zl", "Zp") or marks > MAX_COMBINING_MARKS
        shown.append(c.encode("unicode_escape").decode() if hidden else c)
    more = len(str(text)) - most
    return "".join(shown) + (f"… ({more:,} more characters)" if more > 0 else "")
