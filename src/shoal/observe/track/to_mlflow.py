"""A run as MLflow keeps it: params, metrics, tags, artifacts, and the model."""

import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.core.secrets import scrub
from shoal.observe.track.facts import Facts
from shoal.observe.track.points import Point
from shoal.observe.track.progress import Progress
from shoal.observe.track.section import MlflowSection

_STATUS = {"running": "RUNNING", "done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "stopped": "KILLED"}
_ARTIFACTS = ("recipe.yaml", "summary.json", "events.jsonl", "report.html")
_KEY = "shoal.key"
_PARENT = "mlflow.parentRunId"
_GONE = "RESOURCE_DOES_NOT_EXIST"
_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""So that MLflow shows an experiment as one of models that are trained, and not of agents."""

LogModel = Callable[[Any, str, Progress], None]
"""(client, run id, progress): logs the run's weights, unless they are there."""


def mlflow_uri(section: MlflowSection, run_dir: Path) -> str:
    """Where the run goes: with what secrets it holds."""
    return section.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.absolute().parent}/mlflow.db"


def is_of_folder(section: MlflowSection) -> bool:
    """Whether nobody has said where, so that it is a file beside the run."""
    return section.uri is None and not os.environ.get("MLFLOW_TRACKING_URI")


class MlflowSink:
    """One run of MLflow, the same for all starts of a run."""

    keeps_at_once = True

    def __init__(
        self,
        section: MlflowSection,
        run_dir: Path,
        progress: Progress,
        hide: Callable[[str], str],
        log_model: LogModel | None = None,
    ) -> None:
        """`hide`: takes out of a text what came from the environment."""
        from mlflow.tracking import MlflowClient

        self._section = section
        self._run_dir = run_dir
        self._progress = progress
        self._hide = hide
        self._log_model = log_model if section.log_model else None
        self._uri = mlflow_uri(section, run_dir)
        with _made_by_one(self._uri):
            self._client = MlflowClient(tracking_uri=self._uri)
        self._params: dict[str, str] = {}
        """Those that MLflow has; they cannot be changed."""
        self._is_open = False

    def tell(self, facts: Facts) -> None:
        """Params and tags; MLflow's run is made, or found, the first time."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH, MAX_TAG_VAL_LENGTH

        if not self._is_open:
            self._open(facts)
        wanted = {name: text[:MAX_PARAM_VAL_LENGTH] for name, text in facts.params.items()}
        tags = self._section.tags | facts.tags
        # A recipe that was changed by a resume: MLflow keeps the first value of a param for good.
        tags |= {f"changed.{name}": text for name, text in wanted.items() if self._params.get(name, text) != text}
        new = {name: text for name, text in wanted.items() if name not in self._params}
        for some in _some(list(new.items()), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self._run_id, params=[Param(name, text) for name, text in some])
        self._params |= new
        cut = {name: scrub(self._hide(text))[:MAX_TAG_VAL_LENGTH] for name, text in tags.items()}
        for some in _some(list(cut.items()), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self._run_id, tags=[RunTag(name, text) for name, text in some])

    def log(self, points: list[Point]) -> None:
        """Metrics, as many at once as MLflow takes."""
        from mlflow.entities import Metric
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        for some in _some(points, MAX_METRICS_PER_BATCH):
            metrics = [Metric(point.name, point.value, round(point.time * 1000), point.step) for point in some]
            self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, facts: Facts) -> None:
        """Artifacts, the run's status, and last the model, which may take a while."""
        self._log_artifacts()
        assert facts.ended is not None
        self._client.set_terminated(self._run_id, _STATUS[facts.status], round(facts.ended * 1000))
        if self._log_model is not None and facts.status == "done":
            self._log_model(self._client, self._run_id, self._progress)

    def close(self) -> None:
        """Nothing is open."""

    @property
    def _run_id(self) -> str:
        return str(self._progress.ids["run_id"])

    def _open(self, facts: Facts) -> None:
        """Go on with MLflow's run of this run; make it where there is none, or where somebody has deleted it."""
        run = self._find(facts)
        if run is None:
            self._progress.ids.clear()
            self._progress.last.clear()
            tags = {_KEY: facts.key, "mlflow.source.name": "shoal"}
            if self._section.parent_run_id is not None:
                tags[_PARENT] = self._section.parent_run_id
            if facts.ended is None and (commit := _git_commit()):
                tags["mlflow.source.git.commit"] = commit
            name = self._section.run_name or facts.name
            experiment = self._experiment(facts)
            run = self._client.create_run(experiment, round(facts.started * 1000), tags, run_name=name)
        elif facts.ended is None and run.info.status != "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._progress.ids["run_id"] = run.info.run_id
        self._params = dict(run.data.params)
        with contextlib.suppress(OSError):  # a full disk: it is found by its key next time
            self._progress.save()
        self._is_open = True

    def _find(self, facts: Facts) -> Any:
        from mlflow.exceptions import MlflowException

        if run_id := self._progress.ids.get("run_id"):
            try:
                run = self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != _GONE:
                    raise
                return None
            return run if run.info.lifecycle_stage == "active" else None
        found = self._client.search_runs([self._experiment(facts)], f"tags.`{_KEY}` = '{facts.key}'", max_results=1)
        return found[0] if found else None

    def _experiment(self, facts: Facts) -> str:
        return _experiment_id(self._client, self._uri, self._section, facts.recipe_name)

    def _log_artifacts(self) -> None:
        """The run's files, without secrets, where they have changed since."""
        sent = self._progress.ids.setdefault("artifacts", {})
        with tempfile.TemporaryDirectory(prefix="shoal-track-") as folder:
            for name in _ARTIFACTS:
                try:
                    text = (self._run_dir / name).read_text(encoding="utf-8", errors="replace")
                except FileNotFoundError:
                    continue
                # A page is made without secrets, and may run only the very script that it was made with.
                content = (text if name.endswith(".html") else scrub(self._hide(text))).encode()
                digest = hashlib.sha256(content).hexdigest()
                if sent.get(name) != digest:
                    (Path(folder) / name).write_bytes(content)
                    self._client.log_artifact(self._run_id, str(Path(folder) / name))
                    sent[name] = digest


