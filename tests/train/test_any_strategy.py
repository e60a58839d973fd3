"""One checkpoint, any strategy: saved under one, loaded under every other, and trained on with the same losses."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.core.process import Process
from shoal.core.weights import weights_sha256
from shoal.data.order import Order
from shoal.train.restore import restore_newest
from shoal.train.save import Checkpoints
from shoal.train.state import Identity, TrainState
from tests.many import Ranks
from tests.parallel.conform import BATCH, SAMPLES, STRATEGIES, Case, Went, train_steps

MakeRanks = Callable[[int], Ranks]
IDENTITY = Identity(train_samples=SAMPLES, fixed={})
ORDER = Order(SAMPLES, BATCH, seed=3)
SAVED_AT, MORE = 10, 5
CASES = {"single": {}, **STRATEGIES}


def begin(process: Process, name: str, folder: Path) -> tuple[str, Went]:
    """Train, save, and train on."""
    case = Case(parallel=CASES[name])
    unit, state = case.unit(process), TrainState()
    train_steps(process, unit, case, 0, SAVED_AT)
    state.step = SAVED_AT
    digest = weights_sha256(unit.full_weights())
    saver = Saver(folder / name, CheckpointSection(), process, strategy=name)
    checkpoints = Checkpoints(saver, unit, state, process, IDENTITY, ORDER)
    checkpoints.save()
    went = train_steps(process, unit, case, SAVED_AT, SAVED_AT + MORE)
    checkpoints.finish("done")
    return digest, went


def go_on(process: Process, name: str, folder: Path, of: str) -> tuple[str, Went]:
    """Load what was saved under another strategy into other weights, and train on."""
    case = Case(parallel=CASES[name], seed=99)
    unit = case.unit(process)
    restored = restore_newest(folder / of, unit, process, IDENTITY, seed=0)
    assert restored.state.step == SAVED_AT
    digest = weights_sha256(unit.full_weights())
    return digest, train_steps(process, unit, case, SAVED_AT, SAVED_AT + MORE)


@pytest.fixture(scope="module")
def saved(ranks: MakeRanks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str, Went]]:
    """`saved(name)`: where the checkpoint of a strategy is, its weights, and how that run went on."""
    folder = tmp_path_factory.mktemp("strategies")
    found: dict[str, tuple[Path, str, Went]] = {}

    def get(name: str) -> tuple[Path, str, Went]:
        if name not in found:
            digest, went = ranks(workers(name))(begin, name, folder)[0]
            found[name] = folder, digest, went
        return found[name]

    return get


def workers(name: str) -> int:
    return 1 if name == "single" else 4


QUICK = ("single", "fsdp", "zero3", "interleaved", "tensor_fsdp")
RING = [*itertools.pairwise(QUICK), (QUICK[-1], QUICK[0])]
"""Each of these is written by and read by another; the other pairs take minutes."""


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(a, b, marks=() if (a, b) in RING else pytest.mark.slow)
        for a, b in itertools.product(CASES, repeat=2)
    ],
)
def test_saved_under_one_strategy_and_loaded_under_another(
    ranks: MakeRanks, saved: Callable[[str], tuple[Path, str, Went]], writer: str, reader: str
) -> None:
    folder, digest, went_on = saved(writer)
    found_digest, found = ranks(workers(reader))(go_on, reader, folder, writer)[0]
    assert found_digest == digest, "the same weights to the last bit"
    if writer == reader:
        assert found.losses == went_on.losses, "to the last bit"
    assert found.losses == pytest.approx(went_on.losses, abs=1e-5)
    assert found.metrics == pytest.approx(went_on.metrics, abs=1e-5)
