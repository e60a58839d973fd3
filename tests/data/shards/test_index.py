"""The index of a folder of shards: what is written is read, what is wrong is told."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.data.shards.index import FORMATS, Shard, ShardIndex, parse_index

shards = st.builds(Shard, st.just(""), st.integers(0, 2**40), st.integers(0, 2**47), st.none() | st.just("ab" * 16))
WHOLE = {"shoal": "shards", "version": 1, "format": "tar", "rows": 3}
FILES = [{"file": "a.tar", "rows": 1, "bytes": 10}, {"file": "b/c.tar", "rows": 2, "bytes": 20, "xxh3_128": "00"}]


@given(st.sampled_from(FORMATS), st.lists(shards), st.dictionaries(st.sampled_from(["classes", "dtype"]), st.text()))
def test_what_is_written_is_read(format_: str, found: list[Shard], about: dict[str, Any]) -> None:
    named = tuple(Shard(f"s-{n}", s.rows, s.bytes, s.xxh3_128) for n, s in enumerate(found))
    index = ShardIndex(format_, named, about)
    assert parse_index(index.to_json(), "here") == index
    assert index.num_rows == sum(s.rows for s in named) and index.num_bytes == sum(s.bytes for s in named)


def test_an_index_can_be_looked_at() -> None:
    text = parse_index(json.dumps({**WHOLE, "shards": FILES, "classes": ["x"]}), "here").to_json()
    assert [line for line in text.splitlines() if "b/c.tar" in line and "a.tar" not in line]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shoal": "other"}, "is not an index of shards"),
        ({"version": 2}, "is of version 2, this Shoal reads 1"),
        ({"format": "zip"}, "format 'zip'; allowed: tar"),
        ({"rows": 4}, "its shards hold 3 rows, and it says 4"),
        ({"shards": [FILES[0], FILES[0]]}, "a.tar is listed twice"),
        *(
            ({"shards": [{"file": name, "rows": 3, "bytes": 1}]}, "is not the name of a file below the folder")
            for name in (
                "../a.tar",
                "/a.tar",
                "a/../b",
                "a//b",
                "a/",
                ".",
                ".hidden",
                "a\\b",
                "a\0b",
                "a" * 300,
                5,
                None,
            )
        ),
        ({"shards": [{"file": "a.tar", "rows": 2**70, "bytes": 1}]}, "rows and bytes must be whole numbers"),
        ({"shards": [{"file": "a.tar", "rows": -3, "bytes": 1}]}, "rows and bytes must be whole numbers"),
        ({"shards": [{"file": "a.tar"}]}, "a shard is not as it should be"),
    ],
)
def test_what_is_wrong_is_told(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_index(json.dumps({**WHOLE, "shards": FILES, **change}), "s3://b/index.json")
    assert "s3://b/index.json" in str(caught.value)


def test_what_is_not_json_is_told() -> None:
    with pytest.raises(UserError, match="is not JSON"):
        parse_index(b'{"shoal": ', "here")
