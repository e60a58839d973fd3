"""Files whose hash comes from memory, and the check that nothing in them is infinite."""

import hashlib
import math

import pytest
import torch
import xxhash

from shoal.checkpoint.manifest import CorruptCheckpointError, FileFacts
from shoal.checkpoint.shard import CancelledError, NotFiniteError, check_finite, verify_file, write_file


def yes() -> bool:
    return True


def test_a_file_is_what_its_facts_say(tmp_path):
    facts = write_file(tmp_path / "f", [b"abc", memoryview(b"defg")], yes)
    assert (tmp_path / "f").read_bytes() == b"abcdefg"
    assert facts == FileFacts(7, xxhash.xxh3_128_hexdigest(b"abcdefg"))
    verify_file(tmp_path / "f", facts)


def test_a_large_file_is_verified_in_pieces(tmp_path):
    content = hashlib.sha256(b"x").digest() * 700_000
    facts = write_file(tmp_path / "f", [content], yes)
    verify_file(tmp_path / "f", facts)
    with (tmp_path / "f").open("r+b") as file:
        file.seek(20_000_000)
        file.write(b"!")
    with pytest.raises(CorruptCheckpointError, match="f has changed since it was written"):
        verify_file(tmp_path / "f", facts)


@pytest.mark.parametrize(("content", "words"), [(b"abc", "has 3 bytes instead of 7"), (None, "is missing")])
def test_a_file_of_another_size_or_none_is_told(tmp_path, content, words):
    facts = write_file(tmp_path / "f", [b"abcdefg"], yes)
    (tmp_path / "f").unlink()
    if content is not None:
        (tmp_path / "f").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=words):
        verify_file(tmp_path / "f", facts)


def test_a_cancelled_write_ends_at_the_next_chunk(tmp_path):
    answers = iter([True, False])
    with pytest.raises(CancelledError):
        write_file(tmp_path / "f", [b"a", b"b", b"c"], lambda: next(answers))
    assert (tmp_path / "f").read_bytes() == b"a"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(dtype, value):
    tensor = torch.ones(1000).to(dtype)
    check_finite([tensor], yes)
    tensor[777] = value
    with pytest.raises(NotFiniteError):
        check_finite([torch.ones(3), tensor], yes)


def test_the_largest_numbers_and_whole_ones_are_finite():
    check_finite([torch.tensor([torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16)], yes)
    check_finite([torch.tensor([-(2**63)]), torch.tensor([True]), torch.zeros(0)], yes)
    with pytest.raises(CancelledError):
        check_finite([torch.ones(1)], lambda: False)
