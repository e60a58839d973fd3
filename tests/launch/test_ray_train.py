"""A recipe as the training function of Ray Train v2."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.folder import read_info
from shoal.checkpoint.read import verify
from shoal.core.errors import UserError
from shoal.launch.ray_train import train_loop
from shoal.observe.runs import read_events

_SCRIPT = """
    import json, sys
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from shoal.launch.ray_train import train_loop

    if __name__ == "__main__":
        config = json.loads(sys.argv[1])
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        result = TorchTrainer(
            train_loop,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=config["run_dir"] + "-ray", failure_config=FailureConfig(max_failures=1)),
        ).fit()
        print(json.dumps({"checkpoint": result.checkpoint.path, "metrics": result.metrics, **result.return_value}))
"""

_DIES_ONCE = """
    import os, signal
    from shoal.tasks.classification import ClassificationTask
    from shoal.tasks.section import Classification

    class Task(ClassificationTask):
        def __init__(self, once):
            super().__init__(Classification(name="image_classification"))
            self.once, self.calls = once, 0

        def loss(self, model, batch):
            self.calls += 1
            if self.calls == 31 and os.environ.get("RANK") == "1" and not os.path.exists(self.once):
                open(self.once, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().loss(model, batch)
"""


@pytest.mark.slow
def test_ray_train_gives_the_same_weights_and_goes_on_after_a_kill(undisturbed_digits: dict[str, Any], tmp_path: Path):
    (tmp_path / "script.py").write_text(textwrap.dedent(_SCRIPT))
    (tmp_path / "dying.py").write_text(textwrap.dedent(_DIES_ONCE))
    overrides = undisturbed_digits["overrides"] | {
        "task.name": "dying:Task",
        "task.args": {"once": str(tmp_path / "x")},
    }
    config = {"recipe": "digits", "overrides": overrides, "run_dir": str(tmp_path / "run")}
    result = subprocess.run(
        [sys.executable, "script.py", json.dumps(config)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["weights_sha256"] == undisturbed_digits["weights_sha256"]
    assert sum(event["event"] == "start" for event in read_events(tmp_path / "run")) == 2, "nobody was killed"
    (registered,) = Path(summary["checkpoint"]).iterdir()
    assert registered.is_relative_to(tmp_path / "run-ray") and registered.name == f"step-{summary['step']:08d}"
    verify(read_info(registered))


def test_what_is_missing_is_told():
    pytest.importorskip("ray.train")
    with pytest.raises(UserError, match="recipe and run_dir"):
        train_loop({})
