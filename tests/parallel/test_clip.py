"""One norm and one loss scale for a model that is divided: those of one process, the same on every worker."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.core.process import Process
from shoal.parallel.clip import SharedScaler, clip_gradients, num_holders

SHAPES = {"a": (7, 3), "b": (2, 5), "c": (4,), "few": (1, 6), "scalar": (), "empty": (0, 2)}


def wholes(scale: float = 1.0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Values and gradients of some parameters."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * scale)
        for name, shape in SHAPES.items()
    }


def divided(process: Process, way: str, scale: float = 1.0) -> dict[str, nn.Parameter]:
    """The same on some workers."""
    line = init_device_mesh("cpu", (process.world_size,))
    mesh, placements = line, [Shard(0)]
    if way == "copies":
        mesh, placements = init_device_mesh("cpu", (2, process.world_size // 2)), [Replicate(), Shard(0)]
    parameters = {}
    for name, (value, gradient) in wholes(scale).items():
        if name == "c" or not value.ndim:  # which every worker has whole, plain or not
            parameter = nn.Parameter(value if name == "scalar" else distribute_tensor(value, line, [Replicate()]))
            parameter.grad = gradient if name == "scalar" else distribute_tensor(gradient, line, [Replicate()])
        else:
            parameter = nn.Parameter(distribute_tensor(value, mesh, placements))
            parameter.grad = distribute_tensor(gradient, mesh, placements)
        parameters[name] = parameter
    return parameters


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def clipped(process: Process, way: str, max_norm: float) -> tuple[float, dict[str, torch.Tensor], list[int]]:
    parameters = divided(process, way)
    unused = nn.Parameter(torch.zeros(3))
    norm = clip_gradients(
        [*parameters.values(), unused], max_norm, lambda tensor: num_holders(tensor, process.world_size)
    )
    assert norm.dtype == torch.float32 and unused.grad is None
    holders = [num_holders(parameter, process.world_size) for parameter in parameters.values()]
    return float(norm), {name: whole(parameter.grad) for name, parameter in parameters.items()}, holders


@pytest.mark.parametrize("way", ["shards", "copies"])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_gradients_are_clipped_by_the_norm_of_the_whole(ranks, way, max_norm):
    parameters = []
    for value, gradient in wholes().values():
        parameters.append(nn.Parameter(value))
        parameters[-1].grad = gradient.clone()
    expected = float(nn.utils.clip_grad_norm_(parameters, max_norm))
    found = ranks(4)(clipped, way, max_norm)
    each = 1 if way == "shards" else 2
    for norm, gradients, holders in found:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert holders == [each, each, 4, each, 4, each]
        for parameter, gradient in zip(parameters, gradients.values(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-7)
    assert len({norm for norm, *_ in found}) == 1, "the same bits, or weights would go apart"


def clip_alone(process: Process) -> list[float]:
    """Where only one has gradients, and where nobody has."""
    parameter = nn.Parameter(torch.zeros(2))
    norms = [float(clip_gradients([parameter], 1.0, lambda tensor: 1))]
    if process.rank == 1:
        parameter.grad = torch.tensor([3.0, 4.0])
    norms.append(float(clip_gradients([parameter], 1.0, lambda tensor: 1)))
    norms.append(0.0 if parameter.grad is None else float(parameter.grad.norm()))
    return norms


def test_a_worker_without_gradients_takes_part(ranks):
    assert ranks(2)(clip_alone) == [[0.0, 5.0, 0.0], [0.0, 5.0, pytest.approx(1.0, abs=1e-6)]]


def test_one_process_needs_no_others():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert float(clip_gradients([parameter], 1.0, lambda tensor: num_holders(tensor, 1))) == 5.0
    parameter.grad = torch.tensor([3.0, torch.inf])
    assert float(clip_gradients([parameter], 1.0, lambda tensor: 1)) == torch.inf


def scaled_steps(process: Process, name: str, bad_rank: int, by_hand: bool) -> list[tuple[float, float, float]]:
    """Some steps, in the second of which one worker alone has an infinity: scale, weights, how far they went."""
    parameters = divided(process, "shards", scale=2.0**16)
    if process.rank == bad_rank:
        parameters["idle"] = nn.Parameter(torch.zeros(1))  # one that others have not, and that has no gradient
    kind = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
    optimizer = kind([p for p in parameters.values() if p.numel()], lr=0.1, foreach=False)
    scaler = SharedScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.zeros(()))  # as a loss is: it makes the scale
    given = {key: (p.grad.clone(), p) for key, p in parameters.items() if p.grad is not None}
    went = []
    for step in range(3):
        for gradient, parameter in given.values():
            parameter.grad = gradient.clone()
        if step == 1 and process.rank == bad_rank:
            parameters["a"].grad.to_local()[0, 0] = torch.inf
        if by_hand:
            scaler.unscale_(optimizer)
            torch.testing.assert_close(whole(parameters["scalar"].grad), wholes()["scalar"][1])
        before = whole(parameters["a"].detach())
        scaler.step(optimizer)
        scaler.update()
        after = whole(parameters["a"].detach())
        went.append((scaler.get_scale(), float(after.double().sum()), float((after - before).abs().max())))
        if step == 1:
            given = {key: (gradient / 2, parameter) for key, (gradient, parameter) in given.items()}
    return went


@pytest.mark.parametrize("by_hand", [True, False], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("bad_rank", [0, 3])
def test_an_overflow_on_one_worker_is_one_on_all(ranks, name, bad_rank, by_hand):
    found = ranks(4)(scaled_steps, name, bad_rank, by_hand)
    assert all(worker == found[0] for worker in found)
    scales, _, moved = zip(*found[0], strict=True)
    assert scales == (2.0**16, 2.0**15, 2.0**15), "halved once, everywhere"
    assert moved[0] > 0 and moved[1] == 0 and moved[2] > 0, "and that step is left out by all"


def no_gradient_at_all(process: Process) -> tuple[float, int]:
    parameter = nn.Parameter(torch.zeros(2))
    if process.rank == 1:
        parameter.grad = torch.tensor([torch.inf, 1.0])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = SharedScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), int(torch.count_nonzero(parameter.detach()))


def test_a_worker_that_has_no_gradient_hears_of_an_overflow(ranks):
    assert ranks(2)(no_gradient_at_all) == [(2.0**15, 0)] * 2
