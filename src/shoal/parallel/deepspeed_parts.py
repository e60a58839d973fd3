"""What a worker holds under DeepSpeed's ZeRO, by the names of the model's weights: read and written without gathering.

DeepSpeed lays weights out in flat tensors, one a group, of which each worker holds a part in full precision; its
optimizer works on those parts. Here is which stretch of which weight lies where in them.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.core.errors import RunError, UserError
from shoal.core.parts import FlatPart, Held, read_flat, shape_of

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Stretch:
    """What of a weight this worker holds."""

    name: str
    parameter: Any
    """The model's own, with what DeepSpeed has noted on it."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    start: int
    """In the whole weight laid out flat."""
    count: int
    offset: int = 0
    """In the group's flat tensor."""

    def part(self, flat: torch.Tensor) -> FlatPart:
        """It, out of the group's flat tensor or one laid out likewise."""
        return FlatPart(flat.narrow(0, self.offset, self.count), self.start, self.shape)

    def fill(self, flat: torch.Tensor, tensors: Tensors, name: str) -> None:
        """Copy it from a whole tensor into the group's flat one."""
        whole = read_once(tensors, name)
        flat.narrow(0, self.offset, self.count).copy_(read_flat(whole, name, self.start, self.count))

    def is_in(self, flat: torch.Tensor, tensors: Tensors, name: str) -> bool:
        """Whether `fill` has had its effect."""
        found = flat.narrow(0, self.offset, self.count).cpu()
        return torch.equal(found, read_flat(tensors, name, self.start, self.count).to(found.dtype))


