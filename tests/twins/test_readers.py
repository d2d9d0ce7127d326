"""Every other method against its formula written out in loops, one picture, channel, mask and position at a time."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import equicam
from equicam.core.views import rotate
from equicam.evaluate.controls import blur_maps
from equicam.methods import METHODS, Method, find_method
from equicam.protocol import PAPER
from equicam.readers.gradients import opti_cam, smooth_grad_cam_pp
from equicam.readers.masking import rise, score_cam
from equicam.readers.perturb import recipro_cam
from equicam.readers.reading import without_gradient
from tests.conftest import ChannelsLast, Cnn, Vit, assert_alive, explained, light, method_of, pictures, seeded
from tests.twins import slow

SIZE = 20
AS_PUBLISHED = equicam.Recipe(protocol="paper")


@pytest.fixture(scope="module")
def net():
    return seeded(Cnn)


@pytest.fixture(scope="module")
def x():
    return pictures(2, SIZE, SIZE)


def model_of(net) -> equicam.Model:
    return equicam.wrap(net, layer="trunk")


@torch.no_grad()
def prob(net, image, c):
    return net(image[None]).softmax(1)[0, c].item()


def agree(found: equicam.Explanation, maps: list[np.ndarray], *, atol: float = 1e-10) -> None:
    expected = torch.from_numpy(np.stack(maps))
    assert_alive(expected)
    torch.testing.assert_close(found.map, expected, atol=atol, rtol=0)


def finished(plane: np.ndarray) -> np.ndarray:
    return slow.stretch(slow.enlarge(np.maximum(plane, 0), (SIZE, SIZE)))


def parts(net, x, i):
    """One picture's features and top class, by hand."""
    with torch.no_grad():
        acts = net.trunk(x[i : i + 1])[0].numpy()
        return acts, int(net(x[i : i + 1]).argmax())


@pytest.mark.parametrize("weigh", ["softmax", "softmax_of_logits", "relu_minus_full_image", "probability"])
@pytest.mark.parametrize("channels", [None, 4])
def test_score_cam(net, x, weigh, channels):
    reader = without_gradient(partial(score_cam, weigh=weigh, channels=channels))
    target = [1, 4]  # not on top, so that masking can raise them
    found = equicam.explain(model_of(net), x, method=Method("", reader=reader), target=target)
    maps = []
    for i, c in enumerate(target):
        acts, _ = parts(net, x, i)
        order = sorted(range(len(acts)), key=lambda k: -abs(acts[k].mean()))[: channels or len(acts)]
        said = {}
        for k in order:
            mask = torch.from_numpy(slow.stretch(slow.enlarge(acts[k], (SIZE, SIZE))))
            with torch.no_grad():
                scores = net((x[i] * mask)[None])[0]
            said[k] = float(scores[c]) if weigh == "softmax_of_logits" else float(scores.softmax(0)[c])
        if weigh == "relu_minus_full_image":
            weights = {k: max(s - prob(net, x[i], c), 0) for k, s in said.items()}
        elif weigh == "probability":
            weights = said
        else:
            total = sum(np.exp(s) for s in said.values())
            weights = {k: np.exp(s) / total for k, s in said.items()}
        maps.append(finished(sum(w * acts[k] for k, w in weights.items())))
    agree(found, maps)


def test_score_cam_is_canonical_by_default_and_the_authors_by_name(net, x):
    def maps(method, **options):
        found = equicam.explain(model_of(net), x, method=method, target=[1, 4], **options).map
        assert_alive(found)
        return found

    soft, authors = maps("score-cam"), maps("score-cam", recipe=AS_PUBLISHED)
    assert torch.equal(soft, maps(method_of(score_cam)))
    assert torch.equal(authors, maps(method_of(score_cam, weigh="relu_minus_full_image")))
    assert not torch.allclose(authors, soft, atol=1e-2)
    with pytest.raises(equicam.EquicamError, match="weigh needs one of softmax"):
        maps(method_of(score_cam.__wrapped__, weigh="softmax_cic"))


