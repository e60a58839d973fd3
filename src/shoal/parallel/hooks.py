"""Hooks on gradients, which a model loses when it is divided."""

from torch import nn

from shoal.core.errors import UserError


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise `UserError` where a parameter has a hook on its gradient.

    A strategy that divides a model puts parameters of its own in the place of the model's, and the hook, which may be
    what keeps a row of an embedding as it is, would vanish without a word.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UserError(
                f"model: has a hook on the gradient of {name}, which a divided model does not keep; "
                "use parallel.strategy=ddp"
            )
