"""A manifest vouches for itself, to the last bit."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from shoal.checkpoint.manifest import CheckpointInfo, CorruptCheckpointError, FileFacts, Manifest, parse_manifest
from shoal.core.errors import UserError

MANIFEST = Manifest(
    step=7,
    epoch=1,
    metrics={"val_loss": 0.1 + 0.2},
    time=1.5,
    world_size=2,
    strategy="ddp",
    files={"state.json": FileFacts(12, "ab" * 16), "x": FileFacts(30, "cd" * 16)},
    versions={"shoal": "1", "torch": "2"},
)


def test_what_was_written_is_read_back_exactly():
    content = MANIFEST.to_bytes()
    assert parse_manifest(content, "x") == MANIFEST
    assert json.loads(content)["format"] == 2, "and any JSON reader can read it"


def test_every_flipped_bit_and_every_cut_is_found():
    content = MANIFEST.to_bytes()
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError):
                parse_manifest(bytes(changed), "x")
        with pytest.raises(CorruptCheckpointError):
            parse_manifest(content[:place], "x")
    with pytest.raises(CorruptCheckpointError):
        parse_manifest(content + b" ", "x")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff" * 100, b'{"format": 3}', random.randbytes(500)]
)
def test_what_is_no_manifest_is_corrupt(content):
    with pytest.raises(CorruptCheckpointError):
        parse_manifest(content, "x")


def test_a_newer_format_is_refused_in_words(monkeypatch):
    monkeypatch.setattr("shoal.checkpoint.manifest.FORMAT", 99)
    content = MANIFEST.to_bytes()
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"^step-5 was written by Shoal 1 in format 99, .* use the newer one"):
        parse_manifest(content, "step-5")


def test_the_first_format_is_no_damage():
    with pytest.raises(UserError, match=r"is in format 1, which Shoal .* no longer reads"):
        files = {"state.json": {"bytes": 3, "sha256": "ab"}}
        parse_manifest(json.dumps({"format": 1, "step": 3, "files": files}, indent=1).encode(), "step-3")


def with_hash(**fields: object) -> bytes:
    """A manifest with other fields and the hash that fits them."""
    known = json.loads(MANIFEST.to_bytes()) | fields
    body = json.dumps({key: value for key, value in known.items() if key != "xxh3_128" and value is not None})[
        1:
    ].encode()
    return b'{"xxh3_128": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'",' + body


def test_fields_of_another_kind_are_corrupt_even_if_the_hash_fits():
    assert parse_manifest(with_hash(), "x") == MANIFEST == parse_manifest(with_hash(later="field"), "x")
    for name, value in {
        "files": [],
        "step": "x",
        "format": "x",
        "world_size": "x",
        "metrics": "x",
        "time": {},
        "versions": 3,
    }.items():
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is not one"):
            parse_manifest(with_hash(**{name: value}), "x")
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is not one"):
            parse_manifest(with_hash(**{name: None}), "x")
    with pytest.raises(CorruptCheckpointError):
        parse_manifest(MANIFEST.to_bytes().replace(b'"format": 2', b'"format": 1'), "x")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", ".."])
def test_a_manifest_that_names_files_elsewhere_is_refused(name):
    content = replace(MANIFEST, files={name: FileFacts(1, "ab" * 16)}).to_bytes()
    with pytest.raises(CorruptCheckpointError, match="which is not a file of the checkpoint"):
        parse_manifest(content, "x")


def test_an_info_sums_up():
    info = CheckpointInfo(Path("a/step-00000007"), replace(MANIFEST, metrics={}))
    assert (info.step, info.num_bytes, info.metrics) == (7, 42, {})
    assert info.to_record()["world_size"] == 2 and json.dumps(info.to_record())
