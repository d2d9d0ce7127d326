"""Words for pages: flags explained, and anybody's text made safe to look at."""

import unicodedata

LONGEST = 300  # characters of a name
FLAGS = {
    "blank": "the map is zero everywhere: no positive evidence for the class, or a dead layer",
    "constant": "the map has the same value everywhere: nothing to see",
    "flipped": "in at least one view the prediction is another one",
    "none-kept": "the gate kept no view: this is the presented view alone, and its PEUM of 0 means nothing",
    "low-coverage": "some cells no weighed view has seen",
    "odd-size": "the picture is not square, or the feature grid does not divide it: turns are less exact",
}


def visible(text: object, most: int = LONGEST) -> str:
    """Text of anybody's on one line: controls, direction marks and stacks of accents spelled out, and not endless."""
    told, marks = [], 0
    for c in str(text)[:most]:
        kind = unicodedata.category(c)
        marks = marks + 1 if kind.startswith("M") else 0
        hidden = kind.startswith("C") or kind in ("Zl", "Zp") or marks > 3
        told.append(c.encode("unicode_escape").decode() if hidden else c)
    more = len(str(text)) - most
    return "".join(told) + (f"… ({more:,} more characters)" if more > 0 else "")
