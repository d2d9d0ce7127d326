"""Scores of masked images are computed once where they are remembered, and are never mistaken for others."""

import pytest
import torch

import equicam
from equicam.readers import masking
from equicam.readers.forward import Network
from equicam.readers.masking import remember_masked_scores
from tests.conftest import Cnn, assert_alive, pictures, seeded


@pytest.fixture
def passes(monkeypatch):
    """The number of images in every prediction of masked ones."""
    counts, predict = [], masking.predict

    def counted(network, x, **options):
        counts.append(len(x))
        return predict(network, x, **options)

    monkeypatch.setattr(masking, "predict", counted)
    return counts


@pytest.mark.parametrize("method", ["score-cam", "rise-400"])
def test_a_second_explanation_needs_no_pass(method, passes):
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(2)
    expected = equicam.explain(model, x, method=method)
    assert_alive(expected.map)
    once = sum(passes)
    equicam.explain(model, x, method=method)
    assert sum(passes) == 2 * once, "nothing is remembered unless somebody says so"
    passes.clear()
    with remember_masked_scores():
        for _ in range(2):
            assert torch.equal(equicam.explain(model, x, method=method).map, expected.map)
        assert sum(passes) == once
    equicam.explain(model, x, method=method)
    assert sum(passes) == 2 * once, "and it is forgotten afterwards"


def test_two_ways_of_weighing_share_their_scores(passes):
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(1)
    expected = equicam.explain(model, x, method="score-cam", recipe=equicam.Recipe(protocol="paper"))
    once = sum(passes)
    passes.clear()
    with remember_masked_scores():
        equicam.explain(model, x, method="score-cam")
        found = equicam.explain(model, x, method="score-cam", recipe=equicam.Recipe(protocol="paper"))
    assert sum(passes) == once
    assert torch.equal(found.raw, expected.raw)


@pytest.mark.parametrize("method", ["score-cam", "rise-400"])
def test_other_images_classes_and_networks_have_scores_of_their_own(method):
    one, other = (equicam.wrap(seeded(Cnn, seed), layer="trunk") for seed in (0, 1))
    x, y = pictures(1), pictures(1, seed=4)
    cases = [(one, x, 0), (one, x, 1), (one, y, 0), (other, x, 0)]
    expected = [equicam.explain(*case, method=method, target=target).map for *case, target in cases]
    with remember_masked_scores():
        for (*case, target), wanted in zip(cases, expected, strict=True):
            assert torch.equal(equicam.explain(*case, method=method, target=target).map, wanted)
    assert not any(torch.equal(expected[0], wanted) for wanted in expected[1:])


def test_it_does_nothing_inside_itself(passes):
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(1)
    with remember_masked_scores():
        for _ in range(2):
            with remember_masked_scores():
                equicam.explain(model, x, method="rise-400")
    assert sum(passes) == 400


@pytest.mark.parametrize(("fit", "sizes"), [(2800, [1000] * 8), (300, [250] * 32), (255, None)])
def test_compiled_batches_are_even_whatever_memory_is_free(fit, sizes, monkeypatch):
    monkeypatch.setattr(masking, "views_that_fit", lambda _x: fit)
    model = equicam.wrap(seeded(Cnn), layer="trunk")
    eager, compiled = Network(model), Network(model, predict=masking.predict)
    masks = torch.arange(8000)
    found = [len(one) for one in masking._batches(compiled, masks, pictures(1))]
    assert sum(found) == 8000
    assert max(found) - min(found) <= 1
    assert sizes is None or found == sizes
    assert max(found) <= fit
    most = min(256, fit)
    assert {len(one) for one in masking._batches(eager, masks, pictures(1))} <= {most, 8000 % most}