class MlflowParent:
    """A run that others are children of."""

    def __init__(self, section: MlflowSection, run_dir: Path, recipe_name: str) -> None:
        """`run_dir`: of any of the children, by which a database that is a file is found."""
        from mlflow.tracking import MlflowClient

        self._uri = mlflow_uri(section, run_dir)
        with _made_by_one(self._uri):
            self._client = MlflowClient(tracking_uri=self._uri)
            self._experiment = _experiment_id(self._client, self._uri, section, recipe_name)
        self._tags = section.tags
        self._run_id = ""

    def open(self, run_id: str | None, name: str, tags: dict[str, str]) -> str:
        """Make it, or go on with it; its id."""
        if run_id is None:
            tags = self._tags | tags | {"mlflow.source.name": "shoal"}
            run_id = str(self._client.create_run(self._experiment, tags=tags, run_name=name).info.run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        return run_id

    def end(self, status: str, params: dict[str, str], metrics: dict[str, float], files: list[Path]) -> None:
        """What came of it. Params cannot be changed, so what a resume has found out anew is a tag."""
        known = self._client.get_run(self._run_id).data.params
        for name, text in params.items():
            if known.get(name, text) == text:
                self._client.log_param(self._run_id, name, text)
            else:
                self._client.set_tag(self._run_id, f"changed.{name}", text)
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name, value)
        for file in files:
            self._client.log_artifact(self._run_id, str(file))
        self._client.set_terminated(self._run_id, _STATUS[status])


def _experiment_id(client: Any, uri: str, section: MlflowSection, recipe_name: str) -> str:
    from mlflow.exceptions import MlflowException

    name = section.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or recipe_name
    for _ in range(2):
        if (experiment := client.get_experiment_by_name(name)) is not None:
            return str(experiment.experiment_id)
        try:
            return str(client.create_experiment(name, _artifacts(uri, name), tags=_KIND))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run has made it meanwhile
                raise
    raise RuntimeError(f"experiment {name} is there and is not: it was deleted in MLflow; restore it there")


def _artifacts(uri: str, experiment: str) -> str | None:
    """Beside a database that is a file; MLflow itself would take the working directory. A server knows where."""
    database = _database(uri)
    return (database.parent / "mlartifacts" / experiment).as_uri() if database is not None else None


def _some(items: list[Any], count: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), count):
        yield items[first : first + count]


@contextlib.contextmanager
def _made_by_one(uri: str) -> Iterator[None]:
    """Two runs that begin together must not both make the tables of a database that is a file."""
    path = _database(uri)
    if path is None:
        yield
        return
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=60):
        yield


def _database(uri: str) -> Path | None:
    """The file, where a database is one."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute()


def _git_commit() -> str | None:
    """Of the working directory, where there is one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607 - the user's own
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
