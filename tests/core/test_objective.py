from typing import Any

import pytest
import torch

from shoal.core.errors import UserError
from shoal.core.objective import check_loss

SCALAR = torch.tensor(1.0)


@pytest.mark.parametrize(
    "loss", [SCALAR, (SCALAR, 3), (SCALAR, torch.tensor(3))], ids=["mean", "count", "tensor count"]
)
def test_a_mean_or_a_sum_with_its_count_is_a_loss(loss: Any) -> None:
    check_loss(loss)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (torch.ones(4), r"a tensor of shape \(4,\)"),
        (torch.ones(1), r"a tensor of shape \(1,\)"),
        ((torch.ones(4), 4), r"a tensor of shape \(4,\)"),
        (0.5, "'float'"),
        (None, "'NoneType'"),
        ((0.5, 3), "'tuple'"),
        ((SCALAR, 1, 2), "'tuple'"),
        ({"loss": SCALAR}, "'dict'"),
    ],
    ids=str,
)
def test_anything_else_is_told_with_what_to_return(loss: Any, what: str) -> None:
    with pytest.raises(UserError, match=rf"^task.loss returned {what}; return the mean .* or \(sum, count\)$"):
        check_loss(loss)
