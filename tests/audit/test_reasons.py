"""Reasons are codes and values; sentences are written in one place."""

import json

import pytest

from equicam.errors import EquicamError
from equicam.reasons import _SENTENCES, Reason, describe, from_rows

JUDGED = {"stability": 0.71, "uncertainty": 0.04, "limit": 0.7, "lowest": 0.42, "view": "260°"}
COST = {"effect": 0.05, "low": 0.04, "high": 0.06, "random": 0.0, "least": 0.02}
ANSWERS = "signal", "noise", "undecided", "as-random", "no-effect", "all-blank"
VALUES = {
    "unreadable": {"error": "OSError", "message": "image file is truncated"},
    "decoding-timeout": {"seconds": 60.0},
    "refused": {"what": "a", "needs": "b", "got": "c", "fix": "d"},
    "signal-percentile": {"signal": "peum", "value": 0.0312, "above_percent": 93},
    "signal-undefined": {"signal": "stability"},
    "prediction-changes": {"views": ["40°", "60°", "80°", "100°"], "of": 18},
    "views-disagree": {"views": ["140°"], "correlations": [0.31], "of": 18},
    "map-moves": {"views": ["160° mirrored", "20°, × 1.25"], "correlations": [-0.38, 0.4], "of": 18},
    **dict.fromkeys(("follows", "moves", "too-close"), JUDGED),
    "too-few-views": {"views": 3, "needed": 5},
    "low-confidence": {"confidence": 0.34},
    "text": {"text": "as it was written"},
    **dict.fromkeys(ANSWERS, COST | {"images": 9, "of": 9, "requested": 9}),
}


@pytest.mark.parametrize("code", _SENTENCES)
def test_every_code_has_a_sentence_and_survives_a_table(code):
    reason = Reason(code, VALUES.get(code, {}))
    row = reason.to_row()
    assert json.loads(row["values"]) == dict(reason.values)
    assert from_rows([row]) == [reason]
    assert describe(reason)
    assert describe(Reason.from_row(row)) == describe(reason)


LOW = {"signal": "stability", "value": 0.0312, "above_percent": 93}
SENTENCES = {
    "unreadable": "image file is truncated",
    "refused": "a needs b, got c; try d",
    "signal-percentile": "PEUM 0.0312: higher than on 93 % of the images",
    "prediction-changes": "the prediction changes in 4 of 17 other views: 40°, 60°, 80° and 1 more",
    "views-disagree": "the view 140° (r = 0.31) disagrees with the others on the place",
    "map-moves": "the map moves in 2 of 17 other views: 160° mirrored (r = -0.38); 20°, × 1.25 (r = 0.40)",
    "low-confidence": "low confidence (p = 0.34)",
}


def test_sentences():
    assert {code: describe(Reason(code, VALUES[code])) for code in SENTENCES} == SENTENCES
    only = {"views": ["90°"], "correlations": [0.1], "of": 2}
    every = {"views": ["90°", "180°"], "correlations": [0.1, 0.2], "of": 3}
    for code, values, sentence in (
        ("signal-percentile", LOW, "stability 0.0312: lower than on 93 % of the images"),
        ("map-moves", only, "the map moves in the other view: 90° (r = 0.10)"),
        ("map-moves", every, "the map moves in all 2 other views: 90° (r = 0.10), 180° (r = 0.20)"),
        ("unreadable", {"error": "ZeroDivisionError", "message": ""}, "ZeroDivisionError"),
    ):
        assert describe(Reason(code, values)) == sentence


def test_an_unknown_code_is_refused_here_and_shown_if_a_later_version_wrote_it():
    with pytest.raises(EquicamError, match="one of unreadable, "):
        Reason("because")
    later = Reason.from_row({"code": "because", "values": '{"n": 3}'})
    assert (later.code, describe(later)) == ("text", 'because {"n": 3}')
    assert from_rows(None) == []