class Parts:
    """The weights and the optimizer state that DeepSpeed's optimizer holds on this worker."""

    def __init__(self, zero: Any, names: Mapping[nn.Parameter, str]) -> None:
        """`zero` is what the engine calls its optimizer."""
        self.zero = zero
        self.is_stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
        self.flats: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat if self.is_stage_3 else zero.single_partition_of_fp32_groups
        )
        self.groups = list(self._find_divided(names) if self.is_stage_3 else self._find_flattened(names))

    def _find_flattened(self, names: Mapping[nn.Parameter, str]) -> Iterator[list[Stretch]]:
        """Stages 1 and 2: weights lie one after the other, and the whole is cut into one part a worker."""
        zero, rank = self.zero, dist.get_rank()
        for group, parameters in enumerate(zero.round_robin_bit16_groups):
            size = zero.partition_size[group]
            first = rank * size
            stretches = []
            for parameter, place in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
                begin = min(max(first - place, 0), parameter.numel())
                count = max(min(first + size - place, parameter.numel()) - begin, 0)
                offset = max(place - first, 0) if count else 0
                shape = tuple(parameter.shape)
                stretches.append(Stretch(names[parameter], parameter, shape, begin, count, offset))
            yield stretches

    def _find_divided(self, names: Mapping[nn.Parameter, str]) -> Iterator[list[Stretch]]:
        """Stage 3: every weight is cut into one part a worker, the last of them filled up."""
        zero = self.zero
        for parameters in zero.fp16_groups:
            stretches = []
            for parameter in parameters:
                _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                begin = min(dist.get_rank() * size, parameter.ds_numel)
                count = min(size, parameter.ds_numel - begin)
                shape = tuple(parameter.ds_shape)
                stretches.append(Stretch(names[parameter], parameter, shape, begin, count, offset))
            yield stretches

    def weights(self) -> dict[str, FlatPart]:
        """Every weight's stretch in full precision."""
        found: dict[str, FlatPart] = {}
        for group, stretches in enumerate(self.groups):
            with self._at_hand(group) as (flat, _):
                found |= {stretch.name: self._kept(group, stretch.part(flat.detach())) for stretch in stretches}
        return found

    def moments(self) -> dict[str, Held]:
        """`NAME.exp_avg` and the like, as far as there is any."""
        found: dict[str, Held] = {}
        for group, stretches in enumerate(self.groups):
            with self._at_hand(group) as (_, state):
                for key, value in state.items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    for stretch in stretches:
                        held = value if value.ndim == 0 else self._kept(group, stretch.part(value))
                        found[f"{stretch.name}.{key}"] = held
        return found

    def _kept(self, group: int, part: FlatPart) -> FlatPart:
        """What is on nvme is in memory for a moment only."""
        return FlatPart(part.flat.clone(), part.start, part.whole_shape) if self._is_on_nvme(group) else part

    def load_weights(self, tensors: Tensors, prefix: str) -> None:
        """Take over weights, whole under `prefix` and their names, and compute with them from here on.

        Those that are not given stay. Every worker must call this; where one cannot read its part, only that raises.
        """
        self._fill(tensors, prefix, None)

    def load(self, tensors: Tensors, prefix: str, moments: str) -> None:
        """The same, and optimizer state under `moments`; state that there is none of begins anew."""
        self._fill(tensors, prefix, moments)

    def _fill(self, tensors: Tensors, prefix: str, moments: str | None) -> None:
        given = set(tensors)  # by their names: to ask for one may be to read it
        if self.is_stage_3:
            self.zero._partition_all_parameters()  # those that are gathered hold what was
            _let_go_of_read_ahead(stretch.parameter for stretches in self.groups for stretch in stretches)
        try:
            for group, stretches in enumerate(self.groups):
                with torch.no_grad(), self._at_hand(group, is_changed=True) as (flat, state):
                    for stretch in stretches:
                        if prefix + stretch.name in given:
                            stretch.fill(flat.data, tensors, prefix + stretch.name)
                    if moments is not None:
                        self._fill_moments(flat, state, stretches, tensors, moments)
                    if self.is_stage_3:
                        self.zero._reassign_or_swap_out_partitioned_parameters(group)
        finally:  # even where reading has failed: the others wait in here
            if self.is_stage_3:
                self.gather_small()
            else:
                self.zero.update_lp_params()
        self._check(tensors, given, prefix, moments)

    def _fill_moments(
        self, flat: torch.Tensor, state: dict[str, Any], stretches: list[Stretch], tensors: Tensors, prefix: str
    ) -> None:
        for value in state.values():  # what the weights have none of is as it was in the beginning
            if isinstance(value, torch.Tensor):
                value.zero_()
        for key in _keys(stretches, tensors, prefix):
            names = {f"{prefix}{stretch.name}.{key}": stretch for stretch in stretches}
            given = {name: stretch for name, stretch in names.items() if name in tensors}
            if any(shape_of(tensors, name) for name in given):
                if key not in state:
                    state[key] = torch.zeros_like(flat.data)
                for name, stretch in given.items():
                    stretch.fill(state[key], tensors, name)
            else:
                state[key] = _the_one(tensors, list(given)).to(flat.device, copy=True)

    def gather_small(self) -> None:
        """Weights so small that every worker keeps them whole between steps."""
        small = self.zero.persistent_parameters
        if small:
            small[0].all_gather(small)
        self.zero.invalidate_secondary_tensor()

    def _check(self, tensors: Tensors, given: set[str], prefix: str, moments: str | None) -> None:
        """Read back what went to nvme, rather than train on something else."""
        for group, stretches in enumerate(self.groups):
            wrong: list[str] = []
            if self._is_on_nvme(group):
                with self._at_hand(group) as (flat, state):
                    for stretch in stretches:
                        places = {prefix + stretch.name: flat.detach()}
                        if moments is not None:
                            places |= {f"{moments}{stretch.name}.{key}": value for key, value in state.items()}
                        wrong += [
                            name
                            for name, place in places.items()
                            if name in given and place.ndim and not stretch.is_in(place, tensors, name)
                        ]
            taken = [stretch for stretch in stretches if prefix + stretch.name in given]
            wrong += [stretch.name for stretch in taken if not _computes_with(stretch, tensors, prefix)]
            if wrong:
                raise RunError(
                    f"parallel.deepspeed.nvme_dir: {wrong[0]} reads back otherwise than it was restored; "
                    "check the disk, or offload to cpu"
                )

    def _is_on_nvme(self, group: int) -> bool:
        return bool(self.is_stage_3 and self.zero._swappable_optimizer_subgroup(group))

    @contextlib.contextmanager
    def _at_hand(self, group: int, is_changed: bool = False) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """A group's flat tensor and its optimizer state, in memory."""
        is_on_nvme = self._is_on_nvme(group)
        if is_on_nvme:
            self.zero._optimizer_states_and_gradient_swap_in(group)
        flat = self.flats[group]
        states = self.zero.optimizer.state
        yield flat, states[flat] if is_changed else states.get(flat, {})
        if is_on_nvme and is_changed:
            self.zero._optimizer_states_and_gradient_swap_out(group)
        elif is_on_nvme:
            self.zero._release_swap_buffers(group)


