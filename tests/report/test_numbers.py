"""What a report says is what the metrics say about the histories."""

import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.report.synthetic import comparison, history

from equifed.metrics import paired_difference, summary, wilson_interval, worst_client_interval
from equifed.report import (
    Method,
    ReportError,
    Scale,
    as_json,
    as_methods,
    build,
    frontier_svg,
    numbers,
    read_methods,
    render,
    write_report,
)
from equifed.report.charts import find_non_dominated
from equifed.report.methods import check_methods
from equifed.report.numbers import count_bytes, measure_run
from equifed.report.tables import list_comparison
from equifed.training.history import History, MetricRecord, RoundRecord


def accuracies(*rows, n=100, metric="accuracy"):
    """Return a history with these values after rounds 0, 1, 2, ..."""
    names = tuple("abcdefgh"[: len(rows[0])])
    sizes = np.full(len(names), n)
    made = History(names)
    for r, row in enumerate(rows):
        if r:
            made.rounds.append(RoundRecord(r, None, 2, 10, 30, 0.1))
        made.metrics.append(MetricRecord(r, "test", metric, np.array(row, dtype=float), sizes))
    return made


def test_measures_are_the_reducers_of_the_last_evaluation():
    run = history(tuple("abcdef"))
    found = measure_run(run, Scale("accuracy", "test"), None)
    record = run.last()
    expected = summary(record.values, record.sizes, higher_is_better=True)
    assert {key: found[key] for key in expected} == expected


def test_differences_are_paired_within_seeds():
    methods = comparison(clients=12, methods=("fedavg", "scaff-pd"), seeds=4)
    report = build(methods)
    ours, theirs = ([r.last().values.min() for r in m.runs] for m in methods[::-1])
    expected = paired_difference(ours, theirs)
    assert report.told[1].estimates["worst"].difference.interval == expected
    shuffled = Method("scaff-pd", methods[1].runs[::-1])  # seeds decide, not their order
    again = build([methods[0], shuffled]).told[1].estimates["worst"].difference.interval
    assert again.estimate == pytest.approx(expected.estimate)
    assert again.upper == pytest.approx(expected.upper)


def test_one_seed_has_no_interval_between_seeds():
    report = build(comparison(clients=5, methods=("a", "b"), seeds=1))
    found = report.told[1].estimates["worst"]
    assert found.source == found.difference.about == "samples" and not found.difference.paired
    document = as_json(report)
    told = document["methods"][1]["measures"]["worst"]["difference"]
    assert told["limits_about"] == "samples" and told["lower"] < told["estimate"] < told["upper"]
    assert "with one seed" in document["headline"]["evidence"]
    assert "did not record" in document["headline"]["evidence"]


def test_losses_of_one_seed_have_no_interval():
    runs = {
        "a": accuracies([3.0], [1.0], metric="loss"),
        "b": accuracies([3.0], [0.5], metric="loss"),
    }
    report = build(as_methods(runs))
    assert math.isinf(report.told[1].estimates["worst"].difference.interval.upper)
    assert "nothing is known about other samples" in as_json(report)["headline"]["evidence"]


def test_target_is_reached_when_the_worst_client_gets_there():
    run = accuracies([0.1, 0.2], [0.5, 0.9], [0.7, 0.6], [0.8, 0.9])
    found = measure_run(run, Scale("accuracy", "test"), 0.6)
    assert (found["rounds_to_target"], found["bytes_to_target"]) == (2, 80)
    never = measure_run(run, Scale("accuracy", "test"), 0.95)
    assert math.isnan(never["rounds_to_target"])


def test_a_target_of_a_loss_is_reached_from_above():
    run = accuracies([3.0, 2.0], [1.0, 0.5], [0.4, 0.5], metric="loss")
    found = measure_run(run, Scale("loss", "test"), 0.5)
    assert found["rounds_to_target"] == 2


def test_a_target_that_some_seeds_miss_has_no_mean():
    runs = [accuracies([0.1], [0.9]), accuracies([0.1], [0.2])]
    methods = as_methods({"a": runs, "b": runs})
    found = build(methods, target=0.5).told[1].estimates["rounds_to_target"]
    assert found.reached == 1 and found.difference is None
    assert not math.isfinite(found.interval.estimate)
    rows = {row["key"]: row["cells"] for row in list_comparison(build(methods, target=0.5))}
    assert rows["rounds_to_target"][1]["value"] == "reached by 1 of 2"


