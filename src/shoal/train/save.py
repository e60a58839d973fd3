"""The state of a run on its way into checkpoints."""

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from shoal.checkpoint.saver import Saver
from shoal.checkpoint.write import Snapshot
from shoal.core.process import Process
from shoal.core.rng import capture_rng
from shoal.data.order import Order
from shoal.parallel.unit import TrainUnit
from shoal.train.state import Identity, TrainState


class Saving(Protocol):
    """What the loop asks for."""

    def save(self) -> None:
        """Save the present step; the state is copied when this returns."""
        ...

    def finish(self, ending: str) -> None:
        """Wait until everything is saved; `ending` is why the run ends."""
        ...

    def report(self) -> dict[str, float]:
        """What belongs into a report: failures, as long as they last."""
        ...


@dataclass(frozen=True)
class Checkpoints:
    """Saves the state of one run. Every worker must call the same methods at the same steps."""

    saver: Saver
    unit: TrainUnit
    state: TrainState
    process: Process
    identity: Identity
    order: Order

    def save(self) -> None:
        """Save the present step; the state is copied when this returns."""
        self.saver.save(take_snapshot(self.unit, self.state, self.process, self.identity, self.order))

    def finish(self, ending: str) -> None:
        """Wait until everything is saved; for uploads only where nobody goes on with the run at once."""
        self.saver.finish(with_uploads=ending not in ("preemption", "resize"))

    def report(self) -> dict[str, float]:
        """What belongs into a report: failures, as long as they last."""
        return self.saver.report()


def take_snapshot(
    unit: TrainUnit,
    state: TrainState,
    process: Process,
    identity: Identity,
    order: Order,
) -> Snapshot:
    """All that must survive of this worker."""
    is_evaluated = state.evaluated_step == state.step
    found = unit.state()
    # Buffers and frozen weights may hold infinities for good reason, such as attention masks.
    learned = {f"model.{name}" for name, parameter in unit.model.named_parameters() if parameter.requires_grad}
    own: dict[str, Any] = {
        "rng": capture_rng(process.device),
        "window_loss": state.window_loss,
        "window_count": state.window_count,
    }
    return Snapshot(
        step=state.step,
        epoch=order.epoch_of(state.step),
        metrics={k: v for k, v in state.metrics.items() if is_evaluated and k.startswith("val_")},
        tensors=found.tensors,
        values={"train": state.to_values(), "identity": asdict(identity), "unit": found.values},
        own=own,
        of_first=found.of_first,
        finite=frozenset(name for name in found.tensors if name in learned or name.startswith("optim.")),
    )
