"""The optimizer of a recipe: kind, options, and what decays."""

import pytest
import torch
from torch import nn

from shoal.parallel.optimizer import build_optimizer
from shoal.parallel.section import OptimSection


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_the_kind_and_its_options(name, kind):
    given = {"momentum": 0.5, "nesterov": True} if name == "sgd" else {"betas": [0.8, 0.9], "eps": 1e-5}
    optimizer = build_optimizer(model(), OptimSection(name=name, lr=0.25, **given))
    assert type(optimizer) is kind
    options = optimizer.param_groups[0]
    assert options["lr"] == 0.25 and options["fused"] is True
    if name == "sgd":
        assert options["momentum"] == 0.5 and options["nesterov"]
    else:
        assert options["betas"] == (0.8, 0.9) and options["eps"] == 1e-5


def test_norms_and_biases_do_not_decay_unless_asked():
    left_out = build_optimizer(model(), OptimSection(weight_decay=0.1))
    decayed, plain = left_out.param_groups
    assert (
        decayed["weight_decay"] == 0.1 and all(p.ndim >= 2 for p in decayed["params"]) and len(decayed["params"]) == 2
    )
    assert plain["weight_decay"] == 0.0 and all(p.ndim < 2 for p in plain["params"]) and len(plain["params"]) == 4
    (everything,) = build_optimizer(model(), OptimSection(weight_decay=0.1, decay_norms_and_biases=True)).param_groups
    assert everything["weight_decay"] == 0.1 and len(everything["params"]) == 6


def test_frozen_parameters_are_left_alone():
    frozen = model()
    frozen[0].requires_grad_(False)
    optimizer = build_optimizer(frozen, OptimSection())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
