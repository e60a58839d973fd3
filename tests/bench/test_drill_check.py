"""What counts as a loss: on runs that are made up, and on checkpoints of real ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.drill import judge
from shoal.bench.drill_breaks import Break
from shoal.bench.drill_check import Comparison, Outcome, compare, excuses_of
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe

STEPS = 60


def outcome(
    sizes: list[tuple[int, int]] | None = None,
    change: Callable[[list[dict[str, Any]]], Any] = lambda reports: None,
    weights: str = "a" * 64,
    status: int = 0,
) -> Outcome:
    """A run of 60 steps of 8 samples, started at (step, workers), with its reports changed."""
    reports: list[dict[str, Any]] = [
        {"step": step, "samples": 8 * step, "seconds": {}, "metrics": {"train_loss": 1 / step, "lr": 0.1}}
        for step in range(1, STEPS + 1)
    ]
    reports.append({"step": STEPS, "samples": 8 * STEPS, "seconds": {}, "metrics": {"val_loss": 0.5}})
    change(reports)
    events: list[dict[str, Any]] = []
    for time, (step, size) in enumerate(sizes or [(0, 2)]):
        events.append({"time": time, "event": "start", "step": step, "world_size": size})
        events.append({"time": time, "event": "workers", "workers": [{}] * size})
    ending = "done" if status == 0 else "failed"
    return Outcome(status, {"status": ending, "weights_sha256": weights}, events, reports, "it fell over")


def loss(step: int, by: float) -> Callable[[list[dict[str, Any]]], None]:
    def change(reports: list[dict[str, Any]]) -> None:
        reports[step - 1]["metrics"]["train_loss"] += by

    return change


SMALLER = [(0, 2), (20, 1)]
DROPOUT = ["dropout"]


@pytest.mark.parametrize(
    ("broken", "excuses", "says"),
    [
        (outcome(), [], None),
        (outcome([(0, 2), (20, 2)]), DROPOUT, None),
        (outcome(status=1), [], "ended with status 1: it fell over"),
        (outcome(weights="b" * 64), [], "the weights differ: bbbbbbbbbbbbbbbb instead of aaaaaaaaaaaaaaaa"),
        (outcome(change=loss(31, 1e-9)), [], "the training loss of step 31 differs by 1e-09"),
        (outcome(change=lambda r: r[-1]["metrics"].update(val_loss=0.4)), [], "the validation metrics differ"),
        (outcome(change=lambda r: r.pop(30)), [], "1 steps are missing from metrics.jsonl, the first is 31"),
        (outcome(change=lambda r: r.insert(5, r[4])), [], "1 steps are in metrics.jsonl more than once"),
        (outcome(change=lambda r: r.append({**r[0], "step": 61})), [], "1 steps too many"),
        (outcome(change=lambda r: r[9].update(samples=81)), [], "step 10 ends at sample 81 instead of 80"),
        (outcome(change=lambda r: r[9]["metrics"].update(lr=0.2)), [], "step 10 has another learning rate"),
        (outcome(change=lambda r: r[9]["metrics"].update(train_loss=None)), [], "the training loss of step 10"),
        # with another number of workers: the last bits may differ, for some steps measurably little
        (outcome(SMALLER, loss(21, 9e-5), weights="b" * 64), [], None),
        (outcome(SMALLER, loss(40, 2e-4)), [], "the training loss of step 40 differs by 0.0002"),
        (outcome(SMALLER, loss(41, 0.3)), [], None),
        (outcome(SMALLER, loss(20, 1e-9)), DROPOUT, "the training loss of step 20 differs by 1e-09"),
        (outcome(SMALLER, loss(21, 0.3)), DROPOUT, None),
        (outcome(SMALLER, lambda r: r[30].update(samples=250)), DROPOUT, "step 31 ends at sample 250"),
        (outcome(SMALLER, lambda r: r.pop(30)), DROPOUT, "1 steps are missing"),
        # a step that was trained again by as many as before counts as theirs
        (outcome([(0, 2), (20, 1), (10, 2)], loss(41, 1e-9)), [], "the training loss of step 41"),
    ],
)
def test_what_is_lost_is_told(broken: Outcome, excuses: list[str], says: str | None) -> None:
    found = compare(outcome(), broken, excuses)
    assert found.losses == [] if says is None else any(says in line for line in found.losses), found


def test_it_is_told_what_was_compared() -> None:
    assert compare(outcome(), outcome(), DROPOUT).compared.startswith("weights, losses and validation metrics to the")
    changed = compare(outcome(), outcome(SMALLER), [])
    assert "up to step 20" in changed.compared and "to 0.0001 for 20 steps after it" in changed.compared
    assert changed.same_weights is None, "nobody may expect them to be"
    assert compare(outcome(), outcome(SMALLER), DROPOUT).compared.endswith("and not after it: dropout")


def judged(name: str, *events: dict[str, Any], resumes_at: int | None = None) -> Any:
    seen = Outcome(0, {}, [{"time": 5.0, "event": "start", "step": 0, "world_size": 2}, *events], [])
    return judge(name, Break("broken", 10.0, resumes_at=resumes_at), seen, Comparison([], True, 0.0, ""), reached=47)


def event(name: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": name, **fields}


RESUMED = (event("resume", 12.5, step=40), event("first_step", 13.0, step=41))


def test_times_and_steps_are_counted_from_the_break() -> None:
    result = judged("kill-worker", event("failure", 9.0), event("failure", 11.5), *RESUMED)
    assert result.passed
    assert (result.noticed_after_s, result.training_again_after_s, result.steps_lost) == (1.5, 3.0, 7)


@pytest.mark.parametrize("events", [(), RESUMED, (event("failure", 11.0),)])
def test_a_run_that_did_not_notice_or_was_over_by_then_proves_nothing(events: tuple[dict[str, Any], ...]) -> None:
    result = judged("kill-worker", *events)
    assert not result.passed and result.losses == [] and "over before it noticed" in result.nothing_broken


def test_a_preemption_may_cost_one_step_and_not_more() -> None:
    notice, late = event("preemption", 10.2), event("resume", 12.0, step=46)
    assert judged("preempt", notice, late).passed
    assert judged("preempt", notice, *RESUMED).losses == [
        "7 steps were trained again, although the preemption was announced"
    ]


def test_a_slow_worker_is_no_reason_to_restart() -> None:
    assert judged("slow-worker").passed and judged("slow-worker").steps_lost == 0
    assert "restarted" in judged("slow-worker", event("failure", 11.0), *RESUMED).losses[0]


def test_a_spoilt_checkpoint_must_lead_to_the_one_before() -> None:
    rejected = event("checkpoint_rejected", 11.0, step=47)
    assert judged("corrupt-checkpoint", rejected, *RESUMED, resumes_at=40).passed
    assert judged("corrupt-checkpoint", rejected, *RESUMED, resumes_at=30).losses == [
        "the run went on from step 40 instead of step 30"
    ]
    assert judged("corrupt-checkpoint", rejected, event("first_step", 12.0, step=1), resumes_at=30).losses == [
        "the run went on from the beginning instead of step 30"
    ]


def recipe_of(**sections: Any) -> Recipe:
    return load_recipe([{"task": "image_classification", "model": "mlp", "data": "digits"} | sections]).recipe


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"name": "mlp", "hidden": [8]}, None),
        ({"name": "mlp", "hidden": [8], "dropout": 0.1}, "the model draws random numbers"),
        ({"name": "resnet18", "width": 4}, "batch norm sees the samples of one worker"),
    ],
)
def test_what_a_model_does_shows_in_its_checkpoints(
    train_here: Callable[..., Any], model: dict[str, Any], says: str | None
) -> None:
    data = {"name": "synthetic", "samples": 32, "val_samples": 8, "shape": [3, 8, 8], "classes": 3}
    train = {"steps": 4, "global_batch": 8}
    tree = {"task": "image_classification", "model": model, "data": data, "train": train}
    train_here(tree, run_dir="run", overrides={"checkpoint.every_steps": 2})
    found = excuses_of(load_recipe([tree]).recipe, Path("run"))
    assert found == [] if says is None else says in found[0] and len(found) == 1


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"train": {"steps": 1, "precision": "bf16"}}, "train.precision is bf16"),
        ({"train": {"steps": 1}, "parallel": {"compress": "fp16"}}, "parallel.compress is fp16"),
        ({"train": {"steps": 1}, "parallel": {"sync_every": 4}}, "parallel.sync_every"),
    ],
)
def test_what_a_recipe_says_makes_losses_depend_on_the_number_of_workers(
    tmp_path: Path, sections: dict[str, Any], says: str
) -> None:
    (found,) = excuses_of(recipe_of(**sections), tmp_path)
    assert found.startswith(says)
