"""Model and loss compiled as one: the same numbers, and nothing compiled that is not worth it."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from shoal.core.objective import Objective
from shoal.parallel.compiling import batch_size, compiled_loss

INPUTS, TARGETS = torch.randn(6, 4), torch.randn(6, 4)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean()


OBJECTIVE = Objective(loss, lambda *_: {})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """What is asked here is what goes through the compiler, not what it makes of it."""
    counter = CompileCounterWithBackend("eager")  # type: ignore[no-untyped-call]
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: whole(function, backend=counter))
    torch._dynamo.reset()
    return counter


def test_a_batch_of_the_usual_size_is_compiled_and_the_last_of_an_epoch_is_not(
    compiler: CompileCounterWithBackend,
) -> None:
    model = nn.Linear(4, 4)
    fast = compiled_loss(OBJECTIVE, model, usual_size=6)
    expected = loss(model, (INPUTS, TARGETS))
    expected.backward()
    gradient, model.weight.grad = model.weight.grad, None
    found = fast((INPUTS, TARGETS))
    found.backward()
    assert compiler.frame_count == 1 and found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(model.weight.grad, gradient)
    assert fast((INPUTS[:4], TARGETS[:4])).item() == loss(model, (INPUTS[:4], TARGETS[:4])).item()
    fast((INPUTS, TARGETS))
    assert compiler.frame_count == 1


def test_a_worker_that_always_has_one_sample_less_is_not_left_behind(compiler: CompileCounterWithBackend) -> None:
    """64 samples among three workers are 22, 21 and 21."""
    fast = compiled_loss(OBJECTIVE, nn.Linear(4, 4), usual_size=6)
    for _ in range(3):
        fast((INPUTS[:5], TARGETS[:5]))
    assert compiler.frame_count == 1


def test_another_model_in_the_same_process_is_compiled_for_its_own_sizes(compiler: CompileCounterWithBackend) -> None:
    """PyTorch takes a size that has changed between two compilations of one function for one that always changes."""
    for size in (6, 5, 3):
        compiled_loss(OBJECTIVE, nn.Linear(4, 4), usual_size=size)((INPUTS[:size], TARGETS[:size]))
    assert compiler.frame_count == 3
    nodes = [node for graph in compiler.graphs for node in graph.graph.nodes if "example_value" in node.meta]
    sizes = [size for node in nodes for size in node.meta["example_value"].shape]
    assert sizes and all(type(size) is int for size in sizes), "no size is a symbol"


def test_the_size_of_a_batch_is_that_of_its_first_tensor() -> None:
    assert batch_size((INPUTS, TARGETS)) == batch_size({"x": [INPUTS]}) == 6
    assert batch_size(([torch.tensor(1.0)], "words", INPUTS[:2])) == 2
    assert batch_size("no tensor") is None
