"""Numbers of a report lie in their intervals, are written once, and claim no more than is known."""

import html
import json
import math
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equifed.contract.evaluation import Hits
from equifed.metrics import wilson_interval
from equifed.metrics.paired import count_pairs, newcombe_interval
from equifed.report import (
    Method,
    Scale,
    as_json,
    as_methods,
    build,
    list_comparison,
    render,
    render_participant,
)
from equifed.report.numbers import LEVELS
from equifed.report.tables import pack_clients
from equifed.training.history import History, MetricRecord, RoundRecord

pytestmark = pytest.mark.long

ACCURACY = Scale("accuracy", "test")


def make_run(answers, *, start=None, hits=True, sums=None):
    """Return a run whose final model answers so: a list of booleans for each client."""
    names = tuple(f"clinic {chr(65 + i // 26)}{chr(65 + i % 26)}" for i in range(len(answers)))
    sizes = np.array([len(a) for a in answers])
    final = np.array([np.mean(a) if len(a) else math.nan for a in answers])
    run = History(names, rounds=[RoundRecord(1, 0.5, 2, 100, 100, 0.1)])
    for r, values in enumerate([final * 0 if start is None else start, final]):
        run.metrics.append(MetricRecord(r, "test", "accuracy", values, sizes))
        run.metrics.append(MetricRecord(r, "test", "loss", 2.0 - values, sizes))
    if hits:
        sums = np.arange(len(answers)) if sums is None else sums
        flat = np.concatenate([np.asarray(a, dtype=bool) for a in answers])
        run.hits = {"test": Hits(flat, sums)}
    return run


def flip(answers, rng, share):
    return [np.asarray(a, dtype=bool) ^ (rng.random(len(a)) < share) for a in answers]


def read_number(text):
    return float(text.replace("−", "-").replace("±", "").replace("+", "").replace(",", ""))


# -- seeds that change nothing are no evidence --------------------------------------------------


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_three_of_eight_against_five_of_eight_is_no_gain_of_25_points(seeds):
    few, more = [[1, 1, 1, 0, 0, 0, 0, 0]], [[1, 1, 1, 1, 1, 0, 0, 0]]
    runs = {"plain": [make_run(few)] * seeds, "fair": [make_run(more)] * seeds}
    report = build(as_methods(runs))
    difference = report.told[1].estimates["worst"].difference
    _, lower, upper = newcombe_interval(np.array([[3.0, 2.0, 0.0, 3.0]]))
    assert difference.about == "samples" and difference.paired
    assert difference.interval.lower == pytest.approx(lower[0]) and lower[0] < 0
    assert difference.interval.upper == pytest.approx(upper[0])
    span = f"95 % interval {ACCURACY.signed(lower[0])} to {ACCURACY.signed(upper[0])}"
    result = as_json(report)["headline"]["result"]
    assert f"+25.0 points ({span})" in result and "makes no measurable difference" in result


def test_five_equal_runs_have_the_interval_of_one():
    rng = np.random.default_rng(0)
    ours = [rng.random(37) < 0.7 for _ in range(4)]
    theirs = flip(ours, rng, 0.1)
    one, five = (
        build(as_methods({"a": [make_run(ours)] * n, "b": [make_run(theirs)] * n})) for n in (1, 5)
    )
    for m in (0, 1):
        for key in LEVELS:
            a, b = one.told[m].estimates[key], five.told[m].estimates[key]
            assert b.source == "samples"
            assert [b.interval.lower, b.interval.upper] == pytest.approx(
                [a.interval.lower, a.interval.upper]
            )
            if m:
                a, b = a.difference.interval, b.difference.interval
                assert b.lower < b.upper
                assert [b.lower, b.upper] == pytest.approx([a.lower, a.upper])
    assert "over 5 seeds that agree" in as_json(five)["headline"]["evidence"]


def test_losses_that_agree_over_seeds_have_no_interval():
    run = make_run([[1, 0, 1], [1, 1, 0]])
    run.metrics = [r for r in run.metrics if r.metric == "loss"]
    other = make_run([[1, 1, 1], [1, 1, 0]])
    other.metrics = [r for r in other.metrics if r.metric == "loss"]
    found = (
        build(as_methods({"a": [run] * 3, "b": [other] * 3})).told[1].estimates["average_by_client"]
    )
    assert found.source == found.difference.about == "none"
    assert math.isinf(found.interval.upper) and math.isinf(found.difference.interval.upper)


def test_seeds_that_vary_on_the_same_samples_add_to_what_samples_say():
    rng = np.random.default_rng(1)
    base = [rng.random(40) < 0.6 for _ in range(5)]
    runs = {
        name: [make_run(flip(base, rng, share)) for _ in range(4)]
        for name, share in (("a", 0.05), ("b", 0.1))
    }
    methods = as_methods(runs)
    found = build(methods).told[1].estimates["average_by_client"].difference
    assert found.about == "seeds and samples" and found.paired
    for run in (r for m in methods for r in m.runs):
        run.hits = {}
    apart = build(methods).told[1].estimates["average_by_client"].difference
    assert apart.about == "seeds"
    assert found.interval.lower < apart.interval.lower < apart.interval.upper < found.interval.upper