def test_the_default_target_is_where_the_baseline_ends():
    runs = {"a": accuracies([0.1, 0.1], [0.5, 0.7]), "b": accuracies([0.1, 0.1], [0.6, 0.6])}
    assert build(as_methods(runs)).target == 0.5


def test_client_intervals_are_wilsons_and_the_worst_is_adjusted():
    run = history(tuple("abcdefgh"))
    report = build(as_methods(run))
    record = run.last()
    counts = np.rint(record.values * record.sizes)
    lower, upper = wilson_interval(counts, record.sizes)
    np.testing.assert_allclose(report.told[0].lower, lower)
    np.testing.assert_allclose(report.told[0].upper, upper)
    assert report.told[0].lowest == worst_client_interval(counts, record.sizes)


def test_clients_without_samples_are_left_out_of_the_intervals():
    run = history(tuple("abcd"))
    for record in run.metrics:
        record.values[0], record.sizes[0] = np.nan, 0
    report = build(as_methods(run))
    assert report.told[0].lowest.observed == int(np.nanargmin(run.last().values))
    assert 0 not in report.told[0].lowest.candidates
    assert math.isnan(report.told[0].lower[0])
    assert "a" in render(report)


def test_participation_and_quarantines_are_counted():
    run = accuracies([0.1, 0.1], [0.5, 0.7], [0.5, 0.7])
    run.rounds[1] = RoundRecord(2, None, 1, 1, 1, 0.1, {}, (1,))
    run.events += [
        {"event": "quarantine", "round": 2, "client": "a", "reason": "loss is NaN"},
        {"event": "quarantine", "round": 2, "client": "a", "reason": "again"},
        {"event": "resume", "round": 1},
    ]
    report = build(as_methods(run))
    assert report.told[0].participation.tolist() == [0.5, 1.0]
    assert report.told[0].quarantines.tolist() == [1, 0]  # rounds, not messages
    document = as_json(report)
    assert "a (1)" in document["headline"]["warnings"][0]
    assert len(document["methods"][0]["events"]) == 3


def test_bytes_are_counted_up_to_a_round():
    run = accuracies([0.1], [0.2], [0.3])
    assert count_bytes(run, np.array([0, 1, 2])).tolist() == [0, 40, 80]


def test_a_run_that_was_not_evaluated_is_reported_as_such(tmp_path):
    run = History(("a", "b"), rounds=[RoundRecord(1, 0.5, 1, 2, 3, 0.1)])
    text = write_report(build(as_methods(run)), tmp_path / "r.html").read_text()
    assert "No evaluation was recorded" in text
    with pytest.raises(ReportError, match="nothing to report"):
        write_report(build(as_methods(run)), tmp_path / "r.html", per_client=True)


def test_regression_runs_have_losses_only(tmp_path):
    run = accuracies([3.0, 2.0], [1.0, 0.5], metric="loss")
    report = build(as_methods(run))
    assert report.scale == Scale("loss", "test")
    text = render(report)
    assert "a is served worst: 1 test loss" in text and "Wilson" not in text


def test_no_certificate_is_said_and_a_certificate_is_drawn():
    assert "No certificate" in render(build(as_methods(history())))
    text = render(build(as_methods(history(gap=True))))
    assert 'id="certificate"' in text and "No certificate" not in text


def test_zero_and_perfect_accuracies_are_no_error():
    for row in ([0.0, 0.0], [1.0, 1.0], [0.0, 1.0]):
        report = build(as_methods({"a": accuracies(row, row), "b": accuracies(row, row)}))
        assert "NaN" not in json.dumps(as_json(report), allow_nan=False)
        render(report)


def test_infinite_and_missing_losses_are_no_error():
    report = build(as_methods(accuracies([1.0, 2.0], [math.inf, math.nan], metric="loss")))
    json.dumps(as_json(report), allow_nan=False)
    render(report)


def test_runs_with_other_clients_are_refused():
    with pytest.raises(ReportError, match="different clients"):
        as_methods({"a": history(("x", "y")), "b": history(("x", "z"))})


def test_an_unknown_baseline_is_refused():
    with pytest.raises(ReportError, match="choose from a"):
        build(as_methods({"a": history()}), baseline="b")


