"""Table clip: a zero-shot model on aerial tiles."""

from collections.abc import Iterator

from equicam.models.libraries import ZeroShot
from equicam_paper.claims import METHODS, Claim
from equicam_paper.context import Context
from equicam_paper.domains import metric_rows
from equicam_paper.experiment import Experiment
from equicam_paper.measure import NO_LABEL, accuracy, constant_share, eq_where_defined, gain_row
from equicam_paper.rows import Remark, Row, compare, note

PUBLISHED = ("Grad-CAM", "Grad-CAM++", "LayerCAM", "AugCAM unaligned", "EquiGrad-CAM+PCF", "EquiGrad-CAM")
COMMAND = (
    "a zero-shot CLIP: equicam-paper reproduce clip --data FOLDER (with NWPU-RESISC45, as unpacked) --domain RESISC45 --n 1000 "
    "--model open_clip:ViT-B-16/openai, or offline --model open_clip:ViT-B-16 --weights FILE of the same weights"
)


def measure(context: Context) -> Iterator[Row]:
    """Eq, insertion and deletion; accuracy; how often EquiGrad-CAM's map is constant, and Eq without those."""
    if context.domain != "RESISC45" or not isinstance(context.model.module, ZeroShot):
        return
    found = context.evaluate_both([METHODS[name] for name in PUBLISHED], ["eq", "insertion", "deletion"])
    yield from metric_rows("clip", found, PUBLISHED)
    right = accuracy(found)
    reason = (
        "the prompts are not published: ours are `a photo of a CLASS.`, with the folders' names as classes"
        if right.clean
        else NO_LABEL
    )
    yield compare("clip.acc", right, label="accuracy", reason=reason)
    yield gain_row("clip.gain", found)
    constant = found.map(constant_share, "equigrad-cam")
    yield compare("const.clip.eg", constant, label="equigrad-cam: constant maps")
    defined = found.map(eq_where_defined, "equigrad-cam")
    yield compare("clip.eg.cond", defined, label="equigrad-cam where its map is not constant")


def _missing(_context: Context, _claim: Claim) -> Remark:
    return note(COMMAND)


EXPERIMENT = Experiment(
    "Table clip: a zero-shot model on aerial tiles",
    ("clip.", "const.clip"),
    measure,
    needs="a zero-shot CLIP and RESISC45",
    missing=_missing,
)
