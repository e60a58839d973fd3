"""A search in MLflow: one run that the runs of its trials are children of.

MLflow may be slow, full or gone; nothing of the search waits for it for long, and nothing of it ends the search.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.core.secrets import scrub
from shoal.observe.track.reasons import short_reason
from shoal.observe.track.to_mlflow import MlflowParent, is_of_folder, mlflow_uri
from shoal.train.track_process import SETTINGS
from shoal.tune.results import best_trial
from shoal.tune.setup import Setup
from shoal.tune.trial import Trial

_WITHIN_S = 60.0
EVENT = "mlflow"
"""Tells in the journal which run of MLflow it is."""


class Tracking:
    """The parent run, where trials are tracked by MLflow; else nothing."""

    def __init__(self, setup: Setup, folder: Path, run_id: str | None, note: Callable[[str], None]) -> None:
        """`run_id`: of a search that is resumed."""
        self._setup = setup
        self._folder = folder
        self._note = note
        self.run_id = run_id
        self._parent: MlflowParent | None = None
        section = setup.base.recipe.track.mlflow
        if section is not None:
            self._within(lambda: self._open(section))

    def _open(self, section: Any) -> None:
        recipe, tags = self._setup.base.recipe, {"shoal.search": str(self._folder)}
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        parent = MlflowParent(section, self._folder / "trials", recipe.name)
        self.run_id = parent.open(
            self.run_id, self._folder.name, tags | {"shoal.space": ", ".join(self._setup.space.keys)}
        )
        self._parent = parent

    @property
    def fields(self) -> dict[str, Any]:
        """What a trial's recipe says so that its run is a child."""
        section = self._setup.base.recipe.track.mlflow
        if section is None:
            return {}
        found = {} if self._parent is None else {"track.mlflow.parent_run_id": self.run_id}
        if is_of_folder(section):  # one database for all of them, beside the folder of trials
            found["track.mlflow.uri"] = mlflow_uri(section, self._folder / "trials")
        return found

    def end(self, trials: dict[int, Trial], summary: dict[str, Any]) -> None:
        """What was found: the best settings, values, files."""
        parent = self._parent
        if parent is None:
            return
        best = best_trial(trials, self._setup.objective)
        params = {f"best.{key}": str(value) for key, value in best.config.items()} if best is not None else {}
        metrics = {
            "trials": float(len(trials)),
            "saved": float(summary["saved"]),
            "exploits": float(summary["exploits"]),
        }
        if best is not None:
            metrics[f"best_{self._setup.objective.metric}"] = float(best.value(self._setup.objective) or 0.0)
        files = [
            self._folder / name for name in ("search.yaml", "best.yaml", "trials.csv", "summary.json", "report.html")
        ]
        self._within(
            lambda: parent.end(str(summary["status"]), params, metrics, [file for file in files if file.is_file()])
        )

    def _within(self, call: Callable[[], None]) -> None:
        """Call it, and tell where it fails or takes too long."""
        failed: list[str] = []

        def guarded() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - whatever a server or its client comes up with
                failed.append(scrub(self._setup.base.hide(short_reason(error))))

        thread = threading.Thread(target=guarded, name="mlflow", daemon=True)
        with _settings():
            thread.start()
            thread.join(_WITHIN_S)
        if thread.is_alive():
            failed.append(f"it did not answer within {_WITHIN_S:.0f} s")
        if failed:
            with contextlib.suppress(OSError):
                self._note(f"MLflow does not keep the search as a whole: {failed[0]}")


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """As beside a run: MLflow does not try for minutes, and does not tell its makers."""
    ours = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
