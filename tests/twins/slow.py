"""The paper, written out in NumPy loops: every channel of every view is warped, nothing is shared or rearranged.

It calls the library for nothing. A network is given as two callables: pixels → features, features → scores.
"""

import numpy as np
import torch


def look(plane, y, x, fill):
    """Bilinear value of a plane at real coordinates, outside by reflection about the border pixels or zero."""
    height, width = plane.shape
    if fill == "reflect":
        y, x = bounce(y, height), bounce(x, width)
    y0, x0 = int(np.floor(y)), int(np.floor(x))
    total = 0.0
    for yy, xx in ((y0, x0), (y0, x0 + 1), (y0 + 1, x0), (y0 + 1, x0 + 1)):
        if 0 <= yy < height and 0 <= xx < width:
            total += plane[yy, xx] * (1 - abs(y - yy)) * (1 - abs(x - xx))
    return total


def bounce(v, length):
    period = 2 * (length - 1)
    v = abs(v) % period
    return period - v if v > length - 1 else v


def turn(plane, degrees, fill="reflect"):
    """Content turned counter-clockwise as displayed."""
    height, width = plane.shape
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    cy, cx = (height - 1) / 2, (width - 1) / 2
    out = np.zeros_like(plane)
    for i in range(height):
        for j in range(width):
            dy, dx = i - cy, j - cx
            out[i, j] = look(plane, cy + dx * sin + dy * cos, cx + dx * cos - dy * sin, fill)
    return out


def enlarge(plane, size):
    """Bilinear upsampling between pixel areas; edges repeat."""
    out = np.zeros(size)
    for i in range(size[0]):
        for j in range(size[1]):
            y = np.clip((i + 0.5) * plane.shape[0] / size[0] - 0.5, 0, plane.shape[0] - 1)
            x = np.clip((j + 0.5) * plane.shape[1] / size[1] - 0.5, 0, plane.shape[1] - 1)
            out[i, j] = look(plane, y, x, "reflect")
    return out


def stretch(plane):
    span = plane.max() - plane.min()
    return (plane - plane.min()) / span if span > 0 else np.zeros_like(plane)


def grad_cam(acts, grads):
    return sum(g.mean() * a for a, g in zip(acts, grads, strict=True))


def grad_cam_rectified(acts, grads):
    return sum(max(g.mean(), 0) * a for a, g in zip(acts, grads, strict=True))


def grad_cam_pp(acts, grads):
    plane = np.zeros_like(acts[0])
    for a, g in zip(acts, grads, strict=True):
        alpha = g**2 / (2 * g**2 + a.sum() * g**3 + 1e-6)
        plane += (alpha * np.maximum(g, 0)).sum() * a
    return plane


def grad_cam_pp_of_products(acts, grads):
    plane = np.zeros_like(acts[0])
    for a, g in zip(acts, grads, strict=True):
        alpha = np.maximum(g**2 / (2 * g**2 + (a * g**3).sum() + 1e-8), 0)
        plane += (alpha * np.maximum(g, 0)).sum() * a
    return plane


def xgrad_cam(acts, grads):
    return sum((g * a).sum() / (a.sum() + 1e-8) * a for a, g in zip(acts, grads, strict=True))


def layer_cam(acts, grads):
    return sum(np.maximum(g, 0) * a for a, g in zip(acts, grads, strict=True))


STEPS = ("features", "combined", "rectified", "upsampled", "map")


class Slow:
    """One picture, explained the long way."""

    def __init__(self, trunk, rest, planes=lambda f: f, combine=grad_cam):
        self.trunk, self.rest, self.planes, self.combine = trunk, rest, planes, combine

    def read(self, image, target, score):
        """Features, their gradients and the probabilities of one view, through an ordinary autograd graph."""
        acts = self.trunk(torch.from_numpy(image)[None]).detach().requires_grad_()
        scores = self.rest(acts)
        if target is None:
            target = int(scores.argmax())
        score(scores[0], target).backward()
        probs = scores.softmax(1)[0].detach().numpy()
        return (self.planes(acts.detach())[0].numpy(), self.planes(acts.grad)[0].numpy()), probs, target

    def step(self, stage, value, size):
        """One step along the chain: the stage after `stage`, and the value there."""
        after = STEPS[STEPS.index(stage) + 1]
        return after, {
            "combined": lambda: self.combine(*value),
            "rectified": lambda: np.maximum(value, 0),
            "upsampled": lambda: enlarge(value, size),
            "map": lambda: stretch(value),
        }[after]()

    def carry(self, stage, value, to, size):
        while stage != to:
            stage, value = self.step(stage, value, size)
        return value

    def explain(
        self, image, angles, align_at, mean_at, gate, fill="reflect", target=None, score=lambda s, c: s[c]
    ):
        """Everything the library promises of one picture, for one set of views."""
        size = image.shape[1:]
        presented, p0, target = self.read(image, target, score)
        views = [np.stack([turn(plane, a) for plane in image]) for a in angles]
        readings = [self.read(view, target, score) for view in views]
        probs = np.array([p[target] for _, p, _ in readings])
        tops = np.array([p.argmax() for _, p, _ in readings])
        gates = np.array([gate(p, top == target) for p, top in zip(probs, tops, strict=True)])
        features = [value for value, _, _ in readings]
        if gates.sum() == 0:
            angles, features, weights = [0.0], [presented], np.ones(1)
        else:
            weights = gates / gates.sum()

        def back(value, angle):
            """One view's tensors turned back, plane by plane; the channels of features one at a time."""
            if align_at is None:
                return value
            if isinstance(value, tuple):
                return tuple(np.stack([turn(plane, -angle, fill) for plane in part]) for part in value)
            return turn(value, -angle, fill)

        def seen(shape):
            """How much of each cell each view has looked at."""
            if fill != "coverage" or align_at is None:
                return [np.ones(shape) for _ in angles]
            return [turn(np.ones(shape), -a, "zeros") for a in angles]

        def average(values):
            if isinstance(values[0], tuple):
                return tuple(average([v[i] for v in values]) for i in range(2))
            cover = sum(w * c for w, c in zip(weights, seen(values[0].shape[-2:]), strict=True))
            total = sum(w * v for w, v in zip(weights, values, strict=True))
            return np.divide(
                total, cover, out=np.zeros_like(total), where=np.broadcast_to(cover > 0, total.shape)
            )

        start = align_at or mean_at
        at = [self.carry("features", f, start, size) for f in features]
        turned = [back(v, a) for v, a in zip(at, angles, strict=True)]
        mean = average([self.carry(start, v, mean_at, size) for v in turned])
        raw = mean if mean_at == "map" else self.carry(mean_at, mean, "upsampled", size)

        maps = [
            back(self.carry("features", f, "map", size), a) for f, a in zip(features, angles, strict=True)
        ]
        center, covers = average(maps), seen(size)
        spread, cover = np.zeros(size), sum(w * c for w, c in zip(weights, covers, strict=True))
        for i in range(size[0]):
            for j in range(size[1]):
                for w, m, c in zip(weights, maps, covers, strict=True):
                    if c[i, j] > 0:
                        spread[i, j] += w * c[i, j] / cover[i, j] * (m[i, j] / c[i, j] - center[i, j]) ** 2
        return {
            "map": stretch(raw),
            "raw": raw,
            "peum": spread,
            "peum_score": spread.mean(),
            "view_confidence": probs,
            "view_flips": tops != p0.argmax(),
            "view_kept": gates > 0,
        }
