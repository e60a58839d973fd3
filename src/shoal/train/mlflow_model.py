"""A run's weights as a model of MLflow, and loading one: safetensors and the recipe, never a pickle."""

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import UserError
from shoal.core.secrets import scrubbed
from shoal.core.version import VERSION
from shoal.observe.runs import read_events
from shoal.observe.track.progress import FOLDER, Progress

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from shoal.checkpoint.manifest import CheckpointInfo

_NAME = "model"
_STEP = "shoal.step"
_COPY = "model-"
_SPEC, _RECIPE, _WEIGHTS = "data_spec.json", "recipe.yaml", "weights"


def log_model(run_dir: Path, client: Any, run_id: str, progress: Progress) -> None:
    """Log the newest whole checkpoint of the run as MLflow's model `model`, unless that is there."""
    from shoal.checkpoint.check import newest_whole
    from shoal.checkpoint.folder import step_folders, step_of

    folders = step_folders(run_dir / "checkpoints")
    if not folders or progress.ids.get("model_step") == step_of(folders[-1]):
        return
    found, _ = newest_whole(run_dir / "checkpoints")
    if found is None or found.info is None or progress.ids.get("model_step") == found.step:
        return
    # Beside the run, where there is room for weights; one that was killed has left its copy.
    for left in (run_dir / FOLDER).glob(f"{_COPY}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_COPY, dir=run_dir / FOLDER) as folder:
        made = Path(folder) / "model"
        _save(run_dir, found.info, Path(folder) / "data", made)
        _send(client, run_id, made, found.step)
    progress.ids["model_step"] = found.step


def _save(run_dir: Path, info: "CheckpointInfo", data: Path, made: Path) -> None:
    import torch
    from mlflow.pyfunc import save_model

    from shoal.checkpoint.export import Request, export
    from shoal.recipe.yaml_tree import read_yaml, to_yaml

    data.mkdir()
    export(info, Request(run_dir.absolute().name, data / _WEIGHTS))
    tree, _ = read_yaml(run_dir / "recipe.yaml")
    # What the model is, and nothing else: paths and addresses are not for whoever loads it.
    own: dict[str, Any] = {name: tree[name] for name in ("name", "task", "model") if name in tree}
    (data / _RECIPE).write_text(to_yaml(scrubbed(own)), encoding="utf-8")
    (data / _SPEC).write_text(json.dumps(_data_spec(run_dir)), encoding="utf-8")
    needs = [f"shoal=={VERSION}", f"torch=={torch.__version__.partition('+')[0]}"]
    about = {"run": run_dir.absolute().name, "step": info.step}
    save_model(
        str(made), loader_module="shoal.train.mlflow_model", data_path=str(data), pip_requirements=needs, metadata=about
    )


def _send(client: Any, run_id: str, made: Path, step: int) -> None:
    """As a model of its own; a server before MLflow 3 has none, and gets it among the run's artifacts."""
    from mlflow.entities import LoggedModelOutput
    from mlflow.exceptions import MlflowException

    run = client.get_run(run_id)
    experiment = run.info.experiment_id
    try:
        model = _begun(client, experiment, run_id, step) or client.create_logged_model(
            experiment, _NAME, source_run_id=run_id, tags={_STEP: str(step)}
        )
    except MlflowException as error:
        if error.error_code != "ENDPOINT_NOT_FOUND":
            raise
        client.log_artifacts(run_id, str(made), _NAME)
        return
    if str(model.status) != "READY":
        described = made / "MLmodel"
        lines = described.read_text(encoding="utf-8").rstrip().splitlines()
        known = [line for line in lines if not line.startswith(("model_id:", "run_id:"))]
        described.write_text("\n".join([*known, f"model_id: {model.model_id}", f"run_id: {run_id}"]) + "\n")
        client.log_model_artifacts(model.model_id, str(made))
        client.finalize_logged_model(model.model_id, "READY")
    outputs = run.outputs.model_outputs if run.outputs is not None else []
    if not any(output.model_id == model.model_id for output in outputs):
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])


def _begun(client: Any, experiment: str, run_id: str, step: int) -> Any:
    """The model of this step that an attempt has left which broke off; what others have left half is taken away."""
    models = client.search_logged_models([experiment], f"source_run_id = '{run_id}'")
    own = [model for model in models if model.name == _NAME and str(model.status) in ("PENDING", "READY")]
    of_step = [model for model in own if model.tags.get(_STEP) == str(step)]
    found = max(of_step, key=lambda model: str(model.status) == "READY", default=None)
    for model in own:
        if model is not found and str(model.status) == "PENDING":
            client.delete_logged_model(model.model_id)
    return found


def _data_spec(run_dir: Path) -> dict[str, Any]:
    """What the model is sized by: as the run has written it down, or else as its data says."""
    told = next((e.get("data_spec") for e in reversed(read_events(run_dir)) if e["event"] == "start"), None)
    if isinstance(told, dict):
        return told
    from shoal.core.spec import DataSpec
    from shoal.recipe.load import check_tree
    from shoal.recipe.yaml_tree import read_yaml
    from shoal.tasks.build import build_task
    from shoal.train.build import datasets_of

    recipe = check_tree(read_yaml(run_dir / "recipe.yaml")[0]).recipe
    task = build_task(recipe.task)
    return dataclasses.asdict(DataSpec() if hasattr(task, "model") else datasets_of(task, recipe).spec)


def _load_pyfunc(path: str) -> "LoadedModel":
    """Called by mlflow.pyfunc.load_model."""
    return LoadedModel(load_model(Path(path)))


def load_model(folder: Path) -> "nn.Module":
    """The model that `log_model` has logged, in evaluation mode."""
    import torch
    from safetensors.torch import load_file

    model = _build(folder)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((folder / _WEIGHTS).glob("*.safetensors")):
        weights |= load_file(file)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise UserError(f"{folder}: the weights do not fit the model: {', '.join([*missing, *unexpected][:5])}")
    return model.eval()


def _build(folder: Path) -> "nn.Module":
    """From task and model."""
    from pydantic import TypeAdapter

    from shoal.core.spec import DataSpec
    from shoal.models.build import build_model
    from shoal.recipe.references import environment, resolve_references
    from shoal.recipe.schema import Recipe
    from shoal.recipe.yaml_tree import read_yaml
    from shoal.tasks.build import build_task

    tree, _ = read_yaml(folder / _RECIPE)
    values, _ = resolve_references({name: tree.get(name) for name in ("task", "model")}, environment())
    sections = {
        name: TypeAdapter(Recipe.model_fields[name].rebuild_annotation()).validate_python(values[name])
        for name in ("task", "model")
    }
    task = build_task(sections["task"])
    if hasattr(task, "model"):
        model: nn.Module = task.model()
        return model
    spec = json.loads((folder / _SPEC).read_text(encoding="utf-8"))
    if isinstance(spec.get("image_shape"), list):
        spec["image_shape"] = tuple(spec["image_shape"])
    return build_model(sections["model"], DataSpec(**spec))


class LoadedModel:
    """What MLflow calls."""

    def __init__(self, model: "nn.Module") -> None:
        self.model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> "np.ndarray[Any, Any]":
        """What the model gives for a batch: an array, a list or a table, as the model takes it."""
        import numpy as np
        import torch

        given = np.asarray(model_input.to_numpy() if hasattr(model_input, "to_numpy") else model_input)
        kind = np.float32 if np.issubdtype(given.dtype, np.floating) else np.int64
        with torch.inference_mode():
            found: np.ndarray[Any, Any] = self.model(torch.from_numpy(np.ascontiguousarray(given, dtype=kind))).numpy()
        return found
