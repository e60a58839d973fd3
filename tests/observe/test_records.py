import json
from typing import Any

from shoal.observe.records import Observers, Report, Workers


class Notes:
    def __init__(self, name: str, book: list[tuple[Any, ...]]) -> None:
        self.name, self.book = name, book

    def report(self, report: Report) -> None:
        self.book.append((self.name, report))

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.book.append((self.name, name, fields))

    def tick(self, step: int) -> None:
        self.book.append((self.name, step))


def test_a_report_is_written_as_time_step_epoch_samples_metrics_and_seconds() -> None:
    report = Report(7, 1 / 3, {"train_loss": 0.5}, {"data": 0.1}, 448, time=123.45678)
    assert report.to_record() == {
        "time": 123.457,
        "step": 7,
        "epoch": 0.333333,
        "samples": 448,
        "metrics": {"train_loss": 0.5},
        "seconds": {"data": 0.1},
    }


def test_a_report_comes_out_of_a_message_as_it_went_in() -> None:
    workers = Workers(10.0, {"data": [0.1, 0.2]}, {"gpu_busy": [None, 0.5]}, "input", "input: slow")
    for report in (Report(7, 0.5, {"a": 1.0}, {"data": 0.1}, 8, 1.5), Report(7, 0.5, {}, {}, 8, 1.5, workers)):
        assert Report.from_message(json.loads(json.dumps(report.to_message()))) == report


def test_several_observers_all_see_everything_in_their_order() -> None:
    book: list[tuple[Any, ...]] = []
    both = Observers(Notes("a", book), Notes("b", book))
    report = Report(1, 0.0, {}, {})
    both.event("start", {"step": 0})
    both.tick(1)
    both.report(report)
    assert book == [
        ("a", "start", {"step": 0}),
        ("b", "start", {"step": 0}),
        ("a", 1),
        ("b", 1),
        ("a", report),
        ("b", report),
    ]