def test_folders_of_two_seeds_are_one_method(tmp_path):
    for seed in (0, 1):
        folder = history(seed=seed).save(tmp_path / f"fedavg-{seed}")
        (folder / "config.toml").write_text(f'seed = {seed}\nrounds = 20\n[data]\nname = "d"\n')
    other = history(pull=0.5).save(tmp_path / "fair")
    (method, fair) = read_methods([tmp_path / "fedavg-0", tmp_path / "fedavg-1", other])
    assert (method.name, method.seeds, fair.name) == ("fedavg", (0, 1), "fair")
    assert [m.name for m in read_methods([tmp_path])] == ["fair", "fedavg"]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ReportError, match="holds no run"):
        read_methods([tmp_path])


@pytest.mark.long
def test_a_page_of_a_thousand_clients_is_small(tmp_path):
    report = build(comparison(clients=1000, methods=("fedavg", "scaff-pd"), seeds=1))
    path = write_report(report, tmp_path / "report.html")
    assert path.stat().st_size < 3_000_000
    assert len(json.loads(path.with_suffix(".json").read_text())["methods"][0]["clients"]) == 1000


@pytest.mark.long
def test_ten_thousand_clients_are_a_small_page_from_few_draws(tmp_path, monkeypatch):
    draws = []
    resampled = numbers.accuracy_intervals

    def count(correct, sizes, resamples):
        draws.append((len(sizes), resamples))
        return resampled(correct, sizes, resamples=resamples)

    monkeypatch.setattr(numbers, "accuracy_intervals", count)
    methods = ("fedavg", "scaff-pd", "afl", "drfa")
    report = build(comparison(clients=10_000, methods=methods, seeds=1))
    path = write_report(report, tmp_path / "report.html")
    assert path.stat().st_size < 1_000_000
    assert draws == [(10_000, 100)] * 4
    clients = json.loads(path.with_suffix(".json").read_text())["methods"][0]["clients"]
    assert len(clients) == 10_000


def test_a_deviation_is_taken_from_resamples_enough():
    assert numbers.choose_resamples(4) == numbers.RESAMPLES
    for count in (4, 5000, 100_000):  # 1 / sqrt(2 B) of itself is its own deviation
        assert 1 / math.sqrt(2 * numbers.choose_resamples(count)) < 0.08


def test_a_history_reports_itself(tmp_path):
    run = history(("<b>", "c"))
    path = write_report(run, tmp_path / "deep" / "report.html")
    assert path.exists() and path.with_suffix(".json").exists()


points = st.lists(st.tuples(*[st.integers(0, 5)] * 2), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(points=points, higher=st.booleans())
def test_non_dominated_points_are_those_that_nobody_beats(points, higher):
    average, worst = np.array(points, dtype=float).T
    sign = 1 if higher else -1
    expected = [
        not any(
            sign * a2 >= sign * a and sign * w2 >= sign * w and (a2, w2) != (a, w)
            for a2, w2 in points
        )
        for a, w in points
    ]
    assert find_non_dominated(average, worst, higher_is_better=higher) == expected


def test_the_page_never_says_that_a_model_is_fair():
    text = render(build(comparison(clients=8, seeds=2)))
    assert "is fair" not in text and "fairer" not in text
    assert "over 2 seeds" in text and "8 clients" in text


def test_a_method_is_a_name_with_runs():
    with pytest.raises(ReportError, match="no runs"):
        as_methods({"a": []})
    with pytest.raises(ReportError, match="its own name"):
        check_methods([Method("a", (history(),))] * 2)


def test_every_run_of_the_baseline_reaches_the_default_target():
    methods = comparison(clients=9, methods=("a", "b"), seeds=4)
    report = build(methods)
    finals = [run.last().values.min() for run in methods[0].runs]
    assert report.target == min(finals)
    assert report.told[0].estimates["rounds_to_target"].reached == 4


def test_a_participants_page_names_no_other_client(tmp_path):
    names = ("Alpha", "Bravo", "Charlie")
    runs = {"one": history(names), "other": history(names, pull=0.5)}
    write_report(runs, tmp_path / "report.html", per_client=True)
    pages = sorted((tmp_path / "report-clients").iterdir())
    assert len(pages) == len(names)
    for name, page in zip(names, pages, strict=True):
        text = page.read_text()
        assert name in text and not any(other in text for other in names if other != name)


def test_average_against_worst_is_a_drawing_of_its_own():
    report = build(comparison(clients=6, seeds=2))
    root = ElementTree.fromstring(frontier_svg(report, range(6)))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(method.name in words for method in report.methods)
