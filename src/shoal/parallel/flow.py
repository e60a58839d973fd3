"""How micro-batches go through the stages of a pipeline: by one of torch's schedules, or forward alone."""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from shoal.core.errors import UserError
from shoal.core.rng import isolated_rng
from shoal.parallel.stages import Stage
from shoal.parallel.stand_in import Inputs, nothing_of

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_MOST_DIMENSIONS = 14
_MOST_ON_THEIR_WAY = 4


class Flow:
    """This worker's place in a pipeline. All workers of one must call the same methods with tensors of one shape."""

    def __init__(
        self,
        model: nn.Module,
        stages: list[Stage],
        worker: int,
        group: dist.ProcessGroup,
        *,
        schedule: str,
        device: torch.device,
        autocast: AbstractContextManager[object],
    ) -> None:
        """Args:
        model: Of which the stages are.
        stages: All of them; stage s is on worker s % n.
        worker: Which of the n this is.
        group: The workers of the pipeline.
        schedule: gpipe, 1f1b or interleaved.
        device: Of this worker.
        autocast: The context that stages compute in.
        """
        self.model = model
        self.group = group
        self.num_workers = dist.get_world_size(group)
        self.worker = worker
        self.num_stages = len(stages)
        self.own = stages[worker :: self.num_workers]
        self.schedule = schedule
        self.device = device
        self.autocast = autocast
        # Gloo sends from the host alone.
        self.wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self.parts = [_Part(stage, autocast, device, self.wire) for stage in self.own]
        self._kinds: dict[tuple[Kind, ...], dict[int, Kind]] = {}
        self._made: dict[Any, Any] = {}
        """Schedules of the last step, by what they are for. Their buffers are large, so there are never others."""
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        # The group's first exchange must be one of all its members.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    @property
    def is_first(self) -> bool:
        """Whether micro-batches enter here."""
        return self.own[0].number == 0

    @property
    def is_last(self) -> bool:
        """Whether their output comes out here."""
        return self.own[-1].is_last

    def train(self, inputs: list[Inputs], loss_of: Callable[[Any], torch.Tensor]) -> None:
        """Forward and backward passes of all micro-batches, whose gradients add up.

        Those of one shape go through the schedule together; a shorter one after them goes through one of its own, for
        rows that only fill it up would be in batch statistics.

        Args:
            inputs: Of the model, for each micro-batch. Anywhere but on the first worker, their shapes alone matter.
            loss_of: Called on the last worker with the model's output for one micro-batch after the other.
        """
        self.settle()
        alike = [list(group) for _, group in itertools.groupby(inputs, _kinds)]
        wanted = [(len(group), _kinds(group[0])) for group in alike]
        self._made = {key: made for key, made in self._made.items() if key in wanted}
        self.parts[-1].loss_of = loss_of
        try:
            for key, group in zip(wanted, alike, strict=True):
                self._train_alike(key, group)
        except RuntimeError as error:
            if error.__cause__ is not None and "failed to run forward" in str(error):
                raise error.__cause__  # noqa: B904 - torch's words around it say nothing more
            raise
        finally:
            self.parts[-1].loss_of = None

    def _train_alike(self, key: Any, inputs: list[Inputs]) -> None:
        """Micro-batches of one shape, by the schedule that is, or will be, kept by `key`."""
        count = self._rounded(len(inputs))
        filled = inputs + inputs[:1] * (count - len(inputs))
        # In one, as torch's schedules take them: they divide them again.
        whole = [torch.cat(each) for each in zip(*filled, strict=True)] if self.is_first else []
        if key not in self._made:
            self._made[key] = self._build(count, inputs[0], [each.tensor_split(count)[0] for each in whole])
        kinds = self._find_kinds(inputs[0])
        for part in self.parts:
            part.begin(len(inputs), kinds.get(part.stage.number + 1))
        self._made[key].step(*whole, target=torch.arange(count) if self.is_last else None, return_outputs=False)

    def forward(self, inputs: Inputs) -> Any:
        """The model's output on the last worker, None elsewhere. The next call may follow at once: nobody waits for
        the workers after them."""
        kinds = self._find_kinds(inputs)
        for stage in self.own:
            given = inputs
            if stage.number > 0:
                given = (self.receive(kinds[stage.number], (stage.number - 1) % self.num_workers),)
            with self.autocast:
                output = stage(*given)
            if stage.is_last:
                return output
            _check_kind(stage, output, kinds[stage.number + 1])
            self._send_on(output, stage.number)
        return None

    def settle(self) -> None:
        """Wait for what is on its way."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _rounded(self, count: int) -> int:
        """As many micro-batches as the schedule can take; those that fill it up are not computed."""
        if self.schedule == "interleaved":
            while count % max(1, count // self.num_workers):
                count += 1
        return count

    def _build(self, count: int, inputs: Inputs, entering: list[torch.Tensor]) -> Any:
        """The schedule for so many micro-batches; `entering` is what of the first one the first stage is given."""
        kinds = self._find_kinds(inputs)
        stages = []
        for part in self.parts:
            number = part.stage.number
            # Told rather than found out by torch, which would send other numbers through the layers for it.
            given = (_on_meta(kinds[number]),) if number else tuple(tensor.to("meta") for tensor in entering)
            output = torch.empty((), device="meta") if part.stage.is_last else _on_meta(kinds[number + 1])
            stages.append(
                PipelineStage(
                    part,
                    number,
                    self.num_stages,
                    self.wire,
                    input_args=given,
                    output_args=(output.requires_grad_(),),
                    group=self.group,
                )
            )
        options: dict[str, Any] = {"loss_fn": lambda output, number: output, "scale_grads": False}
        if self.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, count, **options)  # type: ignore[arg-type]
        # With fewer micro-batches than stages, 1f1b would be the same, and torch refuses it.
        kind = Schedule1F1B if self.schedule == "1f1b" and count >= self.num_stages else ScheduleGPipe
        return kind(stages[0], count, **options)

    def _find_kinds(self, inputs: Inputs) -> dict[int, Kind]:
        """What goes into each of this worker's stages but the first of all, and what comes out of them, by the number
        of the stage that it goes into. For inputs of other shapes than ever before, the stages are tried out."""
        asked = _kinds(inputs)
        if asked not in self._kinds:
            found: dict[int, Kind] = {}
            with _as_in_evaluation(self.model, self.device), torch.no_grad():
                for stage in self.own:
                    if stage.number == 0:
                        given = inputs
                    else:
                        found[stage.number] = self._receive_kind(stage.number)
                        shape, dtype = found[stage.number]
                        given = (torch.zeros(shape, dtype=dtype, device=self.device),)
                    output = self._try(stage, given)
                    if not stage.is_last:
                        found[stage.number + 1] = (tuple(output.shape), output.dtype)
                        self._send_kind(found[stage.number + 1], stage.number)
            self._kinds[asked] = found
        return self._kinds[asked]

    def _try(self, stage: Stage, given: Inputs) -> torch.Tensor:
        try:
            with self.autocast:
                output: torch.Tensor = stage(*given)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise UserError(
                "model: what runs before the first block or after the last uses a weight that its code does not name "
                f"as self.NAME, so a pipeline has it elsewhere ({str(error).splitlines()[0]}); name it there"
            ) from error
        return output

    def send(self, tensor: torch.Tensor, worker: int) -> None:
        """To another worker of the pipeline, who waits for it."""
        self.settle()
        dist.send(tensor.to(self.wire).contiguous(), group=self.group, group_dst=worker)

    def receive(self, kind: Kind, worker: int) -> torch.Tensor:
        """From another worker of the pipeline."""
        shape, dtype = kind
        tensor = torch.empty(shape, dtype=dtype, device=self.wire)
        dist.recv(tensor, group=self.group, group_src=worker)
        return tensor.to(self.device)

    def _send_on(self, tensor: torch.Tensor, stage: int) -> None:
        """To the stage after this one, without waiting for it to be there."""
        while len(self._sent) >= _MOST_ON_THEIR_WAY:
            self._sent.popleft()[0].wait()
        sent = tensor.to(self.wire)
        work = dist.isend(sent, group=self.group, group_dst=(stage + 1) % self.num_workers)
        self._sent.append((work, sent))

    def _send_kind(self, kind: Kind, stage: int) -> None:
        shape, dtype = kind
        padding = [0] * (_MOST_DIMENSIONS - len(shape))
        self.send(torch.tensor([_DTYPES.index(dtype), len(shape), *shape, *padding]), (stage + 1) % self.num_workers)

    def _receive_kind(self, stage: int) -> Kind:
        numbers = self.receive(((2 + _MOST_DIMENSIONS,), torch.int64), (stage - 1) % self.num_workers)
        dtype, dimensions, *shape = numbers.tolist()
        return tuple(shape[:dimensions]), _DTYPES[dtype]


class _Part(nn.Module):
    """A stage as torch calls it in training; the last one ends with the loss, so that nobody keeps the output."""

    def __init__(
        self, stage: Stage, autocast: AbstractContextManager[object], device: torch.device, wire: torch.device
    ) -> None:
        super().__init__()
        self.stage = stage  # no module itself: the model's own stay out of this one's
        self.autocast = autocast
        self.device = device
        self.wire = wire
        self.loss_of: Callable[[Any], torch.Tensor] | None = None
        self.kind: Kind | None = None
        self.left = 0

    def begin(self, count: int, kind: Kind | None) -> None:
        """Of the micro-batches to come, the first `count` are computed; what goes on to another stage is of `kind`."""
        self.left, self.kind = count, kind

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            return self._filler(inputs)
        with self.autocast:
            output: torch.Tensor = self.stage(*(tensor.to(self.device) for tensor in inputs))
        if self.kind is not None:
            _check_kind(self.stage, output, self.kind)
            return output.to(self.wire)
        assert self.loss_of is not None
        return self.loss_of(output).float()

    def _filler(self, inputs: Inputs) -> torch.Tensor:
        """Zeros instead of an output or a loss. No layer runs: it might gather statistics, or draw random numbers."""
        nothing = nothing_of(inputs)
        if self.kind is None:
            return nothing
        shape, dtype = self.kind
        return torch.zeros(shape, dtype=dtype, device=self.wire) + nothing.to(self.wire, dtype)


def _kinds(inputs: Inputs) -> tuple[Kind, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)


def _check_kind(stage: Stage, output: torch.Tensor, kind: Kind) -> None:
    """Raise `UserError` unless a stage's output is what the next one waits for, who would wait on for the rest."""
    (shape, dtype), (known, known_dtype) = _kinds((output,))[0], kind
    if (shape, dtype) != kind:
        raise UserError(
            f"model: {type(stage.blocks[-1]).__name__} gives {shape} of {dtype}, and has given {known} of "
            f"{known_dtype} for inputs of the same shapes; in a pipeline, what goes from block to block must not "
            "depend on values, nor on whether the model trains, so leave padding where it is; nearest that works: "
            "parallel.strategy fsdp"
        )


def _on_meta(kind: Kind) -> torch.Tensor:
    shape, dtype = kind
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return tensor.requires_grad_(dtype.is_floating_point)


@contextlib.contextmanager
def _as_in_evaluation(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Layers compute, and nothing stays behind: no statistics, no random number drawn, nothing compiled."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with isolated_rng(0, device), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
