"""From seconds to ratios, and what shows that contenders did not train the same."""

from typing import Any

import pytest
from torch import nn

from shoal.bench.step_contenders import choose_contenders
from shoal.bench.step_facts import has_dropout, hash_weights, peak_flops
from shoal.bench.step_ratios import best_of, compile_s, differences, interval_of, mean_of_last, ratio_of, ratios_of
from shoal.bench.step_table import notes, table
from shoal.core.errors import UserError


def test_a_ratio_is_taken_round_by_round() -> None:
    found = ratio_of([2.0, 6.0, 3.0], [1.0, 2.0, 2.0])
    assert found["by_round"] == [2.0, 3.0, 1.5] and found["ratio"] == 2.0
    assert found["least"] == 1.5 and found["most"] == 3.0
    low, high = found["interval"]
    assert 1.5 <= low <= 2.0 <= high <= 3.0


def test_the_best_peer_is_the_one_that_is_fastest_over_all_rounds() -> None:
    step_s = {
        "plain": [4.0, 4.0, 4.0],
        "plain_compiled": [1.0, 3.0, 3.0],
        "lightning": [0.5, 5.0, 5.0],
        "shoal": [2.0, 2.0, 2.0],
        "shoal_fast": [1.0, 1.0, 1.0],
    }
    found = ratios_of(step_s)
    assert set(found) == {"shoal", "shoal_fast"}
    ours = found["shoal"]
    assert ours["best_peer"] == ours["best_compiled"] == "plain_compiled" and ours["best_eager"] == "plain"
    assert ours["to_best"]["ratio"] == 1.5 and ours["to_each"]["lightning"]["ratio"] == 2.5
    assert found["shoal_fast"]["to_shoal"]["ratio"] == 2.0 and "to_shoal" not in ours
    assert best_of(step_s, ["plain", "shoal"]) == "shoal"


def test_rounds_of_the_same_processes_are_not_taken_for_many() -> None:
    each = [1.0] * 10 + [1.2] * 10
    low, high = interval_of(each)
    assert low == 1.0 and high == 1.2
    nearly = [1.0] * 18 + [1.2] * 2
    assert interval_of(nearly) == (1.0, 1.0) and interval_of(nearly, 10)[1] == 1.0
    assert interval_of([1.0, 1.0, 1.0, 1.3, 1.3, 1.3, 1.1, 1.1, 1.1], 3) == (1.0, 1.3)


def test_without_peers_there_is_no_best() -> None:
    assert ratios_of({"shoal": [1.0]}) == {"shoal": {"to_each": {}}}


def test_the_loss_is_a_mean_over_items() -> None:
    assert mean_of_last([(9.0, 4), (1.0, 3), (5.0, 1)], 2) == 2.0
    assert mean_of_last([(2.0, 1), (4.0, 1)]) == 3.0


def test_compiling_is_what_the_opening_takes_longer_than_later_steps() -> None:
    opening = {"opening_s": 12.0, "losses": [(0.0, 1)] * 20}
    assert compile_s(opening, 0.1) == pytest.approx(10.0)
    assert compile_s(opening, 1.0) == 0.0


def facts(**own: Any) -> dict[str, Any]:
    return {"weights": "a", "precision": "fp32", "has_dropout": False} | own


@pytest.mark.parametrize(
    ("other", "loss", "wrong", "noted"),
    [
        ({}, 2.0001, 0, 0),
        ({}, 2.02, 1, 0),
        ({}, float("nan"), 1, 0),
        ({"precision": "bf16"}, 2.02, 0, 1),
        ({"precision": "bf16"}, 2.1, 1, 1),
        ({"weights": "b"}, 2.0, 1, 0),
        ({"has_dropout": True}, 2.2, 0, 1),
        ({"has_dropout": True}, 2.4, 1, 1),
    ],
)
def test_contenders_that_do_not_train_the_same_are_seen(
    other: dict[str, Any], loss: float, wrong: int, noted: int
) -> None:
    found, told = differences({"plain": facts(), "shoal": facts(**other)}, {"plain": 2.0, "shoal": loss})
    assert (len(found), len(told)) == (wrong, noted)


def test_settings_that_trade_accuracy_may_change_the_loss_and_that_is_said() -> None:
    found, told = differences({"plain": facts(), "shoal_fast": facts()}, {"plain": 2.0, "shoal_fast": 2.3})
    assert found == [] and told == ["shoal_fast: first loss 2.3, plain: 2"]


def test_weights_are_told_apart() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert hash_weights(one) != hash_weights(other)
    other.load_state_dict(one.state_dict())
    assert hash_weights(one) == hash_weights(other)
    assert len(hash_weights(nn.BatchNorm1d(2))) == 32  # whose count of batches has no dimension


def test_dropout_is_seen() -> None:
    assert not has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert has_dropout(nn.MultiheadAttention(2, 1, dropout=0.1))


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [("NVIDIA H200", "bf16", 989.5e12), ("NVIDIA H100 PCIe", "fp16", 756e12), ("NVIDIA H200", "fp32", None)],
)
def test_the_peak_of_a_device_is_known_or_not(device: str, precision: str, peak: float | None) -> None:
    assert peak_flops(device, precision) == peak
    assert peak_flops("AMD EPYC", precision) is None


@pytest.mark.parametrize(
    ("only", "has_fast", "has_ray", "last"),
    [
        (None, False, False, "shoal"),
        (None, True, False, "shoal_fast"),
        (None, True, True, "shoal_ray"),
        ("shoal, plain", False, False, "shoal"),
    ],
)
def test_contenders_are_chosen(only: str | None, has_fast: bool, has_ray: bool, last: str) -> None:
    found = choose_contenders(only, has_fast, has_ray)
    assert found[0] == "plain" and found[-1] == last and ("shoal_fast" in found) is has_fast
    if only is None:
        assert len(found) == 7 + has_fast + has_ray


def test_contenders_that_are_not_there_are_refused() -> None:
    with pytest.raises(UserError, match="--only: shoal_ray is measured with --launcher ray"):
        choose_contenders("shoal_ray", False, False)
    with pytest.raises(UserError, match="--only: 'x' is not measured here"):
        choose_contenders("x", False, False)


def test_memory_and_flops_of_a_gpu_are_told() -> None:
    row = {"step_ms": 2.0, "rate": 100.0, "peak_bytes": 1 << 30, "reserved_bytes": 2 << 30, "compile_s": 3.0}
    row |= {"mfu": 0.5, "first_loss": 1.0, "last_loss": 0.5, "loss_difference": 0.01, "num_losses": 60}
    row["loss_reference"] = "plain_compiled"
    names = ("plain_compiled", "lightning", "shoal")
    result = {
        "unit": "tokens/s",
        "contenders": {name: row | {"mfu": None} if name == "lightning" else row for name in names},
        "ratios": ratios_of({name: [1.0, 1.1] for name in names}),
        "not_measured": {"accelerate": "not installed"},
        "notes": ["a note"],
        **{"opening": 500, "starts": 1, "rounds": 5, "steps": 10, "device": "NVIDIA H200"},
    }
    head, first, second, _ = table(result)
    assert "peak GiB" in head and "MFU" in head and "50.0%" in first and "50.0%" not in second
    told = dict(notes(result))
    assert told["memory"] == "shoal takes 1.00 GiB at most; of its peers plain_compiled takes 1.00, plain_compiled 1.00"
    assert told["not measured"] == "accelerate: not installed" and told["note"] == "a note"
    assert told["loss"].endswith("the 500th, the last 50; difference: to plain_compiled")
