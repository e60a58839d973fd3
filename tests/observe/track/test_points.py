from shoal.observe.track.points import Point, points_of_report, points_of_workers, unsent


def test_a_report_is_its_metrics_and_its_seconds() -> None:
    record = {"time": 5.5, "step": 10, "metrics": {"train_loss": 1.5, "bad": None}, "seconds": {"data": 0.25}}
    found = list(points_of_report(record, otherwise=0.0))
    assert found == [Point("train_loss", 1.5, 10, 5.5), Point("seconds/data", 0.25, 10, 5.5)]


def test_what_is_not_a_report_is_no_point() -> None:
    wrong = [{}, {"step": "x", "metrics": {"a": 1}}, {"step": True, "metrics": {"a": 1}}, {"step": 1, "metrics": [1]}]
    wrong += [{"step": 1, "metrics": {"a": "x", "b": True}, "seconds": 3}]
    assert [list(points_of_report(record, 0.0)) for record in wrong] == [[]] * 5
    assert [list(points_of_workers(record, 0.0)) for record in [*wrong, {"step": 1, "system": {"a": 3}}]] == [[]] * 6


def test_an_early_run_has_no_times() -> None:
    assert [point.time for point in points_of_report({"step": 1, "metrics": {"a": 1}}, 77.0)] == [77.0]


def test_workers_are_told_as_their_mean_and_where_it_matters_their_most() -> None:
    system = {"cpu_cores": [1.0, 3.0], "memory_bytes": [10.0, 20.0, None], "gpu_busy": [None, None]}
    found = {point.name: point.value for point in points_of_workers({"step": 4, "system": system}, 1.0)}
    assert found == {"system/cpu_cores": 2.0, "system/memory_bytes": 15.0, "system/memory_bytes_max": 20.0}


def test_steps_that_were_sent_are_not_sent_again() -> None:
    points = [Point("a", 1.0, step, 0.0) for step in (10, 20, 20, 30)] + [Point("b", 1.0, 20, 0.0)]
    assert [(point.name, point.step) for point in unsent(points, {"a": 10})] == [("a", 20), ("a", 30), ("b", 20)]
