"""The first sentence of a report is right about federations whose truth is known."""

import json
import math
from dataclasses import astuple

import numpy as np
import pytest
from scripts.verdicts import KINDS, count_right, judge
from tests.report.synthetic import comparison

import equifed as ef
from equifed.contract.evaluation import Calibration, ClientDetail, Details, GroupDetail
from equifed.metrics.paired import gain_of_pairs
from equifed.report import (
    ReportError,
    Scale,
    as_json,
    as_methods,
    build,
    list_comparison,
    render,
    render_participant,
    write_verdict,
)
from equifed.report.verdict import compare_alone, tabulate_alone
from equifed.runs.evidence import write_model_card
from equifed.training.history import History, MetricRecord, RoundRecord

pytestmark = pytest.mark.long

ACCURACY = Scale("accuracy", "test")


@pytest.mark.parametrize("kind", KINDS)
def test_verdicts_are_right(kind):
    assert count_right(kind, each=20, seed=1) >= 19


def made(correct, sizes, *, alone=None, details=True, train_loss=0.4):
    """Return a run with these correct answers."""
    sizes = np.asarray(sizes)
    names = tuple(f"clinic {chr(65 + i)}" for i in range(len(sizes)))
    values = np.asarray(correct) / sizes
    run = History(names, rounds=[RoundRecord(1, 0.5, 2, 100, 100, 0.1)])
    run.metrics = [
        MetricRecord(1, "test", "accuracy", values, sizes),
        MetricRecord(1, "test", "auroc", np.where(sizes > 5, values, np.nan), sizes),
        MetricRecord(1, "train", "loss", np.full(len(sizes), train_loss), sizes),
    ]
    if alone is not None:
        run.alone = MetricRecord(0, "test", "accuracy", np.asarray(alone) / sizes, sizes)
        sides = zip(names, alone, correct, sizes, strict=True)
        gains = {n: list(astuple(compare(a, k, m))) for n, a, k, m in sides}
        run.events = [{"event": "alone", "one_class": [], "reason": "", "gains": gains}]
    if details:
        told = [
            ClientDetail(int(m), {"auroc": (0.1, 0.9)}, 0.6, 2, Calibration.measure(
                np.linspace(0.5, 1, int(m)), np.arange(int(m)) % 2 == 0),
                {"f": GroupDetail(2, {"accuracy": 0.5}, {"accuracy": (0.1, 0.9)})})
            for m in sizes
        ]  # fmt: skip
        run.details = Details("test", tuple(told))
    return run


def compare(ours, theirs, m):
    """Compare two models of which the better one is right wherever the other one is."""
    answers = [(np.arange(m) < k) * 1.0 for k in (ours, theirs)]
    return gain_of_pairs(*answers, higher_is_better=True, fraction=True)


def sentence(run):
    return write_verdict(as_methods(run)[0], ACCURACY).sentence


def test_an_underserved_client_is_named_with_its_distance():
    run = made([80, 82, 30], [100, 100, 100])
    said = sentence(run)
    assert said.startswith("The worst-served client, clinic C, is ")
    assert said.endswith(" points below what chance explains.")


def test_chance_is_said_to_be_chance():
    assert sentence(made([8, 9, 6], [10, 10, 10])) == (
        "One shared model serves all clients alike: the spread is what chance explains at these "
        "numbers of test samples."
    )


def test_a_perfect_model_has_no_spread():
    assert "every test sample is answered correctly" in sentence(made([9, 4], [9, 4]))


def test_one_client_is_served_equally_with_itself_and_nothing_is_said():
    found = write_verdict(as_methods(made([8], [10]))[0], ACCURACY)
    assert found.sentence == "" and not found.notes
    assert "How sure are we?" not in render(build(as_methods(made([8], [10]))))


def test_few_samples_are_said_to_be_too_few():
    assert (
        "With 3 test samples (the median) no accuracy"
        in judge(np.array([3, 1, 2]), np.array([3, 3, 3])).notes[-1]
    )


def test_who_would_be_better_off_alone_is_named_if_chance_does_not_explain_it():
    run = made([80, 82, 30], [100, 100, 100], alone=[70, 83, 90])
    assert sentence(run).endswith("; clinic C would be better off alone, by 60.0 points.")
    found = write_verdict(as_methods(run)[0], ACCURACY)
    assert found.better_alone == ("clinic C",)
    assert any("2 of 3 clients have a better test accuracy" in note for note in found.alone)
    chance = made([80, 82, 30], [100, 100, 100], alone=[81, 83, 30])
    clause, notes, names = compare_alone(chance, ACCURACY)
    assert clause == "no client would clearly be better off alone" and names == ()
    assert "2 of 3 clients" in notes[0] and "No difference is significant" in notes[0]
    worse = made([80, 82, 79], [100, 100, 100], alone=[70, 73, 60])
    assert compare_alone(worse, ACCURACY)[0] == "no client would be better off alone"


