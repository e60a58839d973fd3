"""The `track:` section. Loads without torch."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from shoal.core.section import Section

Text = Annotated[str, Field(pattern=r"\S")]


class MlflowSection(Section):
    """Where MLflow keeps the run."""

    uri: Text | None = None
    """A server or database; null: MLFLOW_TRACKING_URI, or else mlflow.db in the folder that holds the run's. A password
    in it must come from the environment."""
    experiment: Text | None = None
    """null: MLFLOW_EXPERIMENT_NAME, or else the recipe's name."""
    run_name: Text | None = None
    """null: the name of the run's folder."""
    tags: dict[str, str] = {}
    """Besides those that every run gets."""
    parent_run_id: Text | None = None
    """The MLflow run that this one is a child of."""
    log_model: bool = True
    """At the end, log the weights of the newest checkpoint as a model that mlflow.pyfunc loads."""


class TensorBoardSection(Section):
    """Files that TensorBoard shows."""

    dir: Text | None = None
    """A folder for many runs, each of which has one of its name in there; null: `tensorboard` in the run's own."""


class WandbSection(Section):
    """Where Weights & Biases keeps the run. The key comes from WANDB_API_KEY or `wandb login`."""

    project: Text | None = None
    """null: WANDB_PROJECT, or else the recipe's name."""
    entity: Text | None = None
    """User or team; null: WANDB_ENTITY, or else the key's own."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline: files alone, to be sent by `wandb sync`; null: WANDB_MODE, or else online."""
    dir: Text | None = None
    """Where its files are; null: the run's folder."""
    name: Text | None = None
    """null: the name of the run's folder."""


class OtlpSection(Section):
    """Where traces of the run's phases go, by OTLP over HTTP."""

    endpoint: Text | None = None
    """A collector, such as http://127.0.0.1:4318; null: OTEL_EXPORTER_OTLP_ENDPOINT, or else that one."""
    headers: dict[str, str] = {}
    """Sent with every request; a token in them must come from the environment."""


_EXAMPLES = {
    "mlflow": "uri=http://127.0.0.1:5000",
    "tensorboard": "dir=FOLDER",
    "wandb": "project=NAME",
    "otlp": "endpoint=http://127.0.0.1:4318",
}


def _switched(value: Any, info: ValidationInfo) -> Any:
    """`true` is the section with its defaults, `false` is none."""
    if isinstance(value, bool):
        return {} if value else None
    if value is None or isinstance(value, dict | Section):
        return value
    example = f"track.{info.field_name}.{_EXAMPLES[str(info.field_name)]}"
    raise PydanticCustomError("switch", f"should be true, false, or its fields, such as {example}")


class TrackSection(Section):
    """What keeps a copy of the run's metrics, by a process beside the training, which nothing of it can hold up."""

    mlflow: Annotated[
        MlflowSection | None, BeforeValidator(_switched, json_schema_input_type=MlflowSection | bool | None)
    ] = None
    """MLflow: true, or its fields."""
    tensorboard: Annotated[
        TensorBoardSection | None, BeforeValidator(_switched, json_schema_input_type=TensorBoardSection | bool | None)
    ] = None
    """TensorBoard: true, or its fields."""
    wandb: Annotated[
        WandbSection | None, BeforeValidator(_switched, json_schema_input_type=WandbSection | bool | None)
    ] = None
    """Weights & Biases: true, or its fields."""
    otlp: Annotated[
        OtlpSection | None, BeforeValidator(_switched, json_schema_input_type=OtlpSection | bool | None)
    ] = None
    """OpenTelemetry: true, or its fields."""
    every_s: Annotated[float, Field(gt=0)] = 5.0
    """How often what is new is sent."""
    wait_s: Annotated[float, Field(ge=0)] = 20.0
    """How long the end of a run waits for what was not sent yet; `shoal track RUN` sends what is left after that."""

    @property
    def sinks(self) -> list[str]:
        """Names of those that are asked for."""
        return [name for name in SINKS if getattr(self, name) is not None]


SINKS = ("mlflow", "tensorboard", "wandb", "otlp")
"""What can keep a copy; each is a field of the section, and the extra that installs it."""
ENVIRONMENT = ("MLFLOW_", "WANDB_", "OTEL_EXPORTER_OTLP_")
"""What variables begin with that they read: addresses, names, keys."""
