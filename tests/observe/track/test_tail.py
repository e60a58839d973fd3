import json
from pathlib import Path

from shoal.core.storage import write_atomically
from shoal.observe.track.tail import Tail


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


def test_only_what_is_new_and_whole_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text(lines(1, 2) + '{"step": 3')
    assert [record["step"] for record in tail.read()] == [1, 2]
    assert tail.read() == [], "the third is still being written"
    with path.open("a") as file:
        file.write('}\nnot json\n[1]\n{"step": 4}\n')
    assert [record["step"] for record in tail.read()] == [3, 4]


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 3))
    tail = Tail(path)
    assert len(tail.read()) == 3
    write_atomically(path, lines(1, 2, 3, 4))  # as a resume does; longer than before
    assert [record["step"] for record in tail.read()] == [1, 2, 3, 4]
    path.write_text(lines(1))
    assert [record["step"] for record in tail.read()] == [1]


def test_a_long_file_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*range(1234)))
    tail = Tail(path)
    pieces = [len(tail.read()) for _ in range(4)]
    assert pieces == [500, 500, 234, 0]


def test_no_further_than_a_step(tmp_path: Path) -> None:
    path = tmp_path / "workers.jsonl"
    path.write_text(lines(10, 20, 30))
    tail = Tail(path)
    assert [record["step"] for record in tail.read(up_to=20)] == [10, 20]
    assert tail.read(up_to=29) == []
    assert [record["step"] for record in tail.read()] == [30]
