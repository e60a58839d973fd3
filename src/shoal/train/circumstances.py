"""What of a run decides which advice is of use to it."""

from shoal.core.process import Process
from shoal.data.dataset import MemoryDataset
from shoal.data.iterable import IterableRows
from shoal.observe.verdict import Circumstances
from shoal.parallel.build import choose_strategy
from shoal.train.build import Built
from shoal.train.plan import Plan


def circumstances_of(built: Built, plan: Plan, process: Process) -> Circumstances:
    """For a worker of this run."""
    recipe, loading, is_gpu = built.recipe, built.feeding.train, process.device.type == "cuda"
    micro_batch, train = recipe.micro_batch(built.unit.data_size), built.datasets.train
    return Circumstances(
        is_gpu=is_gpu,
        strategy=choose_strategy(recipe.parallel, process.world_size),
        precision=recipe.train.precision,
        compiles=recipe.train.compile is True,
        compresses=recipe.parallel.compress != "none",
        accumulates=micro_batch * built.unit.data_size < recipe.train.global_batch,
        readers=loading.workers,
        most_readers=loading.most_workers,
        loader="iterable" if isinstance(train, IterableRows) else built.feeding.kind,
        can_reside=is_gpu and isinstance(train, MemoryDataset) and not train.tensors[0].is_cuda,
        evaluates_often=plan.evaluate_every < plan.num_steps,
        settings={
            "train.global_batch": recipe.train.global_batch,
            "train.micro_batch": micro_batch,
            "parallel.sync_every": recipe.parallel.sync_every,
            "checkpoint.every_steps": plan.save_every,
            "evaluate.every_steps": plan.evaluate_every,
            "evaluate.batch": recipe.evaluate.batch or micro_batch,
            "observe.every_steps": plan.report_every,
        },
    )
