"""Scores of masked images in files."""

import pytest
import torch

import equicam
from equicam.readers.masking import remember_masked_scores
from equicam_paper.context import ScoreFiles
from tests.conftest import Cnn, pictures, seeded
from tests.unit.test_masked_scores import passes

__all__ = ["passes"]


def test_scores_in_files_outlive_the_process(tmp_path, passes):
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(2)
    expected = equicam.explain(model, x, method="rise-400").map
    passes.clear()
    for _ in range(2):
        with ScoreFiles(tmp_path) as files, remember_masked_scores(model.module, files):
            assert torch.equal(equicam.explain(model, x, method="rise-400").map, expected)
    assert sum(passes) == 800
    assert list(tmp_path.iterdir())
    other = equicam.wrap(seeded(Cnn, 1), layer="trunk")
    wanted = equicam.explain(other, x, method="rise-400").map
    with ScoreFiles(tmp_path) as files, remember_masked_scores(model.module, files):
        assert torch.equal(equicam.explain(other, x, method="rise-400").map, wanted)


def test_scores_that_cannot_be_written_end_the_evaluation(tmp_path):
    """Unless something else ends it: that is not hidden."""
    (tmp_path / "taken").write_text("a file")

    def keep(*names, then=None):
        with ScoreFiles(tmp_path / "taken") as files:
            for name in names:
                files[name] = torch.ones(3)
            if then is not None:
                raise then

    for names in (("one",), ("one", "another")):
        with pytest.raises(OSError, match="taken"):
            keep(*names)
    with pytest.raises(KeyboardInterrupt):
        keep("one", then=KeyboardInterrupt())
