"""A model with hooks on its gradients is refused where it would lose them."""

import pytest
from torch import nn

from shoal.core.errors import UserError
from shoal.parallel.hooks import refuse_gradient_hooks


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused_until_it_is_gone(register: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse_gradient_hooks(model)
    handle = getattr(model[1].bias, register)(lambda _: None)
    with pytest.raises(
        UserError, match=r"^model: has a hook on the gradient of 1\.bias, which .* parallel\.strategy=ddp"
    ):
        refuse_gradient_hooks(model)
    handle.remove()
    refuse_gradient_hooks(model)
