"""Curves in characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.monitor.chart import axis_label, chart, is_log
from shoal.observe.monitor.look import Look


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = chart("train_x", [(0, 0.0), (100, 10.0)], 20, 6, Look(is_plain=True))
    assert [line.rstrip() for line in lines] == [
        "10 +              **",
        "   |          ****",
        " 5 +      ****",
        "   |  ****",
        " 0 +**",
        "    0       step 100",
    ]


def test_braille_has_eight_dots_a_character() -> None:
    assert chart("x", [(0, 0.0), (1, 1.0)], 7, 3, Look()) == ["1 ┤  ⡠⠊", "0 ┤⡠⠊  ", "   0  1"]


@pytest.mark.parametrize(
    ("name", "values", "log"),
    [
        ("train_loss", [2.3, 0.1], False),
        ("train_loss", [2.3, 0.01], True),
        ("train_loss", [2.3, 0.0], False),
        ("train_loss", [2.3, -1.0], False),
        ("val_accuracy", [0.001, 0.9], False),
    ],
)
def test_a_scale_of_powers_is_for_what_spans_decades(name: str, values: list[float], log: bool) -> None:
    assert is_log(name, values) is log
    last = chart(name, list(enumerate(values)), 40, 6, Look())[-1]
    assert last.endswith("log") is log


def test_on_a_scale_of_powers_the_middle_is_the_geometric_one() -> None:
    lines = chart("loss", [(0, 100.0), (10, 1.0)], 30, 6, Look(True))
    assert [line.split()[0] for line in (lines[0], lines[2], lines[4])] == ["100", "10", "1"]


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("val_accuracy", 0.9722, "97.2%"),
        ("val_accuracy", 1.0, "100%"),
        ("loss", 2.345, "2.35"),
        ("lr", 0.0003, "3.0e-4"),
        ("loss", 123456.0, "1.2e5"),
        ("loss", 0.0, "0"),
        ("x", 2345.0, "2,345"),
    ],
)
def test_labels_are_short(name: str, value: float, label: str) -> None:
    assert axis_label(name, value) == label


def test_one_point_and_a_flat_line_are_drawn() -> None:
    for points in ([(5.0, 3.0)], [(0.0, 3.0), (10.0, 3.0)], [(0.0, 0.0), (10.0, 0.0)], [(3.0, 1.0), (3.0, 2.0)]):
        lines = chart("loss", points, 30, 6, Look(True))
        assert any("*" in line for line in lines)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e200, 1e200)), min_size=1, max_size=40),
    st.integers(1, 120),
    st.integers(1, 30),
    st.booleans(),
)
def test_whatever_the_points_it_keeps_to_its_room(
    points: list[tuple[float, float]], width: int, height: int, is_plain: bool
) -> None:
    points = sorted(points)
    lines = chart("loss", points, width, height, Look(is_plain))
    assert len(lines) == max(height, 2)
    assert all(len(line) <= max(width, 12) for line in lines)
