"""Domains: whatever the place, the value is inside; whatever the domain, its words are read back as it."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.tune.domains import KINDS, Domain, Options, Range, as_text, make_domain
from shoal.tune.space import parse_space

places = st.floats(0.0, 1.0)
numbers = st.floats(-1e300, 1e300) | st.floats(-10, 10) | st.floats(0, 1e-300)
whole = st.integers(-(10**6), 10**6)


def pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=2, max_size=2, unique=True).map(sorted)


ranges = (
    pairs(numbers).map(lambda ends: make_domain("uniform", ends))
    | pairs(st.floats(5e-324, 1e300)).map(lambda ends: make_domain("loguniform", ends))
    | pairs(whole).map(lambda ends: make_domain("randint", ends))
    | pairs(st.integers(1, 10**6)).map(lambda ends: make_domain("lograndint", ends))
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.text("\"\\'()[]{},:#&*!|>%@`~-+ if=0aé\n\t", max_size=8)
    | st.sampled_from(
        ["null", "True", "~", "1e3", ".inf", "NaN", "-", "yes", "a:", "a: b", "<<", "😀", "\x7f", "2026-01-01"]
    )
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@st.composite
def options(draw: st.DrawFn) -> Options:
    found: list[Any] = []
    for value in draw(st.lists(values, min_size=1, max_size=5)):
        if not Options(tuple(found)).holds(value):
            found.append(value)
    return Options(tuple(found), is_grid=draw(st.booleans()))


domains = st.one_of(ranges, options())


def exactly(value: Any) -> Any:
    """A value that is equal only to one of the same type."""
    return [exactly(item) for item in value] if isinstance(value, list) else (type(value), value)


@given(domain=domains, place=places)
@example(domain=Range(0.1, 0.3, is_log=True), place=1.0)
@example(domain=Range(1e-5, 1e-2, is_log=True), place=0.0)
@example(domain=Range(1.0, 3.0, is_whole=True, is_log=True), place=1.0)
def test_every_place_has_a_value_inside(domain: Domain, place: float) -> None:
    value = domain.at(place)
    assert domain.holds(value)
    if isinstance(domain, Range):
        assert type(value) is (int if domain.is_whole else float)


@given(domain=domains)
def test_both_ends_are_reached_and_are_inside(domain: Domain) -> None:
    ends = domain.extremes()
    assert exactly(domain.at(0.0)) == exactly(ends[0]) and exactly(domain.at(1.0)) == exactly(ends[-1])
    assert all(domain.holds(end) for end in ends)
    if isinstance(domain, Range):
        assert ends == [domain.low, domain.high]


@given(domain=domains, place=places)
@example(domain=Range(1.0, 1000.0, is_log=True, is_whole=True), place=0.55)
def test_a_value_is_found_again_at_its_place(domain: Domain, place: float) -> None:
    value = domain.at(place)
    assert 0.0 <= domain.place(value) <= 1.0
    again = domain.at(domain.place(value))
    if isinstance(domain, Range) and not domain.is_whole:
        scale = abs(value) if domain.is_log else max(abs(domain.low), abs(domain.high))
        assert math.isclose(again, value, rel_tol=1e-9, abs_tol=1e-9 * scale + 1e-320)
    else:
        assert exactly(again) == exactly(value)


@given(domain=ranges, one=places, other=places)
def test_a_later_place_has_no_smaller_value(domain: Range, one: float, other: float) -> None:
    slack = 1e-12 * max(abs(domain.low), abs(domain.high))
    assert domain.at(min(one, other)) <= domain.at(max(one, other)) + slack


@pytest.mark.parametrize(("low", "high"), [(1, 2), (-3, 3), (0, 9)])
def test_whole_numbers_are_equally_likely(low: int, high: int) -> None:
    domain = make_domain("randint", [low, high])
    found = Counter(domain.at((i + 0.5) / 10_000) for i in range(10_000))
    assert sorted(found) == list(range(low, high + 1))
    assert max(found.values()) - min(found.values()) <= 2


def test_powers_of_ten_are_equally_likely() -> None:
    domain = make_domain("loguniform", [1e-4, 1e0])
    found = Counter(math.floor(math.log10(domain.at((i + 0.5) / 1000))) for i in range(1000))
    assert found == {-4: 250, -3: 250, -2: 250, -1: 250}
    few = make_domain("lograndint", [1, 1000])
    values = [few.at((i + 0.5) / 1000) for i in range(1000)]
    assert sum(value <= 30 for value in values) == pytest.approx(1000 * math.log(61) / math.log(2001), abs=2)


def test_options_are_equally_likely() -> None:
    domain = make_domain("choice", ["a", 2, None])
    assert Counter(domain.at((i + 0.5) / 300) for i in range(300)) == {"a": 100, 2: 100, None: 100}


@given(domain=domains)
@example(domain=Options(("a) if b", "c", 'x") if optim.lr == ("')))
@example(domain=Options((True, 1, 0, False, [True], [1])))
@example(domain=Options(("a:", "b")))
@example(domain=Options(("😀", "\x7f", "\x85", "\u2028", "\ufeff", "\ud800", "\0")))
@example(domain=Options((1e16, 1e-7, -0.5, 10**30)))
def test_the_words_of_a_domain_are_read_back_as_it(domain: Domain) -> None:
    [setting] = parse_space({"a.b": domain.words()})
    assert setting.domain == domain and setting.condition is None
    assert list(map(exactly, setting.domain.extremes())) == list(map(exactly, domain.extremes()))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("adamw", "adamw"),
        ("my.module:Name", "my.module:Name"),
        ("a b", '"a b"'),
        ("true", '"true"'),
        ("12", '"12"'),
        ("", '""'),
        (True, "true"),
        (None, "null"),
        (0.5, "0.5"),
        ([64, "a", [None]], "[64, a, [null]]"),
    ],
)
def test_values_are_written_as_one_would(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("domain", "inside", "outside"),
    [
        (Range(0.0, 1.0), [0, 1, 0.5, 1.0], [-0.1, 1.1, True, False, "0.5", None, math.nan, math.inf, [0.5]]),
        (Range(1.0, 8.0, is_whole=True), [1, 8, 3.0], [0, 9, 2.5, True, math.inf, -math.inf, math.nan, 10**400]),
        (Options((1, "a", None, [2])), [1, 1.0, "a", None, [2], [2.0]], [True, "1", 2, [2, 2], [], [True], "A"]),
        (Options((True, 0)), [True, 0, 0.0], [1, False, 1.0]),
    ],
)
def test_what_a_domain_holds(domain: Domain, inside: list[Any], outside: list[Any]) -> None:
    assert [value for value in inside if not domain.holds(value)] == []
    assert [value for value in outside if domain.holds(value)] == []


def test_true_is_not_1_and_1_is_1_point_0() -> None:
    domain = Options((True, 1, 2.0))
    assert [domain.index(value) for value in (True, 1, 1.0, 2, 2.0)] == [0, 1, 1, 2, 2]
    assert exactly(domain.nearest(1.0)) == (int, 1) and exactly(domain.nearest(2)) == (float, 2.0)


@pytest.mark.parametrize(
    ("value", "near"), [(-5, 1), (1.4, 1), (1.5, 2), (7.6, 8), (9, 8), (3, 3)]
)  # fmt: skip
def test_the_nearest_whole_number_is_inside(value: float, near: int) -> None:
    assert exactly(Range(1.0, 8.0, is_whole=True).nearest(value)) == (int, near)


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_in_a_message_is_right(kind: str) -> None:
    [setting] = parse_space({"a.b": KINDS[kind]})
    assert setting.domain.words().startswith(f"{kind}(")


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("choice", [], r"choice\(\) has no values to choose from; for example choice\(32, 64, 128\)"),
        ("grid", [], r"grid\(\) has no values"),
        ("choice", [1, 2, 1.0], r"choice holds 1.0 twice; give each value once"),
        ("grid", [[1, 2], "a", [1, 2]], r"grid holds \[1, 2\] twice"),
        ("choice", [None, None], r"holds None twice"),
        ("choice", [1, math.inf], r"choice takes words, finite numbers, true, false, null, and lists of them"),
        ("choice", [math.nan], r"choice takes words, finite numbers"),
        ("choice", [{"a": 1}], r"choice takes words, finite numbers"),
        ("grid", [[1, [{"a": 1}]]], r"grid takes words, finite numbers"),
        ("choice", [b"a"], r"choice takes words, finite numbers"),
        ("uniform", [], r"uniform takes two numbers, the least and the largest; for example uniform"),
        ("uniform", [1], r"takes two numbers"),
        ("uniform", [1, 2, 3], r"takes two numbers"),
        ("loguniform", ["a", 2], r"loguniform takes two numbers"),
        ("uniform", [False, True], r"takes two numbers"),
        ("uniform", [None, 1], r"takes two numbers"),
        ("uniform", [0, math.inf], r"uniform takes finite numbers"),
        ("uniform", [math.nan, 1], r"finite numbers"),
        ("uniform", [0, 10**400], r"finite numbers"),
        ("uniform", [-1.7e308, 1.7e308], r"finite numbers"),
        ("randint", [0, 10**400], r"finite numbers"),
        ("randint", [0, 10**30], r"randint takes whole numbers up to 2\*\*53"),
        ("randint", [-(10**30), 0], r"randint takes whole numbers up to 2\*\*53"),
        ("randint", [0.5, 3], r"randint takes whole numbers \(given: 0.5, 3\); for other numbers there is uniform"),
        ("lograndint", [1, 3.5], r"lograndint takes whole numbers"),
        ("uniform", [2, 1], r"uniform\(2, 1\) is empty; the first number must be the smaller one"),
        ("uniform", [2, 2], r"uniform\(2, 2\) holds one value alone"),
        ("loguniform", [0, 1], r"loguniform\(0, 1\) must begin above 0, because every power of ten is as likely"),
        ("lograndint", [-1, 8], r"lograndint\(-1, 8\) must begin above 0"),
    ],
)
def test_what_makes_no_domain_is_told_in_a_line(kind: str, arguments: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make_domain(kind, arguments)
    assert "\n" not in str(caught.value)
