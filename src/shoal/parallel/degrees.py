"""How many workers share what, as a recipe says it. Loads without torch."""

from dataclasses import dataclass

from shoal.parallel.section import ParallelSection


@dataclass(frozen=True)
class Degrees:
    """The sides of the block that the workers form; they multiply to the number of workers."""

    copies: int
    """Groups that each hold a whole model and sum gradients with the others."""
    shards: int = 1
    """Workers that divide the state of a copy among them, each with data of its own."""
    stages: int = 1
    """Workers that a micro-batch goes through one after the other."""
    tensor: int = 1
    """Workers that share every layer."""

    @property
    def data(self) -> int:
        """Into how many shares the samples of a step are divided."""
        return self.copies * self.shards


class DegreesError(ValueError):
    """The workers cannot be divided as asked; holds the field of `parallel` and words."""

    def __init__(self, field: tuple[str, ...], words: str) -> None:
        super().__init__(words)
        self.field = field


def find_degrees(section: ParallelSection, strategy: str, workers: int, node_workers: int | None = None) -> Degrees:
    """How `workers` are divided under `strategy`.

    Args:
        section: Of the recipe.
        strategy: The one that is taken, if the recipe leaves it open.
        workers: How many there are.
        node_workers: On each machine, where that is known and the same everywhere.
    """
    if strategy == "fsdp":
        return _sharded(section, workers, node_workers, tensor=1)
    if strategy == "deepspeed":
        return Degrees(1, shards=workers)
    if strategy == "pipeline":
        stages = section.pipeline.stages or workers
        _check_divides(("pipeline", "stages"), stages, workers)
        return Degrees(workers // stages, stages=stages)
    if strategy == "tensor":
        size = section.tensor.size or workers
        _check_divides(("tensor", "size"), size, workers)
        if section.tensor.across == "fsdp":
            return _sharded(section, workers // size, node_workers, tensor=size)
        return Degrees(workers // size, tensor=size)
    return Degrees(workers)


def in_words(section: ParallelSection, strategy: str, degrees: Degrees) -> str:
    """A strategy with its sizes: `fsdp`, `zero-3, offloaded`, `pipeline 4 x ddp 2, 1f1b`, `tensor 2 x fsdp 4`."""
    copies = f" x ddp {degrees.copies}" if degrees.copies > 1 else ""
    if strategy == "deepspeed":
        offloaded = {section.deepspeed.offload_optimizer, section.deepspeed.offload_params} != {"none"}
        return f"zero-{section.deepspeed.stage}" + ", offloaded" * offloaded
    if strategy == "pipeline":
        return f"pipeline {degrees.stages}{copies}, {section.pipeline.schedule}"
    if strategy == "tensor":
        return f"tensor {degrees.tensor}" + (f" x fsdp {degrees.shards}" if degrees.shards > 1 else "") + copies
    if strategy == "fsdp":
        name = f"fsdp {degrees.shards}{copies}" if copies else "fsdp"
        return name + ", offloaded" * section.fsdp.cpu_offload
    return strategy


def by_node(section: ParallelSection, strategy: str) -> bool:
    """Whether it must be known how many workers each machine has."""
    shards = strategy == "fsdp" or (strategy == "tensor" and section.tensor.across == "fsdp")
    return shards and section.fsdp.shard_size == "node"


def _sharded(section: ParallelSection, groups: int, node_workers: int | None, tensor: int) -> Degrees:
    """Groups of workers that share every layer, or single ones, divide the state of a copy among them."""
    size = section.fsdp.shard_size
    if size == "node" and node_workers is not None:
        if node_workers % tensor:
            raise DegreesError(
                ("fsdp", "shard_size"),
                f"node needs whole groups of parallel.tensor.size on each machine, and {node_workers} workers are no "
                f"groups of {tensor}; set a number, or another parallel.tensor.size",
            )
        size = node_workers // tensor
    if size is None or size == "node":  # what machines have is not known before the workers have met: as if on one
        size = groups
    _check_divides(("fsdp", "shard_size"), size, groups, "workers" if tensor == 1 else f"groups of {tensor} workers")
    return Degrees(groups // size, shards=size, tensor=tensor)


def _check_divides(field: tuple[str, ...], size: int, count: int, what: str = "workers") -> None:
    if count % size:
        divisors = [number for number in range(1, count + 1) if count % number == 0]
        distance = min(abs(number - size) for number in divisors)
        best = [str(number) for number in divisors if abs(number - size) == distance]
        nearest = f"nearest that {'does' if len(best) == 1 else 'do'}: {' and '.join(best)}"
        raise DegreesError(field, f"{size} does not divide the {count} {what} into equal groups; {nearest}")
