"""Codes of column `reason`; no torch here, because summaries are read without it."""

from enum import StrEnum


class ReasonCode(StrEnum):
    """Why a value is undefined or needs a remark. Column `reason` holds the code; programs compare codes only."""

    CONSTANT_MAP = "constant map"
    CONSTANT_AT_SOME_ANGLE = "a constant map at some angle"
    UNDEFINED_MAP = "undefined map"
    NO_OTHER_IMAGE = "no other image to compare with"
    NO_OTHER_CLASS = "no image of another class to compare with"
    NO_OTHER_REGION = "no other image with a region to borrow"
    TOP1_CHANGED = "top-1 changed"
    CONSTANT_GRADIENT = "the gradient is the same at every position: there is nothing to correlate"
    NO_VARYING_CHANNEL = "no channel varies"
    NO_LABEL = "no label"
    NO_LABEL_REGION = "no label region"
    LABEL_REGION_OUTSIDE = "label region outside the model's input"
    NO_BOXES = "no boxes"
    BOXES_OUTSIDE = "boxes outside the model's input"
    FLAT = "flat"