def test_aug_score_cam_is_six_views_turned_back(net, x):
    model = model_of(net)
    found = equicam.explain(model, x, method="aug-score-cam")
    target = found.target
    views = []
    for k in range(6):
        single = equicam.explain(model, equicam.rotate(x, 60 * k), method="score-cam", target=target)
        views.append([slow.turn(m, -60 * k) for m in single.map.numpy()])
    agree(found, [slow.stretch(m) for m in np.mean(views, axis=0)])


@pytest.mark.parametrize("kind", ["nchw", "nhwc"])
def test_ablation_cam(kind, x):
    net = seeded(Cnn if kind == "nchw" else ChannelsLast, seed=7)
    model = equicam.wrap(net, layer="trunk" if kind == "nchw" else "norm")
    found = equicam.explain(model, x, method="ablation-cam")
    maps = []
    for i in range(2):
        with torch.no_grad():
            one = x[i : i + 1]
            acts = net.trunk(one) if kind == "nchw" else net.norm(net.stem(one).permute(0, 2, 3, 1))
            scores = net.rest(acts)[0]
            c = int(scores.argmax())
            plane = 0
            for k in range(6):
                without = acts.clone()
                (without[:, k] if kind == "nchw" else without[..., k]).zero_()
                weight = (scores[c] - net.rest(without)[0, c]) / scores[c].abs()
                plane = plane + weight * (acts[0, k] if kind == "nchw" else acts[0, ..., k])
        maps.append(finished(plane.numpy()))
    agree(found, maps)


@pytest.mark.parametrize("mask", ["one-hot", "gaussian"])
def test_recipro_cam(net, x, mask):
    found = equicam.explain(model_of(net), x, method=method_of(recipro_cam, mask=mask))
    maps = []
    for i in range(2):
        acts, c = parts(net, x, i)
        h, w = acts.shape[1:]
        plane = np.zeros((h, w))
        for a in range(h):
            for b in range(w):
                left = np.zeros_like(acts)
                if mask == "one-hot":
                    left[:, a, b] = acts[:, a, b]
                else:
                    for da, row in zip((-1, 0, 1), (1, 2, 1), strict=True):
                        for db, column in zip((-1, 0, 1), (1, 2, 1), strict=True):
                            if 0 <= a + da < h and 0 <= b + db < w:
                                left[:, a + da, b + db] = acts[:, a, b] * row * column / 16
                with torch.no_grad():
                    plane[a, b] = net.rest(torch.from_numpy(left)[None]).softmax(1)[0, c]
        maps.append(slow.stretch(slow.enlarge(plane, (SIZE, SIZE))))
    agree(found, maps)


@pytest.mark.parametrize("prefix", [1, 3])
def test_recipro_cam_on_tokens_keeps_the_prefix_and_lets_the_last_block_attend(prefix):
    net, x = seeded(lambda: Vit((SIZE, SIZE), prefix)), pictures(2, SIZE, SIZE)
    found = explained(net, x, method="recipro-cam", layer="blocks.1.norm1")
    maps = []
    for i in range(2):
        with torch.no_grad():
            patches = net.patch(x[i : i + 1]).flatten(2).transpose(1, 2)
            tokens = net.blocks[0](torch.cat((net.tokens, patches), 1) + net.place)
            c = int(net(x[i : i + 1]).argmax())
            plane = np.zeros(25)
            for p in range(25):
                left = torch.zeros_like(tokens)
                left[:, :prefix] = tokens[:, :prefix]
                left[:, prefix + p] = tokens[:, prefix + p]
                plane[p] = net.pool(net.norm(net.blocks[1](left))).softmax(1)[0, c]
        maps.append(slow.stretch(slow.enlarge(plane.reshape(5, 5), (SIZE, SIZE))))
    agree(found, maps)


def test_rise(net, x):
    found = equicam.explain(model_of(net), x, method=method_of(rise, masks=9))
    rng = np.random.default_rng(42)
    grids = (rng.random((9, 7, 7)) < 0.5).astype(float)
    cell = SIZE // 7 + 1
    total, mass = np.zeros((2, SIZE, SIZE)), np.zeros((SIZE, SIZE))
    for grid in grids:
        dx, dy = int(rng.integers(0, cell)), int(rng.integers(0, cell))
        mask = slow.enlarge(grid, (8 * cell, 8 * cell))[dy : dy + SIZE, dx : dx + SIZE]
        mass += mask
        for i in range(2):
            c = int(net(x[i : i + 1]).argmax())
            total[i] += prob(net, x[i] * torch.from_numpy(mask), c) * mask
    agree(found, [slow.stretch(t / (mass + 1e-8)) for t in total])


