"""Secrets are planted wherever one may get in, and searched for wherever something comes out."""

import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

PLANTED = {
    "MY_TOKEN": "tok-a8f3e1c2b4",
    "MY_ADDRESS": "https://eve:passw0rd-77@store.invalid/x",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-pass-551",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "aws-secret-9921",
}
LITERAL = "literal-secret-4413"
TASK = f"""
import os, sys, warnings
import torch

class Task:
    def __init__(self, token, address, ends):
        self.token, self.address, self.ends, self.calls = token, address, ends, 0
    def model(self):
        return torch.nn.Linear(2, 1)
    def datasets(self):
        return {{"train": torch.utils.data.TensorDataset(torch.rand(64, 2))}}
    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 12 and self.ends == "failure":
            raise RuntimeError(
                f"no answer from {{self.address}} with {{self.token}}; tried http://bob:{LITERAL}@host.invalid/ "
                f"and Authorization: Bearer {LITERAL} and AWS_SECRET_ACCESS_KEY={{os.environ['AWS_SECRET_ACCESS_KEY']}}"
            )
        return model(batch[0]).mean()
"""
RECIPE = """
task:
  name: own:Task
  args: {token: "${env:MY_TOKEN}", address: "${env:MY_ADDRESS}", ends: ENDS}
train: {steps: 20, global_batch: 4}
observe: {every_steps: 2, workers_every_s: 0.001}
checkpoint: {every_steps: 5}
track: {mlflow: {uri: "sqlite:///DB"}, tensorboard: true, wait_s: 60}
"""


@pytest.mark.parametrize(
    ("ends", "workers"),
    [
        ("failure", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("done", 1), ("done", 2), ("failure", 2))),
    ],
)
def test_what_is_secret_is_nowhere_to_be_found(here: Path, ends: str, workers: int) -> None:
    (here / "own.py").write_text(TASK)
    (here / "recipe.yaml").write_text(RECIPE.replace("ENDS", ends).replace("DB", str(here / "mlflow.db")))
    command = [sys.executable, "-m", "shoal.cli.main"]
    environment = os.environ | PLANTED
    flags = ["--workers", str(workers), "--launcher", "local", "--json", "--run-dir", "run"]
    trained = subprocess.run(
        [*command, "train", "recipe.yaml", *flags],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert trained.returncode == (0 if ends == "done" else 1), trained.stderr
    log, deadline = here / "run" / "track" / "log", time.monotonic() + 60
    while "ends; " not in log.read_text():  # of a run that failed on several workers, some is sent after its end
        assert time.monotonic() < deadline
        time.sleep(0.1)
    later = [
        subprocess.run([*command, *words, "run"], capture_output=True, text=True, env=environment, check=True).stdout
        for words in (["runs", "show"], ["metrics", "show"], ["monitor", "--json"], ["track", "--json"])
    ]
    places = {"stdout": trained.stdout, "stderr": trained.stderr, "later": "\n".join(later)}
    for path in here.rglob("*"):
        if path.is_file() and path.name != "own.py":
            places[str(path)] = path.read_bytes().decode("utf-8", errors="replace")
    with sqlite3.connect(here / "mlflow.db") as database:
        places["mlflow"] = "\n".join(database.iterdump())
    assert "own:Task" in places["mlflow"], "the recipe is there"
    for place, text in places.items():
        found = [secret for secret in (*PLANTED.values(), "passw0rd-77", LITERAL) if secret in text]
        assert not found, f"{found} in {place}: {context(text, found[0])}"
    if ends == "failure":
        assert "${env:MY_TOKEN}" in places[str(here / "run" / "summary.json")], "what it was is told by its name"


def context(text: str, secret: str) -> str:
    return re.sub(r"\s+", " ", text[max(0, text.index(secret) - 100) : text.index(secret) + 60])