def test_answers_to_the_same_samples_tell_more_than_two_accuracies():
    run = made([50, 50, 50], [100, 100, 100], alone=[58, 50, 50])
    run.events = []
    assert tabulate_alone(run, ACCURACY).sure == ()
    gain = compare(58, 50, 100)
    assert gain.p == 0.5**8  # eight answers differ, all in favour of the own model
    run.events = [
        {
            "event": "alone",
            "one_class": ["clinic B"],
            "reason": "",
            "gains": {"clinic A": [gain.difference, gain.lower, gain.upper, gain.p]},
        }
    ]
    found = tabulate_alone(run, ACCURACY)
    assert found.sure == (0,) and list(found.some) == [0, 2]
    page = render(build(as_methods(run)))
    assert "clinic A would be better off alone, by 8.0\N{NO-BREAK SPACE}points" in page
    assert "clinic B has training samples of one class" in page


def test_regression_without_details_says_that_nothing_is_known():
    run = History(("a", "b"), rounds=[RoundRecord(1, 0.5, 2, 100, 100, 0.1)])
    run.metrics = [MetricRecord(1, "test", "mse", np.array([1.0, 2.0]), np.array([9, 9]))]
    found = write_verdict(as_methods(run)[0], Scale("mse", "test"))
    assert found.sentence == "" and found.equal is None
    assert "not known" in found.notes[0]
    page = render(build(as_methods(run)))
    assert "test MSE" in page and "test mse" not in page


def test_the_page_has_what_its_numbers_need_beside_them():
    run = made([80, 82, 30, 4], [100, 100, 100, 5], alone=[70, 83, 90, 4])
    report = build(as_methods(run))
    page = render(report)
    for text in (
        "How sure are we?", "Majority class", "majority class 60.0 %",
        "it would still be about", "Groups inside clients", "Calibration error",
        "What the words mean", "Further metrics", "Alone",
    ):  # fmt: skip
        assert text in page, text
    numbers = as_json(report)
    assert json.loads(json.dumps(numbers, allow_nan=False))["verdict"]["underserved"]
    assert numbers["methods"][0]["clients"][3]["auroc"] is None
    assert numbers["methods"][0]["clients"][0]["majority"] == 0.6
    asides = [cell["aside"] for row in list_comparison(report) for cell in row["cells"]]
    assert sum(bool(aside) for aside in asides) == 2


def test_a_participant_is_told_its_majority_class_and_nobody_elses_name():
    run = made([80, 82, 30], [100, 100, 100], alone=[70, 83, 90])
    report = build(as_methods(run))
    page = render_participant(report, 0)
    assert "Majority class" in page and "Alone" in page
    assert "clinic C" not in page


def test_lines_of_methods_are_told_apart_without_colours():
    page = render(build(comparison(clients=8, seeds=1)))
    dashes = [
        line.partition("--d:")[2].strip(" ;}") for line in page.splitlines() if "--d:" in line
    ]
    assert len(dashes) == 6 == len(set(dashes))


def test_own_parts_are_told_on_every_page(tmp_path):
    table = {
        "rounds": 3,
        "data": {"name": "heart-disease"},
        "model": {"name": "logistic", "l2": 0.01, "own": "bias", "own_l2": 0.02},
        "algorithm": {"name": "scaff-pd", "objective": "average"},
    }
    history = ef.run(table, tmp_path / "run")
    loaded = History.load(tmp_path / "run", model=False)  # as the command reads it, without torch
    np.testing.assert_array_equal(loaded.without_own.values, history.without_own.values)

    # The shared model with the mean of the own parts, measured by its predictions.
    data, mean = ef.load("heart-disease"), history.predictor()
    for i, name in enumerate(data.names):
        inputs, targets = data.test.client(i)
        right = mean.answer(inputs).argmax(axis=1) == targets  # the module holds the mean
        assert np.isclose(history.without_own.values[i], right.mean()), name

    report = build(as_methods(loaded))
    page = render(report)
    for text in ("Own part: 1.bias, 2 numbers per client", "own_l2 = 0.02", "Without own part",
                 "which is what a new client gets"):  # fmt: skip
        assert text in page, text
    mine = render_participant(report, 0)
    assert "Own part: 1.bias, 2 numbers per client" in mine and "Without own part" in mine
    card = write_model_card(tmp_path / "run", tmp_path).read_text()
    assert "own_l2 = 0.02" in card and "1.bias, 2 numbers per client" in card
    assert "test accuracy without own part" in card and "test accuracy alone" in card


# -- result, advice, remarks ----------------------------------------------------------------------


def say(runs, **settings):
    return as_json(build(as_methods(runs), **settings))["headline"]


def test_the_baseline_counts_and_ties_are_said():
    low, high = made([70, 70, 60], [100] * 3), made([80, 82, 78], [100] * 3)
    best = say({"plain": high, "fair": low})
    assert best["result"].startswith("plain, the baseline, serves best: ")
    assert best["advice"].startswith("Use plain: no other method")
    tied = say({"plain": high, "fair": made([82, 80, 78], [100] * 3)})
    assert tied["result"].startswith("plain, fair serve the worst-served of 3 clients equally well")
    assert tied["advice"].startswith("Use plain")