def full_values(model, x, score, methods):
    """A score at 30°, over the full square, by the paper's protocol."""
    rows = equicam.evaluate(model, x, methods=methods, scores=[score], angles=[30], recipe=AS_PUBLISHED)
    return [row["value"] for row in rows.to_pylist() if (row["region"], row["angle"]) == ("full", 30)]


def correlations(before, after):
    pairs = zip(after, rotate(before, 30, fill="zeros"), strict=True)
    return [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in pairs]


@pytest.mark.parametrize("name", ["rise-400", "score-cam-80"])
def test_by_the_papers_protocol_some_maps_are_rotated_as_they_are(net, x, name, monkeypatch):
    """RISE's map is far above 0 everywhere: stretched to [0, 1] or not decides what zeros in its corners mean."""
    monkeypatch.setitem(METHODS, "rise-400", light("rise-400"))
    model = model_of(net)
    found = full_values(model, x, "eq", [name])
    plain = equicam.explain(model, x, method=name, recipe=AS_PUBLISHED)
    rotated = equicam.explain(model, rotate(x, 30), method=name, recipe=AS_PUBLISHED, target=plain.target)
    raw, stretched = correlations(plain.raw, rotated.raw), correlations(plain.map, rotated.map)
    np.testing.assert_allclose(found, raw, atol=1e-9)
    if name == "rise-400":
        assert plain.raw.amin() > 0.1 * plain.raw.amax()
        assert np.abs(np.subtract(raw, stretched)).max() > 0.02


def test_controls_and_structural_similarity_take_stretched_maps(net, x, monkeypatch):
    monkeypatch.setitem(METHODS, "rise-400", light("rise-400"))
    few = find_method("rise-400", PAPER)
    model = model_of(net)
    plain = equicam.explain(model, x, method=few, recipe=AS_PUBLISHED)
    rotated = equicam.explain(model, rotate(x, 30), method=few, recipe=AS_PUBLISHED, target=plain.target)
    blurred = correlations(blur_maps(plain.map, 1), blur_maps(rotated.map, 1))
    np.testing.assert_allclose(full_values(model, x, "eq", ["rise-400@blur-1"]), blurred, atol=1e-9)
    ways = ({"it": replace(few, stretched=one)} for one in (False, True))
    as_it_is, stretched = (full_values(model, x, "eq-ssim", one) for one in ways)
    assert as_it_is == stretched
    assert np.std(as_it_is) > 1e-3


def test_the_authors_do_not_stretch_three_kinds_of_maps():
    unstretched = {name for name in METHODS if not find_method(name, PAPER).stretched}
    assert unstretched == {"rise", "rise-400", "score-cam-80"}
    assert all(method.stretched for method in METHODS.values())


def test_the_first_draws_of_the_masks_are_the_papers():
    """224 px: 33 px cells, grids drawn before all shifts, so a smaller set shares its grids and not its shifts."""
    from equicam.readers.masking import rise_grids

    many, shifts = rise_grids(8000, (224, 224), 42)
    few, others = rise_grids(400, (224, 224), 42)
    assert torch.equal(many[:400], few)
    assert not torch.equal(shifts[:400], others)
    assert shifts.min() == 0
    assert shifts.max() == 32
    assert 0.49 < many.double().mean() < 0.51


def test_smooth_grad_cam_pp(net, x):
    reader = without_gradient(partial(smooth_grad_cam_pp, copies=3, sigma=0.3))
    found = equicam.explain(model_of(net), x, method=Method("", reader=reader))
    twin = slow.Slow(net.trunk, net.rest, combine=slow.grad_cam_pp)
    maps = []
    for i in range(2):
        _, c = parts(net, x, i)
        total = 0
        for copy in range(3):
            noise = torch.randn((3, SIZE, SIZE), generator=torch.Generator().manual_seed(42 * 100_003 + copy))
            noisy = (x[i] + 0.3 * noise.double()).numpy()
            total = total + twin.explain(noisy, (0.0,), "map", "map", lambda p, top: 1, target=c)["map"]
        maps.append(slow.stretch(total / 3))
    agree(found, maps)


