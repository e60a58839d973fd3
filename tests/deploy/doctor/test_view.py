"""What people see."""

import io

import pytest
from rich.console import Console

from shoal.deploy.doctor.finding import Finding
from shoal.deploy.doctor.view import View, lines_of, merged, summary

FINDINGS = [
    Finding("python", "pass", "3.11.7"),
    Finding("shm", "fail", "64 MiB of 64 MiB free", "give the container more: docker run --shm-size 8g"),
    Finding("gpu", "skip", "no GPU here"),
    Finding("token", "warn", "a file [others] can read", "chmod 600 file"),
]


def shown(findings: list[Finding], **how: object) -> str:
    stream = io.StringIO()
    console = Console(file=stream, highlight=False, markup=False, **how)  # type: ignore[arg-type]
    assert list(View(console).show(findings)) == findings
    return stream.getvalue()


def test_a_pipe_gets_whole_lines() -> None:
    assert shown(FINDINGS, width=40).splitlines() == [
        "this machine",
        "  + pass python             3.11.7",
        "  x fail shm                64 MiB of 64 MiB free",
        "                            > give the container more: docker run --shm-size 8g",
        "  - skip gpu                no GPU here",
        "  ! warn token              a file [others] can read",
        "                            > chmod 600 file",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_folds_long_lines_under_each_other(width: int) -> None:
    long = Finding("shm", "fail", "found " * 30, "advice " * 30)
    lines = shown([long], width=width, force_terminal=True, color_system=None).splitlines()
    assert all(len(line) <= width for line in lines)
    assert lines[1].startswith("  ✗ fail shm") and all(line.startswith(" " * 28) for line in lines[2:])


def test_levels_are_words_and_not_colours_alone() -> None:
    text = shown(FINDINGS, width=80, force_terminal=True, color_system=None)
    assert [word in text for word in ("✓ pass", "✗ fail", "- skip", "! warn")] == [True] * 4


def of_node(node: str, level: str, found: str, advice: str = "") -> Finding:
    return Finding("shm", level, found, advice, group="nodes", node=node)  # type: ignore[arg-type]


def test_what_is_the_same_on_all_machines_is_one_line() -> None:
    assert lines_of(merged([of_node("a", "pass", "8 GiB"), of_node("b", "pass", "8 GiB")])[0]) == [
        "  + pass shm                all 2: 8 GiB"
    ]
    (line,) = merged([of_node("a", "pass", "8 GiB"), of_node("b", "pass", "9 GiB")])
    assert (line.level, line.found) == ("pass", "well on all 2; a: 8 GiB")


def test_a_machine_that_is_not_well_is_named() -> None:
    lines = merged(
        [of_node("a", "pass", "8 GiB"), of_node("b", "fail", "64 MiB", "more"), of_node("c", "pass", "8 GiB")]
    )
    assert [(line.level, line.node, line.found) for line in lines] == [
        ("pass", "a, c", "8 GiB"),
        ("fail", "b", "64 MiB"),
    ]


def test_machines_are_shown_when_all_are_known() -> None:
    before, after = Finding("nodes", "pass", "2 alive", group="cluster"), Finding("skew", "pass", "0", group="cluster")
    text = shown([before, of_node("a", "pass", "8 GiB"), of_node("b", "pass", "8 GiB"), after], width=80)
    assert text.splitlines() == [
        "cluster",
        "  + pass nodes              2 alive",
        "machines of the cluster",
        "  + pass shm                all 2: 8 GiB",
        "cluster",
        "  + pass skew               0",
    ]


def test_the_summary() -> None:
    assert summary(FINDINGS) == "1 passed, 1 warning, 1 failed, 1 skipped"