def test_samples_are_paired_only_where_they_are_the_same():
    rng = np.random.default_rng(2)
    ours = [rng.random(50) < 0.7 for _ in range(3)]
    theirs = flip(ours, rng, 0.05)
    same = build(as_methods({"a": make_run(ours), "b": make_run(theirs)}))
    others = make_run(theirs, sums=np.array([0, 1, 99]))
    for run in (others, make_run(theirs, hits=False)):
        report = build(as_methods({"a": make_run(ours), "b": run}))
        apart, paired = (
            r.told[1].estimates["average_by_client"].difference for r in (report, same)
        )
        assert paired.paired and not apart.paired and apart.about == "samples"
        wide, narrow = (d.interval.upper - d.interval.lower for d in (apart, paired))
        assert narrow < 0.7 * wide
        assert "did not record" in as_json(report)["headline"]["evidence"]


def test_hits_of_another_model_than_the_accuracies_are_not_paired():
    ours, theirs = make_run([[1, 1, 0, 0]]), make_run([[1, 0, 0, 0]])
    theirs.hits = make_run([[1, 1, 1, 0]]).hits
    found = build(as_methods({"a": ours, "b": theirs})).told[1].estimates["worst"].difference
    assert found.about == "samples" and not found.paired


def test_pairs_are_those_of_the_clients_with_samples():
    ours, theirs = [[1, 0, 1, 1], [], [0, 0, 1]], [[1, 1, 1, 1], [], [0, 1, 0]]
    report = build(as_methods({"a": make_run(ours), "b": make_run(theirs)}))
    flat = [np.concatenate([np.asarray(a, dtype=bool) for a in side]) for side in (theirs, ours)]
    difference, _, _ = newcombe_interval(count_pairs(*flat, [4, 3]))
    found = report.told[1].estimates["average_by_client"].difference
    assert found.paired and found.interval.estimate == pytest.approx(difference.mean())


# -- written once -------------------------------------------------------------------------------


def test_a_limit_reads_the_same_in_the_sentence_and_in_the_table():
    m = 400  # quarters of a percent: a second rounding would turn some of them over
    for k in range(0, m + 1, 7):
        report = build(as_methods(make_run([[True] * k + [False] * (m - k), [True] * m])))
        shown = pack_clients(report)["methods"][0]["columns"]["value"]
        (lower,), (upper,) = wilson_interval([k], [m])
        assert shown["notes"][0] == ACCURACY.span(lower, upper)
        assert shown["text"][0] == ACCURACY.text(k / m)
        sentence = as_json(report)["headline"]["result"]
        if k < m:
            told = f"{shown['text'][0]} test accuracy (95 % interval {shown['notes'][0]})"
            assert told in sentence, k
    data = json.loads(re.search(r'id="data">(.*?)</script>', render(report), re.S).group(1))
    assert data == json.loads(
        json.dumps(pack_clients(report))
    )  # which is what the page's script shows


def test_the_script_of_the_page_does_no_rounding_of_its_own():
    script = render(build(as_methods(make_run([[1, 0]])))).rsplit("<script>", 1)[1]
    assert "toFixed" not in script and "toPrecision" not in script


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30), st.randoms())
def test_the_order_of_a_sum_does_not_change_what_is_written(counts, random):
    values = [k / 400 for k in counts]
    shuffled = random.sample(values, len(values))
    assert ACCURACY.text(sum(values) / len(values)) == ACCURACY.text(sum(shuffled) / len(values))


# -- any report ---------------------------------------------------------------------------------

lengths = st.one_of(st.lists(st.integers(0, 12), min_size=1, max_size=50), st.just([8]))


cases = st.fixed_dictionaries(
    {
        "sizes": lengths.filter(any),
        "seeds": st.integers(1, 5),
        "methods": st.integers(1, 3),
        "seed": st.integers(0, 10**6),
        "level": st.sampled_from([0.0, 0.5, 0.8, 1.0]),
        "vary": st.booleans(),
        "hits": st.booleans(),
        "metric": st.sampled_from(["accuracy", "loss"]),
    }
)


def make_report(sizes, seeds, methods, seed, level, vary, hits, metric):
    """Return a report of clients with tiny test sets, ties, and clients without samples."""
    rng = np.random.default_rng(seed)
    base = [rng.random(m) < level for m in sizes]
    made = []
    for m in range(methods):
        first = flip(base, rng, 0.2 * m)
        runs = []
        for s in range(seeds):
            run = make_run(flip(first, rng, 0.2 * vary), hits=hits)
            if metric == "loss":
                run.metrics = [r for r in run.metrics if r.metric == "loss"]
            run.provenance["seed"] = s
            runs.append(run)
        made.append(Method(f"method {m}", tuple(runs)))
    return build(made)


def visible_text(page):
    """Return the words of a page, the data of its script among them, without the drawings."""
    body = page.partition("<body>")[2].rpartition("<script>")[0]
    body = re.sub(r"<svg.*?</svg>", " ", body, flags=re.S)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))).replace("\xa0", " ")


