"""How many views share a forward pass: fewer where the network's layers are wide."""

import torch
from torch import nn

import equicam
from equicam.readers.forward import Network, free_bytes, widest_layer_bytes


def net(width: int, *, in_place: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=in_place), nn.MaxPool2d(4), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(width, 5),
    )  # fmt: skip


def widest(module: nn.Module, x: torch.Tensor) -> int:
    return widest_layer_bytes(Network(equicam.wrap(module, layer="2")), x)


def test_the_widest_layer_is_measured_on_one_image():
    x = torch.randn(3, 3, 32, 32)
    assert widest(net(8), x) == 4 * 32 * 32 * (3 + 8)
    assert widest(net(8, in_place=False), x) == 4 * 32 * 32 * (8 + 8)
    assert widest(net(16), x[:, :, :16, :16]) == 4 * 16 * 16 * (3 + 16)


def test_it_runs_the_network_once_and_leaves_it_as_it_was():
    module, seen, x = net(8).train(), [], torch.randn(3, 3, 32, 32)
    module.register_forward_pre_hook(lambda _module, inputs: seen.append((len(inputs[0]), module.training)))
    assert widest(module, x) == widest(module, x)
    assert (seen, module.training) == ([(1, False)], True)
    scripted = net(8)
    scripted[1] = torch.jit.script(nn.ReLU())  # takes no hook
    assert widest(scripted, x) == 4 * 32 * 32 * (3 + 8)
    assert not any(part._forward_hooks for one in (module, scripted) for part in one.modules())


def test_a_network_that_fails_is_left_to_the_views_own_pass():
    x = torch.randn(2, 3, 32, 32)
    usual = widest_layer_bytes(None, x)
    assert usual == 2 * 64 * 32 * 32 * 4
    assert widest(nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Flatten()), x) == usual


def test_memory_that_torch_keeps_does_not_change_a_plan(monkeypatch):
    """A second call of the same size must not run otherwise because of what the first one left in torch's hands."""
    total, held = 100, {"reserved": 0, "allocated": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (total - held["reserved"], total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: held["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: held["allocated"])
    device = torch.device("cuda")
    assert free_bytes(device, with_kept=True) == 100
    held["reserved"] = 60
    assert free_bytes(device, with_kept=True) == 100
    assert free_bytes(device, with_kept=False) == 40
    held["allocated"] = 30
    assert free_bytes(device, with_kept=True) == 70