def test_opti_cam(net, x):
    """Adam written out, one picture at a time."""
    steps = 5
    found = equicam.explain(model_of(net), x, method=method_of(opti_cam, steps=steps))
    maps = []
    for i in range(2):
        acts, c = parts(net, x, i)
        a = torch.from_numpy(acts)
        beta, m, v = torch.zeros(len(acts)).double(), 0.0, 0.0
        for t in range(1, steps + 1):
            b = beta.clone().requires_grad_()
            plane = sum(w * p for w, p in zip(b.softmax(0), a, strict=True))
            large = torch.nn.functional.interpolate(plane[None, None], (SIZE, SIZE), mode="bilinear")[0, 0]
            mask = (large - large.min()) / (large.max() - large.min() + 1e-8)
            (-net((x[i] * mask)[None])[0, c]).backward()
            m, v = 0.9 * m + 0.1 * b.grad, 0.999 * v + 0.001 * b.grad**2
            beta = beta - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        maps.append(finished(sum(float(w) * p for w, p in zip(beta.softmax(0), acts, strict=True))))
    agree(found, maps, atol=1e-8)
    untouched = seeded(Cnn)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), untouched.parameters(), strict=True))


def test_eigen_cam(net, x):
    found = equicam.explain(model_of(net), x, method="eigen-cam")
    maps = []
    for i in range(2):
        acts, _ = parts(net, x, i)
        flat = acts.reshape(len(acts), -1).T
        flat = flat - flat.mean(0)
        values, vectors = np.linalg.eigh(flat.T @ flat)
        assert values[-1] > 1.05 * values[-2]  # one direction stands out
        plane = flat @ vectors[:, -1]
        plane *= np.sign((plane**3).sum())
        maps.append(finished(plane.reshape(acts.shape[1:])))
    agree(found, maps, atol=1e-8)


def attentions(net, x):
    """A tiny transformer's attention, with its projections multiplied out, on the graph."""
    patches = net.patch(x).flatten(2).transpose(1, 2)
    tokens = torch.cat((net.tokens, patches), 1) + net.place
    kept = []
    for block in net.blocks:
        y = block.norm1(tokens)
        q, k, v = (y @ block.attn.in_proj_weight.T + block.attn.in_proj_bias).chunk(3, 2)
        heads = []
        for head in range(2):
            own = slice(6 * head, 6 * head + 6)
            attention = (q[..., own] @ k[..., own].transpose(1, 2) / 6**0.5).softmax(2)
            kept.append(attention)
            heads.append(attention @ v[..., own])
        tokens = tokens + block.attn.out_proj(torch.cat(heads, 2))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return kept, net.pool(net.norm(tokens))


@pytest.mark.parametrize("method", ["rollout", "transformer-attribution"])
@pytest.mark.parametrize("prefix", [1, 2])
def test_attention(method, prefix):
    net, x = seeded(lambda: Vit((SIZE, SIZE), prefix)), pictures(2, SIZE, SIZE)
    found = explained(net, x, method=method, layer="blocks.1.norm1")
    maps = []
    for i in range(2):
        kept, scores = attentions(net, x[i : i + 1])
        torch.testing.assert_close(scores, net(x[i : i + 1]))
        grads = torch.autograd.grad(scores.max(), kept)
        size = kept[0].shape[-1]
        flow = np.eye(size)
        for block in range(2):
            both = [kept[2 * block + head][0].detach().numpy() for head in range(2)]
            slopes = [grads[2 * block + head][0].numpy() for head in range(2)]
            if method == "rollout":
                mixed = (sum(both) / 2 + np.eye(size)) / 2
                flow = mixed / mixed.sum(1, keepdims=True) @ flow
            else:
                cam = sum(np.maximum(g * a, 0) for g, a in zip(slopes, both, strict=True)) / 2
                flow = flow + cam @ flow
        maps.append(slow.stretch(slow.enlarge(flow[0, prefix:].reshape(5, 5), (SIZE, SIZE))))
    agree(found, maps)
