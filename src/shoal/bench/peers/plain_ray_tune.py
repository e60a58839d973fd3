"""Equal trials by Ray Tune, as its users write them: each a function, or a `TorchTrainer` started by one.

Writes one JSON line a trial: unix seconds when it was proposed, when it made its first step, and when its last.
"""

import argparse
import json
import logging
import os
import time
from typing import Any

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

import ray
import torch
from ray import tune
from torch import nn


def model() -> nn.Module:
    """That of `shoal bench tune`."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


def train(steps: int, seed: int) -> tuple[float, float]:
    """When the first step was done, and when the last."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images, labels = torch.randn(1438, 1, 8, 8), torch.randint(10, (1438,))
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    first = 0.0
    for step in range(steps):
        chosen = torch.randint(1438, (32,))
        loss = nn.functional.cross_entropy(net(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == 0:
            first = time.time()
    return first, time.time()


def trial(config: dict[str, Any]) -> None:
    """One trial in the process that Tune gives it."""
    began = time.time()
    first, last = train(config["steps"], config["seed"])
    tune.report({"loss": 0.0, "began": began, "first": first, "last": last})


def nested(config: dict[str, Any]) -> None:
    """One trial as a `TorchTrainer` of one worker."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    began = time.time()

    def worker(given: dict[str, Any]) -> tuple[float, float]:
        return train(given["steps"], given["seed"])

    folder = f"{config['folder']}/{config['seed']}"
    trainer = TorchTrainer(
        worker,  # type: ignore[arg-type] # what it returns is in the result
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder),
    )
    first, last = trainer.fit().return_value  # type: ignore[attr-defined]
    tune.report({"loss": 0.0, "began": began, "first": first, "last": last})


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--address", default="local")
    parser.add_argument("--nested", action="store_true")
    given = parser.parse_args()
    ray.init(address=given.address, logging_level=logging.ERROR)
    space = {"steps": given.steps, "seed": tune.grid_search(list(range(given.trials))), "folder": given.out + ".train"}
    # The CPU of a nested trial is its worker's: what starts it must not take that away.
    needs = tune.PlacementGroupFactory([{"memory": 1.0} if given.nested else {"CPU": 1.0}])
    trainable = tune.with_resources(nested if given.nested else trial, needs)
    began = time.time()
    results = tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=given.slots),
        run_config=tune.RunConfig(storage_path=given.out + ".tune", verbose=0),
    ).fit()
    ended = time.time()
    with open(given.out, "w", encoding="utf-8") as file:  # noqa: PTH123 - a script of a peer's user
        file.write(json.dumps({"began": began, "ended": ended}) + "\n")
        for number in range(len(results)):
            metrics = results[number].metrics or {}
            file.write(json.dumps({name: metrics[name] for name in ("began", "first", "last")}) + "\n")


if __name__ == "__main__":
    main()
