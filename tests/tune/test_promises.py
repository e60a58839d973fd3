"""What a search on real data is promised to do."""

from pathlib import Path

import pytest

from shoal.tune.api import tune

SPACE = {
    "optim.lr": "loguniform(1e-4, 3e-2)",
    "train.global_batch": "choice(32, 64, 128, 256)",
    "model.channels": "choice([8, 16], [16, 32], [32, 64])",
}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_asha_finds_good_settings_of_mnist_with_half_of_the_epochs(here: Path, shared_data: Path) -> None:
    overrides = {"data.dir": str(shared_data / "mnist"), "cluster.gpus_per_worker": 0}
    summary = tune("mnist", SPACE, overrides, search_dir=here / "s", progress="silent", trials=24, scheduler="asha")
    assert summary["best"]["value"] >= 0.985
    assert summary["trained"] <= 0.5 * 24 * 5
    assert summary["trials_by_status"].get("failed", 0) == 0