NUMBER = r"[−+±]?[\d,.]+(?:e[-+]\d+)?"
SPAN = re.compile(
    rf"({NUMBER})(?: %| points)?(?: test accuracy| test loss| against method \d)?"
    rf"(?: on your \d+ samples?)?[,]? \(?95 % interval ({NUMBER}) to ({NUMBER})"
)


def check_intervals(text):
    found = SPAN.findall(text)
    for estimate, lower, upper in found:
        assert read_number(lower) <= read_number(estimate) <= read_number(upper), text
    # None has escaped the expression above, for which it would say nothing.
    assert len(found) == len(re.findall(rf"95 % interval {NUMBER} to", text)), text


def check_comparison(report):
    """Check that every cell's number lies in its interval, or has the corrected one beside it."""
    for row in list_comparison(report):
        for cell in row["cells"]:
            value = re.match(NUMBER, cell["value"])
            note = re.fullmatch(
                rf"(?:corrected ({NUMBER}): )?({NUMBER}) to ({NUMBER})", cell["note"]
            )
            if value and note:
                shown = note.group(1) or value.group()
                assert read_number(note[2]) <= read_number(shown) <= read_number(note[3])
            change = re.fullmatch(rf"({NUMBER}) \(({NUMBER}) to ({NUMBER})\)", cell["change"])
            if change:
                assert read_number(change[2]) <= read_number(change[1]) <= read_number(change[3])


def check_levels(report):
    """Check that average and worst of the headline's method read the same in sentence and table."""
    lead, scale = report.lead, report.scale
    before, average = (
        scale.text(report.told[m].estimates["average_by_client"].interval.estimate)
        for m in (report.baseline, lead)
    )
    rows = {row["key"]: row["cells"][lead]["value"] for row in list_comparison(report)}
    assert rows["average_by_client"] == average
    result = as_json(report)["headline"]["result"]
    if np.isfinite(report.told[lead].value).sum() > 1:
        assert f"is {average}" in result or f"the average from {before} to {average}" in result
    if len(report.methods[lead].runs) == 1:
        assert rows["worst_20_percent" if report.several else "worst"] in result


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_every_report_is_true_to_its_numbers(case):
    report = make_report(**case)
    text = visible_text(render(report))
    check_intervals(text)
    check_comparison(report)
    check_levels(report)
    pages = [
        visible_text(render_participant(report, i))
        for i in range(min(3, len(report.methods[0].clients)))
    ]
    for page in pages:
        check_intervals(page)
    for words in (text, *pages):
        assert not re.search(r"(?<![\d,.])1 (clients|seeds|rounds|samples|settings)\b", words)
        assert not re.search(r"\b(nan|inf)\b", words.lower())
    json.dumps(as_json(report), allow_nan=False)


def test_a_single_client_is_neither_worst_nor_average():
    report = build(as_methods({"a": make_run([[1, 0, 1]]), "b": make_run([[1, 1, 1]])}))
    text = as_json(report)["headline"]["result"]
    assert "the only client" in text and "worst" not in text and "average" not in text
    assert as_json(report)["headline"]["chance"] == ""
    labels = re.findall(r"<th[^>]*>(.*?)\n*</th>", render(report))
    assert "The client" in labels and not any("Worst" in label for label in labels)


def test_one_clients_interval_is_the_same_in_sentence_and_table():
    report = build(as_methods(make_run([[1, 0, 1, 1, 0, 1, 1, 1]])))
    (lower,), (upper,) = wilson_interval([6], [8])
    assert ACCURACY.span(lower, upper) in as_json(report)["headline"]["result"]
    rows = {row["key"]: row["cells"][0]["note"] for row in list_comparison(report)}
    assert rows["worst"] + " %" == ACCURACY.span(lower, upper)


def test_a_number_outside_its_interval_has_the_corrected_one_beside_it():
    rng = np.random.default_rng(0)  # equal clients with few samples look unequal
    report = build(as_methods(make_run([rng.random(5) < 0.6 for _ in range(50)])))
    interval = report.told[0].estimates["worst_20_percent"].interval
    assert interval.estimate not in interval  # this is such a case
    assert interval.corrected in interval
    (note,) = [
        r["cells"][0]["note"] for r in list_comparison(report) if r["key"] == "worst_20_percent"
    ]
    assert note.startswith(f"corrected {ACCURACY.number(interval.corrected)}: ")
    document = as_json(report)["methods"][0]["measures"]["worst_20_percent"]
    assert document["lower"] <= document["corrected"] <= document["upper"]


def test_the_worst_of_several_seeds_is_told_with_the_seed_its_interval_is_about():
    rng = np.random.default_rng(3)
    runs = [make_run([rng.random(20) < 0.5 for _ in range(9)]) for _ in range(3)]
    report = build(as_methods({"a": runs}))
    chance = as_json(report)["headline"]["chance"]
    lowest = report.told[0].lowest.interval
    assert f"of the first seed, {ACCURACY.text(lowest.estimate)}," in chance
    assert lowest.estimate in lowest
