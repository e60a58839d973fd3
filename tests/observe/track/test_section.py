import pytest

from shoal.core.errors import UserError
from shoal.observe.track.section import SINKS, TrackSection
from shoal.recipe.load import load_recipe


def test_true_is_the_section_with_its_defaults_and_false_is_none() -> None:
    section = load_recipe(["digits"], ["track.mlflow=true", "track.wandb=false"]).recipe.track
    assert section.mlflow is not None and section.mlflow.log_model and section.mlflow.uri is None
    assert section.sinks == ["mlflow"]
    assert TrackSection().sinks == [], "nobody is told of a run unless that is asked for"


def test_true_and_a_field_are_on_with_that_field() -> None:
    section = load_recipe(["digits"], ["track.wandb=true", "track.wandb.mode=offline"]).recipe.track
    assert section.wandb is not None and section.wandb.mode == "offline"


def test_the_resolved_recipe_can_be_read_again() -> None:
    loaded = load_recipe(["digits"], {"track.mlflow": True, "track.otlp": {"headers": {"a": "b"}}})
    assert load_recipe([loaded.tree()]).recipe.track == loaded.recipe.track


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("track.mlflow.urii=x", "track.mlflow.urii: unknown key"),
        (
            "track.mlflow=yes",
            "track.mlflow: should be true, false, or its fields, such as track.mlflow.uri=http://127.0.0.1:5000"
            " (given: 'yes')",
        ),
        ("track.tensorboard=3", "track.tensorboard: should be true, false, or its fields, such as track.tensorboard."),
        ("track.wandb=[1]", "track.wandb: should be true, false, or its fields, such as track.wandb.project=NAME"),
        ("track.otlp=http://x", "track.otlp: should be true, false, or its fields, such as track.otlp.endpoint="),
        ("track.wandb.mode=on", "track.wandb.mode: 'on' is not allowed; allowed: disabled, offline, online"),
        ("track.tensorbord=true", "track.tensorbord: unknown key; did you mean track.tensorboard?"),
        ("track.wait_s=-1", "track.wait_s: should be at least 0"),
    ],
)
def test_what_is_wrong_is_named(override: str, words: str) -> None:
    with pytest.raises(UserError, match="track") as caught:
        load_recipe(["digits"], [override])
    assert words in str(caught.value)


def test_editors_are_told_that_true_is_allowed() -> None:
    fields = TrackSection.model_json_schema()["properties"]
    for name in SINKS:
        assert {"type": "boolean"} in fields[name]["anyOf"]
