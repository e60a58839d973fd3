"""Whether every weight has a gradient when DeepSpeed adds up gradients over the workers: it takes for granted that
all workers have the same ones, and steps with weights that have none."""

from typing import Any

from torch import nn

from shoal.core.errors import UserError
from shoal.core.group import Group


class GradientWatch:
    """Looks, before gradients are sent, whether any is missing on any worker, and ends the run on all of them if so.

    DeepSpeed lays gradients one after the other as they come, without a word on whose they are: where one worker has
    none of a weight, those of other weights are added up, or workers wait for each other for ever. A weight without a
    gradient on any worker decays, or moves on by its momentum, or by what it got in an earlier step.
    """

    def __init__(self, engine: Any, names: dict[nn.Parameter, str], group: Group) -> None:
        """Every worker must call this.

        Args:
            engine: DeepSpeed's.
            names: Weights that train, as the model calls them.
            group: All workers.
        """
        self.names = names
        self.group = group
        self.has_gradient: set[nn.Parameter] = set()
        """Since gradients were last sent."""
        for parameter in names:
            parameter.register_post_accumulate_grad_hook(self.has_gradient.add)  # type: ignore[no-untyped-call]
        send = engine.allreduce_gradients
        # Otherwise they go with every micro-batch, or only those that the last one has.
        is_sent_once = engine.zero_optimization_stage() == 1 and not engine.optimizer.overlap_comm

        def check_and_send(*args: Any, **kwargs: Any) -> None:
            if not is_sent_once or engine.is_gradient_accumulation_boundary():
                self.check("step" if is_sent_once else "micro-batch")
            send(*args, **kwargs)

        engine.allreduce_gradients = check_and_send

    def check(self, during: str) -> None:
        """Raise on every worker if one has not all gradients. Every worker must call this."""
        missing = [name for parameter, name in self.names.items() if parameter not in self.has_gradient]
        self.has_gradient.clear()
        (total,) = self.group.sum(len(missing))
        if total:
            by_rank = self.group.gather(missing[:1])
            rank, name = next((rank, names[0]) for rank, names in enumerate(by_rank) if names)
            raise UserError(
                f"parallel.strategy: deepspeed needs a gradient for every weight that trains in every {during}, and "
                f"{name} has none on worker {rank}; freeze it (requires_grad_(False)), or use parallel.strategy=fsdp, "
                "or, where workers use different weights, ddp with parallel.find_unused_parameters=true"
            )
