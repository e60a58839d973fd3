import json
import re
from pathlib import Path

import torch

from shoal.bench.results import keep, machine
from shoal.core.version import VERSION

PNG = b"\x89PNG\r\n\x1a\n"


def test_what_the_numbers_depend_on_is_written_down() -> None:
    found = machine()
    assert found["shoal"] == VERSION and found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads() and found["device"] and found["platform"] and found["python"]


def test_a_result_is_kept_as_json_and_as_a_plot(tmp_path: Path) -> None:
    result = {"ratio": 1.5, "ratios": [1.4, 1.5, 1.6]}
    written = keep(tmp_path / "new" / "folder", "step-x", result, {"shoal": 3.0, "by hand": 2.0}, "ms a step")
    assert [path.suffix for path in written] == [".json", ".png"]
    assert all(re.fullmatch(r"step-x-\d{8}-\d{6}", path.stem) for path in written)
    assert sorted((tmp_path / "new" / "folder").iterdir()) == sorted(written)
    assert json.loads(written[0].read_text()) == {"benchmark": "step-x", "machine": machine(), **result}
    image = written[1].read_bytes()
    assert image.startswith(PNG)
    width, height = (int.from_bytes(image[start : start + 4]) for start in (16, 20))
    assert width > 300 and height > 100
