import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import UserError
from shoal.data import text
from shoal.data.download import PublicFile
from shoal.data.section import CharText
from shoal.data.text import load_text
from shoal.data.tokenizer import encode_characters
from shoal.data.windows import IGNORE

from ..fake_data import write_text
from .file_server import serve

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def section(folder, **changes):
    return CharText(**{"name": "text", "dir": str(folder), "download": False, "context": 32, **changes})


def decode(ids, vocabulary):
    return "".join(vocabulary[index] for index in ids.tolist())


@pytest.mark.parametrize(("chars", "context", "fraction"), [(5000, 32, 0.1), (5001, 7, 0.25), (100, 80, 0.01)])
def test_every_validation_character_is_predicted_once(tmp_path, chars, context, fraction):
    content = (write_text(tmp_path, chars) / "input.txt").read_text(encoding="utf-8")
    data = load_text(section(tmp_path, context=context, val_fraction=fraction))
    vocabulary = "".join(sorted(set(content)))
    num_val = round(chars * fraction)
    inputs, targets = data.val.batch(np.arange(len(data.val)), 0)
    counted = targets != IGNORE
    assert decode(targets[counted], vocabulary) == content[-num_val:]
    assert decode(inputs[counted], vocabulary) == content[-num_val - 1 : -1]


def test_training_windows_stay_in_the_first_part(tmp_path):
    content = (write_text(tmp_path, 1000) / "input.txt").read_text(encoding="utf-8")
    vocabulary = "".join(sorted(set(content)))
    data = load_text(section(tmp_path))
    assert data.spec.vocab_size == len(vocabulary) and data.spec.context == 32
    assert len(data.train) == (900 - 33) // 32 + 1
    inputs, targets = data.train.batch(np.array([0, 5]), 0)
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == (2, 32)
    assert decode(inputs[1], vocabulary) == content[160:192] and decode(targets[1], vocabulary) == content[161:193]
    dense = load_text(section(tmp_path, stride=1)).train
    assert len(dense) == 900 - 32
    assert decode(dense.batch(np.array([len(dense) - 1]), 0)[1][0], vocabulary) == content[868:900]
    assert torch.equal(pickle.loads(pickle.dumps(dense)).batch(np.array([3]), 0)[0], dense.batch(np.array([3]), 0)[0])


def test_more_characters_than_fit_in_a_byte():
    content = "".join(chr(code) for code in range(0x4E00, 0x4E00 + 400)) + "\U0001f41f\r\n"
    vocabulary, ids = encode_characters(content)
    assert vocabulary == "".join(sorted(content))
    assert "".join(vocabulary[index] for index in ids) == content


def test_too_short_for_the_context(tmp_path):
    write_text(tmp_path, 40)
    assert len(load_text(section(tmp_path, context=35)).train) == 1
    with pytest.raises(UserError, match=r"^data.context: 36 characters do not fit in the 36 that .*input.txt has"):
        load_text(section(tmp_path, context=36))


def test_broken_and_missing_files(tmp_path):
    with pytest.raises(UserError, match=rf"input.txt not found in .* Put it in {tmp_path}\.$"):
        load_text(section(tmp_path, download=True))
    (tmp_path / "input.txt").write_bytes(b"")
    with pytest.raises(UserError, match=r"input.txt: is empty"):
        load_text(section(tmp_path))
    (tmp_path / "input.txt").write_bytes(b"one\ntwo \xe9 three")
    with pytest.raises(UserError, match=r"input.txt: line 2 is not UTF-8 \(byte 0xe9 at 8\); convert it"):
        load_text(section(tmp_path))


def test_shakespeare_is_downloaded(tmp_path, monkeypatch):
    content = (write_text(tmp_path / "origin") / "input.txt").read_bytes()
    with serve() as server:
        server.files["input.txt"] = content
        checksum = "sha256:" + hashlib.sha256(content).hexdigest()
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(text, "SHAKESPEARE", PublicFile("input.txt", checksum, (server.url("input.txt"),)))
        assert len(load_text(section(tmp_path / "data", name="shakespeare", download=True)).train) > 0
        with pytest.raises(UserError, match=r"other.txt not found"):
            load_text(section(tmp_path / "data", name="shakespeare", file="other.txt", download=True))
    assert (tmp_path / "data" / "shakespeare" / "input.txt").read_bytes() == content
    (tmp_path / "data" / "shakespeare" / "input.txt").write_bytes(b"")
    with pytest.raises(UserError, match="is empty; delete it to download it again"):
        load_text(section(tmp_path / "data", name="shakespeare", download=True))


@pytest.mark.skipif(not (SHARED / "tinyshakespeare").is_dir(), reason="no tinyshakespeare in ../shared/data")
def test_the_real_file():
    data = load_text(section(SHARED, name="shakespeare", context=256, download=True))
    assert data.spec.vocab_size == 65
    _, targets = data.val.batch(np.arange(len(data.val)), 0)
    assert int((targets != IGNORE).sum()) == 111_539