def read_once(tensors: Tensors, name: str) -> Tensors:
    """`tensors`, with one of them read where no block of it can be: who asks it for that one reads no file again."""
    return tensors if hasattr(tensors, "block") else {name: tensors[name]}


def _keys(stretches: Iterable[Stretch], tensors: Tensors, prefix: str) -> list[str]:
    """What state there is of any of the weights."""
    names = {f"{prefix}{stretch.name}" for stretch in stretches}
    split = (name.rpartition(".") for name in tensors if name.startswith(prefix))
    return sorted({key for name, _, key in split if name in names})


def _the_one(tensors: Tensors, names: list[str]) -> torch.Tensor:
    """A number that DeepSpeed keeps once for many weights: it must be the same for all of them."""
    first = tensors[names[0]]
    for name in names[1:]:
        if not torch.equal(tensors[name], first):
            told = f"{names[0]} {float(first):g}, {name} {float(tensors[name]):g}"
            raise UserError(
                f"parallel.strategy: deepspeed steps with all weights together, and the checkpoint's have taken other "
                f"numbers of steps ({told}); go on with the strategy that it was saved under"
            )
    return first


def _computes_with(stretch: Stretch, tensors: Tensors, prefix: str) -> bool:
    """Whether a weight that is on nvme between its uses is there as it should be."""
    parameter = stretch.parameter
    swapper = getattr(parameter, "nvme_swapper", None)
    if swapper is None or parameter.ds_tensor.status.name != "NOT_AVAILABLE":
        return True
    swapper.swap_in([parameter], async_op=False)
    whole = Stretch(stretch.name, parameter, stretch.shape, stretch.start, stretch.count)
    is_right = whole.is_in(parameter.ds_tensor.detach(), tensors, prefix + stretch.name)
    swapper.remove_partition_and_release_buffers([parameter])
    return is_right


def _let_go_of_read_ahead(parameters: Iterable[Any]) -> None:
    """Weights that were read from nvme for a use that does not come, after an evaluation say."""
    for parameter in parameters:
        swapper = getattr(parameter, "nvme_swapper", None)
        if swapper is not None:
            swapper.synchronize_reads()
            if parameter.ds_id in swapper.param_id_to_buffer_id:
                swapper.remove_partition_and_release_buffers([parameter])


def whole_weight(part: FlatPart) -> torch.Tensor:
    """Put together on rank 0 from every worker's part, bit for bit. Every worker must call this."""
    where = part.flat.device
    if dist.get_backend() == "nccl":
        where = torch.device("cuda", torch.cuda.current_device())
    elif where.type != "cpu":
        where = torch.device("cpu")
    whole = torch.zeros(math.prod(part.whole_shape), dtype=part.flat.dtype, device=where)
    whole[part.start : part.start + part.flat.numel()] = part.flat
    # Bytes, of which only one worker's are not zero: added up as numbers, a negative zero would become another.
    dist.reduce(whole.view(torch.uint8), 0)
    return whole.view(part.whole_shape)
