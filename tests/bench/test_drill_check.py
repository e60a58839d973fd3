"""What counts as a loss: on runs that are made up, and on checkpoints of real ones."""

import json
from collections.abc import Callable, Sequence
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
    checkpoints: Sequence[str] = ("step-00000040", "step-00000060"),
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
    summary = {"status": ending, "weights_sha256": weights}
    return Outcome(status, summary, events, reports, "it fell over", checkpoints)


def loss(step: int, by: float) -> Callable[[list[dict[str, Any]]], None]:
    def change(reports: list[dict[str, Any]]) -> None:
        reports[step - 1]["metrics"]["train_loss"] += by

    return change


SMALLER = [(0, 2), (20, 1)]
DROPOUT = ["dropout"]
WRITING = ".writing-step-00000060-0a1b2c3d-7"


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
        (outcome(checkpoints=[WRITING, "step-00000060"]), [], f"{WRITING} was left among the checkpoints"),
        (outcome(checkpoints=[".deleting-step-00000020"]), [], ".deleting-step-00000020 was left"),
        (outcome(SMALLER, checkpoints=[".replaced-step-00000060"]), [], ".replaced-step-00000060 was left"),
        (outcome(checkpoints=["corrupt-step-00000040-17", "step-00000060"]), [], None),
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


def judged(name: str, *events: dict[str, Any], checkpoints: Sequence[str] = (), **done: Any) -> Any:
    start = {"time": 5.0, "event": "start", "step": 0, "world_size": 2}
    seen = Outcome(0, {}, [start, *events], [], checkpoints=checkpoints)
    return judge(name, Break("broken", 10.0, **done), seen, Comparison([], True, 0.0, ""), reached=47)


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


def test_a_spoilt_checkpoint_must_be_told_of_and_set_aside() -> None:
    done: dict[str, Any] = {"resumes_at": 40, "spoilt": 47}
    rejected, aside = event("checkpoint_rejected", 11.0, step=47), ["corrupt-step-00000047-1794", "step-00000060"]
    assert judged("corrupt-checkpoint", rejected, *RESUMED, checkpoints=aside, **done).passed
    not_told = "no checkpoint_rejected event tells that step 47 is spoilt"
    assert judged("corrupt-checkpoint", *RESUMED, checkpoints=aside, **done).losses == [not_told]
    other = event("checkpoint_rejected", 11.0, step=40)
    assert judged("corrupt-checkpoint", other, *RESUMED, checkpoints=aside, **done).losses == [not_told]
    assert judged("corrupt-checkpoint", rejected, *RESUMED, checkpoints=["step-00000047"], **done).losses == [
        "the spoilt checkpoint of step 47 was not set aside"
    ]


def test_who_is_killed_while_saving_must_go_on_from_what_was_committed_before() -> None:
    failure = event("failure", 10.1)
    assert judged("kill-while-saving", failure, *RESUMED, resumes_at=40).passed
    for step in (20, 60):
        resume = event("resume", 12.0, step=step)
        assert judged("kill-while-saving", failure, resume, resumes_at=40).losses == [
            f"the run went on from step {step} instead of step 40"
        ]
    nothing = judged("kill-while-saving", *RESUMED, resumes_at=40)
    assert not nothing.passed and "over before it noticed" in nothing.nothing_broken


FULL = (event("save", 8.0, step=40), event("save_failed", 11.0, step=60), event("save", 14.0, step=80))


def test_a_full_disk_must_be_told_of_and_must_not_stop_a_run() -> None:
    result = judged("fill-disk", *FULL, over=13.0)
    assert result.passed and (result.noticed_after_s, result.steps_lost) == (1.0, 0)
    assert result.training_again_after_s is None
    assert judged("fill-disk", FULL[0], FULL[2], over=13.0).losses == [
        "saves failed, and no save_failed event tells of it"
    ]
    assert judged("fill-disk", *FULL[:2], over=13.0).losses == [
        "nothing was saved any more when the disk took files again"
    ]
    restarted = ["the workers failed or were restarted, although only the disk was full"]
    for name in ("failure", "hang", "restart", "resume"):
        assert judged("fill-disk", *FULL, event(name, 12.0, step=40), over=13.0).losses == restarted
        assert judged("fill-disk", event(name, 12.0, step=40), over=None).losses == restarted
    nothing = judged("fill-disk", *FULL, over=None)
    assert not nothing.passed and nothing.losses == [] and "over before a save failed" in nothing.nothing_broken


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


def test_every_file_of_every_worker_is_looked_at(tmp_path: Path) -> None:
    """As two workers would have written them: the second has drawn, and holds the running mean."""
    for step, drawn in ((2, 5), (4, 6)):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for rank, (rng, tensor) in enumerate([(1, "model.weight"), (drawn, "model.norm.running_mean")]):
            (folder / f"worker-{rank:05d}.json").write_text(json.dumps({"rng": {"torch": rng}}))
            header = json.dumps({"__metadata__": {}, tensor: {"dtype": "F32"}}).encode()
            (folder / f"shard-{rank:05d}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = excuses_of(recipe_of(train={"steps": 1}), tmp_path)
    assert [words.split()[:2] for words in found] == [["the", "model"], ["batch", "norm"]]


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
