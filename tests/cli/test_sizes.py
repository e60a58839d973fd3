"""Sizes on the command line."""

import pytest

from shoal.cli.sizes import in_units, parse_size
from shoal.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2GiB", 2 << 30), ("1TiB", 1 << 40), ("77", 77), (" 3 b ", 3)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text, "--size") == size


@pytest.mark.parametrize("text", ["", "0", "5XB", "-1", "GB", "0.5", "9" * 400, "nan"])
def test_what_is_no_size_is_told_with_one_that_is(text: str) -> None:
    with pytest.raises(UserError, match=r"^--size: '.*' is not a size; give one such as 64MiB, 500MB or 2GiB$") as told:
        parse_size(text, "--size")
    assert len(str(told.value)) < 120


def test_what_is_too_small_is_no_size_either() -> None:
    with pytest.raises(UserError, match=r"'80' is not a size; give one such as 80GiB$"):
        parse_size("80", "--memory", least=10**6, such_as="80GiB")


def test_sizes_are_told_in_units() -> None:
    assert [in_units(size) for size in (31_600, 4_200_000, 4_200_000_000, 10**12)] == [
        "31.6 kB", "4.2 MB", "4.2 GB", "1.0 TB",
    ]  # fmt: skip