def test_the_chosen_method_is_the_one_of_the_page():
    runs = {"plain": made([80, 82, 78], [100] * 3), "own": made([81, 82, 70], [100] * 3)}
    report = build(as_methods(runs), chosen="own")
    assert report.methods[report.lead].name == "own"
    headline = as_json(report)["headline"]
    assert headline["result"].startswith("Own makes no measurable difference against plain")
    assert headline["advice"].startswith('Use the model "own", which was chosen on validation')
    assert '<span class="change">chosen</span>' in render(report)
    with pytest.raises(ReportError, match="no method 'other'"):
        build(as_methods(runs), chosen="other")


@pytest.mark.parametrize("sign", [1, -1])
def test_the_federation_as_a_whole_is_compared_with_alone(sign):
    shared = np.array([60, 61, 59, 62, 60, 58])
    gains = sign * np.array([3, 4, 2, 3, 5, 4])  # too little for any client of 100 samples
    run = made(shared, [100] * 6, alone=shared + gains, details=False)
    found = write_verdict(as_methods(run)[0], ACCURACY)
    assert found.all_alone == (sign > 0) and found.better_alone == ()
    assert f"{abs(gains).mean():.1f} points" in found.together
    assert say(run)["advice"].startswith("Train a model per client") == (sign > 0)
    mixed = made(shared, [100] * 6, alone=shared + np.array([3, -3, 2, -2, 1, -1]), details=False)
    assert write_verdict(as_methods(mixed)[0], ACCURACY).all_alone is False


def test_a_few_clients_that_gain_alike_by_chance_are_not_all_better_off_alone():
    """No client's own model is better; rows are drawn anew, by hand. Equal gains are no proof."""
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        run = made(np.full(4, 50), [100] * 4, alone=np.full(4, 50), details=False)
        table = rng.binomial(30, 0.3, size=(4, 2)) / 30  # answers that one of the models alone has
        gains, error = table[:, 0] - table[:, 1], math.sqrt(2 * 0.3 * 0.7 / 30)
        told = {name: [g, g - 1.96 * error, g + 1.96 * error, 0.5]
                for name, g in zip(run.names, gains, strict=True)}  # fmt: skip
        run.events[:] = [{"event": "alone", "round": 0, "reason": "", "gains": told}]
        found.append(write_verdict(as_methods(run)[0], ACCURACY).all_alone)
    assert sum(map(bool, found)) <= 0.05 * 300  # Student's test alone: a one in twenty of its own


def test_a_worst_client_of_weight_zero_is_remarked_upon():
    run = made([80, 82, 30], [100] * 3)
    for weights, remarked in (([0.5, 0.5, 0.0], True), ([0.5, 0.0, 0.5], False)):
        run.weights = {1: np.array(weights)}
        warnings = say(run)["warnings"]
        assert any("clinic C is served worst" in w for w in warnings) == remarked


def test_a_model_that_has_learned_nothing_is_said_to():
    for factor, remarked in ((1.0, True), (0.9, False)):
        run = made([50, 52, 48], [100] * 3)
        losses = np.full(3, factor * np.log(2))
        run.metrics.append(MetricRecord(1, "test", "loss", losses, np.full(3, 100)))
        assert any("same probability" in w for w in say(run)["warnings"]) == remarked


def test_a_gain_that_costs_the_average_is_advised_with_its_price():
    plain = made([95, 95, 95, 95, 40], [100] * 5, details=False)
    fair = made([80, 80, 80, 80, 75], [100] * 5, details=False)
    said = say({"plain": plain, "fair": fair})
    assert said["result"].startswith("fair helps against plain")
    assert said["advice"] == "Use fair if the worst-served are worth 5.0 points of the average."
    cheap = made([95, 94, 95, 96, 75], [100] * 5, details=False)
    assert say({"plain": plain, "fair": cheap})["advice"] == "Use fair."


def test_the_optimum_of_two_opposed_clients_is_said_to_have_learned_nothing():
    rows = np.random.default_rng(0).normal(size=(60, 3))
    labels = (rows[:, 0] > 0).astype(int)
    sides = {"up": (rows, labels), "down": (rows, 1 - labels)}
    data = ef.Federation.from_clients(sides, test=sides)
    worst = ef.FairNewton(ef.objectives.WorstCase())
    run = ef.train(worst, ef.simulate(data, "logistic", l2=0.01), rounds=10, evaluate=["test"])
    assert any("as one that has learned nothing" in w for w in say(run)["warnings"])


def test_the_same_event_of_several_methods_is_said_once():
    runs = {}
    for name in ("one", "two"):
        runs[name] = made([80, 82, 78], [100] * 3)
        runs[name].events = [{"event": "watch", "round": 5, "client": "clinic A", "reason": "r"}]
    told = [w for w in say(runs)["warnings"] if "stood out" in w]
    assert len(told) == 1 and told[0].startswith("one, two: 1 client stood out")
