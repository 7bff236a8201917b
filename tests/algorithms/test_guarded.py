"""Guards: what they leave alone, what they bound, and whom they name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts.trust.clean_runs import find_touched
from scripts.trust.federations import ALGORITHMS, WORK, draw_federation
from scripts.trust.liars import find_misses, measure
from scripts.trust.nan_clients import play as play_with_nan
from tests.conformance.cases import CASES
from tests.problems import regression

from equifed.algorithms.afl import AFL
from equifed.algorithms.around import unwrap
from equifed.algorithms.delta_fl import DeltaFL
from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.guard import Guarded, GuardedClients, guard_algorithm
from equifed.algorithms.guard_limits import Guard, State, Watch, find_usual
from equifed.algorithms.qfedavg import QFedAvg
from equifed.algorithms.rfedfair import RFedFair
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaff_pd_ia import ScaffPDIA
from equifed.contract.absence import limit_shares
from equifed.contract.algorithm import as_run
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import DenseVectors
from equifed.engines.simulate import simulate
from equifed.objectives import RelativeFairness, Transport, WorstCase
from equifed.report import write_report
from equifed.runs.config import ConfigError, RunConfig
from equifed.testing import with_liar
from equifed.training.events import LEADS, ROUNDS
from equifed.training.loop import train
from equifed.training.show import describe_events

pytestmark = pytest.mark.long

NONE = Guard("on", claims=1e12, updates=1e12, floor=1e12, samples=1e12, cap=1.0)
"""A guard that is on and touches nothing."""


def clients(seed: int = 0, **options: Any) -> Any:
    federation = draw_federation(seed, test=5)
    return simulate(federation, "logistic", l2=1e-2, dtype=torch.float64, **options)


def model(algorithm: Any, on: Any, rounds: int = 4) -> torch.Tensor:
    history = train(algorithm, on, rounds=rounds, seed=1)
    return torch.cat([value.flatten() for value in (history.parameters or {}).values()])


def touched(algorithm: Any, on: Any, rounds: int = 4, kind: str = "guard") -> set[str]:
    events = train(algorithm, on, rounds=rounds, seed=1).events
    return {event["client"] for event in events if event["event"] == kind}


def watch(guard: Guard | None = None) -> Watch:
    return Watch(guard or Guard(), False, State(None))


# -- nothing changes where nobody lies -------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_watching_and_guards_without_limits_are_the_algorithm_to_the_bit(name: str) -> None:
    here, algorithm = clients(), ALGORITHMS[name]
    plain = model(algorithm, here, 3)
    for guard in (Guard("off"), Guard("watch")):
        assert torch.equal(model(Guarded(algorithm, guard), here, 3), plain), guard
    if hasattr(algorithm, "metric"):  # a guard that acts lets no curvature through
        algorithm = replace(algorithm)
        plain = model(algorithm, here, 3)
    assert torch.equal(model(Guarded(algorithm, NONE), here, 3), plain)


def test_a_guard_is_inside_all_other_wrappers_and_only_once() -> None:
    inside = Guarded(ScaffPD(WorstCase())).wrapped()
    order, layer = [], inside
    while layer is not None:
        order.append(type(layer))
        layer = getattr(layer, "algorithm", None)
    assert order[-2:] == [Guarded, ScaffPD] and order.count(Guarded) == 1
    assert guard_algorithm(inside, Guard()) is inside
    assert guard_algorithm(FedAvg(), Guard("off")) == FedAvg()


# -- bounds, against plain NumPy -------------------------------------------------------------------

positive = st.one_of(st.just(0.0), st.floats(1e-9, 1e6))


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(positive, min_size=2, max_size=12).map(np.array),
    slack=st.floats(1, 3),
    more=st.lists(st.floats(0, 0.5), min_size=12, max_size=12),
)
def test_limited_shares_keep_the_sum_the_order_and_the_proportions(
    weights: np.ndarray, slack: float, more: list[float]
) -> None:
    most = np.minimum(1.0, slack / len(weights) + np.array(more[: len(weights)]))
    out = limit_shares(weights, most)
    total = weights.sum()
    np.testing.assert_allclose(out.sum(), total, rtol=1e-12)
    assert (out <= most * total * (1 + 1e-12)).all()
    below = out < most * total * (1 - 1e-9)
    if (weights[below] > 0).any() and below.sum() > 1:
        ratio = out[below & (weights > 0)] / weights[below & (weights > 0)]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)


@pytest.mark.parametrize("lie", [4.0, 100.0, 1e6, -1e6])
def test_claims_are_clipped_at_the_limits_that_the_formula_has(lie: float) -> None:
    guard, honest = Guard(claims=5.0, floor=0.01), clients()
    x = honest.initial(Stream(0)) + 0.3
    true = honest.losses(x, Stream(0))
    claims = np.r_[lie, true[1:]]
    centre = np.median(claims)
    reach = 5.0 * max(1.4826 * np.median(np.abs(claims - centre)), 0.01 * centre)
    low = max(centre - reach, 0.0)  # the least that a cross-entropy with a penalty can be
    seen = GuardedClients(with_liar(honest, 0, loss=lie), watch(guard)).losses(x, Stream(0))
    np.testing.assert_array_equal(seen, np.clip(claims, low, centre + reach))


@pytest.mark.parametrize("factor", [1e6, 8.0, 2.0, 0.5])
@pytest.mark.parametrize("dishonest", [None, 1, 4])
def test_weight_times_length_is_at_most_the_cap_times_the_usual_length(
    factor: float, dishonest: int | None
) -> None:
    honest = clients()
    x, cap = honest.initial(Stream(0)), {None: 0.2, 1: 0.2, 4: 0.1}[dishonest]
    view = GuardedClients(with_liar(honest, 3, update=factor), watch(Guard(dishonest=dishonest)))
    weights = np.r_[0.0, np.linspace(-0.1, 0.4, 19)]
    weights[3] = 0.3
    rows = honest.local_steps(x, WORK, Stream(0)).displacement.dense().numpy().copy()
    rows[3] *= factor
    lengths = np.linalg.norm(rows, axis=1)
    usual = sorted(lengths)[9]  # the median
    part = (1 - cap * (dishonest or 1)) / 2 * np.abs(weights).sum()  # of what honest clients have
    by_weight = min(v for v in lengths if np.abs(weights)[lengths <= v].sum() >= part)
    common = min(max(usual, by_weight), 2 * usual)
    most = cap * common * weights.sum() / np.maximum(np.abs(weights), 1e-300)
    most = np.where(lengths > 15 * usual, np.minimum(most, usual), most)
    counted = rows * np.minimum(1.0, most / lengths)[:, None]
    moved = view.local_steps(x, WORK, Stream(0)).displacement
    found = moved.weighted_sum(weights)
    np.testing.assert_allclose(found, weights @ counted, rtol=1e-9, atol=1e-9)
    alike = np.minimum(lengths, 20 * cap * usual)  # as if all had equal weights
    alike = np.where(lengths > 15 * usual, usual, alike)
    np.testing.assert_allclose(moved.squared_norms(), alike**2, rtol=1e-9)


def test_a_sum_over_a_tail_is_bounded_as_one_over_all_who_made_claims() -> None:
    """Four liars of ten that were chosen by their claims have 0.4 of the sum, as of all twenty."""
    honest, tail = clients(), np.arange(10)
    x, liars = honest.initial(Stream(0)), [2, 3, 5, 7]
    rows = honest.local_steps(x, WORK, Stream(0)).displacement.dense().numpy()[tail].copy()
    for i in liars:
        honest = with_liar(honest, i, update=3.9)
        rows[i] *= 3.9
    lengths = np.linalg.norm(rows, axis=1)
    usual = np.sort(lengths)[4]
    view = GuardedClients(honest, watch(Guard(dishonest=4)))
    view.losses(x, Stream(0))  # all are asked
    moved = view.subset(tail).local_steps(x, WORK, Stream(0)).displacement
    counted = rows * np.minimum(1.0, usual / lengths)[:, None]
    np.testing.assert_allclose(moved.weighted_sum(np.full(10, 0.1)), counted.sum(0) / 10)


@pytest.mark.parametrize("dishonest", [1, 2, 4])
def test_a_tail_is_so_wide_that_nobody_needs_more_than_the_cap(dishonest: int) -> None:
    """Two clients are the tail of level 0.1; the claims of liars alone would fill it."""
    guard = Guard(dishonest=dishonest)
    fair = Guarded(DeltaFL(WORK, level=0.1), guard)
    here = clients()
    x = here.initial(Stream(0))
    start = fair.init(here, x + torch.linspace(-1, 1, len(x)).to(x))  # losses differ
    _, info = fair.round(start, here, Stream(1))
    trains = np.count_nonzero(info.weights)
    assert trains == round(1 / guard.share(20))
    assert info.weights.max() <= guard.share(20) * (1 + 1e-9)
    losses = here.losses(start.x, Stream(1))
    assert set(np.flatnonzero(info.weights)) <= set(np.argsort(-losses)[:trains])


@pytest.mark.parametrize("phi", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("cap", [0.1, 0.2])
def test_signed_weights_have_a_cap_divided_by_the_sum_of_the_positive_ones(
    phi: float, cap: float
) -> None:
    """That is 1 / (1 - phi) where both sides are the worst case; maximisers of many claims."""
    capped, drawn = RelativeFairness(phi, cap=cap), np.random.default_rng(3)
    most = max(cap * (1 - phi), 1.5 / 20)
    assert capped.largest(20) == pytest.approx(most)
    for claims in drawn.exponential(size=(30, 20)):
        weights = capped.weights(claims)
        assert np.abs(weights).max() <= most * (1 + 1e-9)
        assert weights.sum() == pytest.approx(1)


def test_whoever_is_at_the_cap_of_signed_weights_is_told_of() -> None:
    events = train(Guarded(ScaffPDIA(0.5)), with_liar(clients(), 5, loss=1e6), rounds=4).events
    assert any("client 5 is at the cap of 0.1 of" in str(e.get("reason")) for e in events)


def test_a_change_of_weights_is_bounded_by_its_size_not_by_its_sum() -> None:
    lengths, change = np.ones(20), np.r_[0.1, -0.1, np.zeros(18)]
    for rounding in (0.0, 1e-17):
        counted = Guard().shorten(lengths, change + rounding, 1.0, share=0.2)
        np.testing.assert_allclose(counted, np.r_[0.4, 0.4, np.ones(18)])


def test_way_to_a_model_is_shortened_as_the_step_that_led_to_it() -> None:
    honest, work = clients(), WORK.work(snapshot=2, average=True)
    x = honest.initial(Stream(0)) + 1.0
    view = GuardedClients(with_liar(honest, 0, update=1e9), watch())
    moved, true = view.local_steps(x, work, Stream(0)), honest.local_steps(x, work, Stream(0))
    weights = np.full(20, 0.05)
    lengths = np.sqrt(true.displacement.squared_norms()) * np.r_[1e9, np.ones(19)]
    left = sorted(lengths)[9] / lengths[0]
    for kind in ("snapshot", "average"):
        rows = getattr(true, kind).dense().clone()
        rows[0] = x + left * 1e9 * (rows[0] - x)
        found = getattr(moved, kind).weighted_sum(weights)
        torch.testing.assert_close(found, 0.05 * rows.sum(0), rtol=1e-6, atol=1e-9)


@given(n=st.integers(4, 400), dishonest=st.none() | st.integers(1, 80))
def test_dishonest_clients_together_have_at_most_two_fifths_of_the_weight(
    n: int, dishonest: int | None
) -> None:
    guard = Guard(dishonest=dishonest)
    if dishonest is not None and dishonest > max(1, n // 5):
        with pytest.raises(ValueError, match=f"dishonest = {dishonest} of {n} clients is more"):
            guard.share(n)
        return
    f = dishonest or max(1, n // 10)
    assert guard.share(n) == pytest.approx(max(min(0.2, 0.4 / f), 2 / n))
    assert n < 5 or f * guard.share(n) <= 0.4 + 1e-12


def test_training_tells_a_guard_how_many_clients_there_are() -> None:
    inside = as_run(Guarded(ScaffPD(WorstCase())), 40)
    assert unwrap(inside).objective.weights(np.arange(40.0)).max() == pytest.approx(0.1)  # type: ignore[attr-defined]
    assert as_run(inside, 40) is inside
    with pytest.raises(ValueError, match="5 of 20 clients is more than a fifth"):
        train(Guarded(AFL(WORK), Guard(dishonest=5)), clients(), rounds=1)


def test_whoever_is_at_the_cap_and_points_against_the_others_is_told_of_once() -> None:
    here = with_liar(clients(), 5, loss=1e6, update=-1.0)
    events = train(Guarded(AFL(WORK, 0.5)), here, rounds=6, seed=1).events
    told = [e for e in events if e["event"] == "watch"]
    assert [e["client"] for e in told] == ["client 5"] and "opposes the others" in told[0]["reason"]


def test_three_clients_are_told_that_their_cap_holds_nobody() -> None:
    here = simulate(regression((6, 9, 7)), "linear", dtype=torch.float64)
    events = train(Guarded(AFL(LocalSGD(lr=0.05, steps=2))), here, rounds=1).events
    assert any("3 are too few" in str(e["reason"]) for e in events)


def test_thresholds_stay_where_the_local_steps_can_lead() -> None:
    here = with_liar(clients(), 0, loss=1e9)
    history = train(Guarded(RFedFair(WORK)), here, rounds=2, seed=1)
    assert {e["client"] for e in history.events if e["event"] == "guard"} == {"client 0"}
    assert abs(history.rounds[-1].numbers["threshold"]) < 1.0
    assert not touched(Guarded(RFedFair(WORK)), clients())


# -- lies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["afl", "q-fedavg", "tilted-erm", "scaff-pd", "scaff-pd-ia"])
def test_the_liar_is_named_and_stays_below_the_cap(name: str) -> None:
    here = with_liar(clients(), 5, loss=1e6)
    history = train(Guarded(ALGORITHMS[name]), here, rounds=6, seed=1, evaluate=("train",))
    assert {e["client"] for e in history.events if e["event"] == "guard"} == {"client 5"}
    assert max(np.abs(w).max() for w in history.weights.values()) <= 0.2 + 1e-9
    assert history.summary()["guarded"] == 6


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "scaff-pd"])
def test_the_limit_of_updates_is_where_a_liar_that_knows_all_lengths_expects_it(name: str) -> None:
    limit = Guard().updates

    def as_long_as(times: float) -> Any:
        def multiply(lengths: Any, place: int, _: str) -> float:
            others = np.where(np.arange(len(lengths)) == place, np.inf, lengths)
            return float(times * find_usual(others) / lengths[place])

        return with_liar(clients(), 0, update=multiply)

    assert not touched(Guarded(ALGORITHMS[name]), as_long_as(0.95 * limit))
    assert touched(Guarded(ALGORITHMS[name]), as_long_as(1.05 * limit)) == {"client 0"}


def test_a_liar_remembers_what_it_said() -> None:
    said = with_liar(clients(), 2, update=5.0, start=2)
    index, x = np.arange(20), said.initial(Stream(0))
    for k, factor in ((1, 1.0), (2, 5.0)):
        new = said.value_and_gradient(x, Stream(0).at("round", k))[1]
        kept = said.remembered(said.remember(None, index, new), index)
        true = clients().value_and_gradient(x, Stream(0))[1].squared_norms()
        true[2] *= factor**2
        np.testing.assert_allclose(kept.squared_norms(), true, rtol=1e-9)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "drfa", "scaff-pd"])
def test_lies_cost_the_worst_served_honest_client_at_most_two_points(name: str) -> None:
    lies = ("loss 100", "loss 1e308", "update x 100", "update x 1e30", "10^12 samples")
    assert find_misses(measure([name], lies, seeds=(0,), rounds=12)) == []


def test_no_honest_client_is_touched_however_the_clients_differ() -> None:
    assert list(find_touched(Guard("on"), runs=12, rounds=10)) == []


def test_one_long_update_does_not_freeze_q_fedavg() -> None:
    honest, algorithm = clients(), QFedAvg(WORK, 1.0)
    start = torch.cat([p.flatten() for p in honest.parameters(honest.initial(
        Stream(1).at("initial"))).values()])  # fmt: skip
    way = (model(Guarded(algorithm), honest) - start).norm()
    for factor in (100.0, 1e30, 1e150):
        lied = (model(Guarded(algorithm), with_liar(honest, 0, update=factor)) - start).norm()
        assert 0.8 * way < lied < 1.2 * way


def test_few_clients_are_measured_by_the_rounds_before() -> None:
    honest = clients()
    algorithm = Guarded(DRFA(WORK, 0.02, clients_per_round=2))
    liars = with_liar(honest, 0, update=1e4, start=6)
    far = model(algorithm, liars, 25).norm()
    assert far < 3 * model(algorithm, honest, 25).norm()
    assert not touched(algorithm, honest, 25)


def test_an_absurd_number_of_samples_counts_as_the_median() -> None:
    here = with_liar(clients(), 2, size=10**15)
    seen = GuardedClients(here, watch())
    sizes = here.sizes.astype(float)
    sizes[2] = np.median(sizes)
    np.testing.assert_array_equal(seen.sizes, np.floor(sizes))
    np.testing.assert_array_equal(seen.subset([2, 4]).sizes, np.floor(sizes[[2, 4]]))


def test_a_large_honest_client_counts_no_more_than_the_cap() -> None:
    here = with_liar(clients(), 2, size=20_000)
    shares = GuardedClients(here, watch()).sizes / GuardedClients(here, watch()).sizes.sum()
    assert shares[2] == pytest.approx(0.2, abs=1e-3)
    np.testing.assert_allclose(np.delete(shares, 2) / np.delete(here.sizes, 2), shares[0] /
                               here.sizes[0], rtol=1e-9)  # fmt: skip


def test_under_hidden_sums_lengths_are_not_guarded_and_that_is_said() -> None:
    class Hidden(DenseVectors):
        claimed = True

    found = watch()
    view = GuardedClients(clients(), found)
    handle = view.see_vectors(Hidden(torch.tensor([[1.0]] * 19 + [[1e9]])), "gradient", None, None)
    assert float(handle.weighted_sum(np.ones(20))) == pytest.approx(1e9 + 19)
    assert list(found.notes) == ["sums are hidden: the lengths of updates are not guarded"]


def test_whoever_leads_for_long_is_told_of_in_any_run() -> None:
    here = with_liar(clients(), 7, loss=1e6)
    events = train(AFL(WORK, 0.05), here, rounds=ROUNDS + 4, seed=1).events
    leads = [e for e in events if e["event"] == "watch"]
    assert [(e["client"], e["reason"]) for e in leads] == [("client 7", LEADS)]


def leading(weights: dict[int, np.ndarray]) -> set[int]:
    """Who has more than half of the weight in five rounds one after the other, naively."""
    half = [set(np.flatnonzero(np.abs(w) > np.abs(w).sum() / 2)) for w in weights.values()]
    return set().union(*(set.intersection(*half[k : k + 5]) for k in range(len(half) - 4)))


LED = ("fedavg", "afl", "drfa", "q-fedavg", "tilted-erm", "agnostic-fedavg", "scaff-pd")


@pytest.mark.parametrize(
    "engine", ["stacked", "loop", "own bias", pytest.param("auto", marks=pytest.mark.slow)]
)
def test_who_leads_is_an_event_with_every_algorithm_and_engine(engine: str) -> None:
    options: dict[str, Any] = {"own": ["*.bias"], "own_steps": "joint"}
    options = options if engine == "own bias" else {"engine": engine}
    names = [n for n in CASES if n.endswith(("/plain", "/auto"))]
    if engine != "auto":
        some = LED[:2] if engine == "loop" else LED
        names = [n for n in names if n.partition("/")[0] in some]
    led = set()
    for name in names:
        lying = with_liar(clients(**options), 7, loss=1e5, size=10**9)
        history = train(CASES[name], lying, rounds=ROUNDS + 1, seed=1)
        told = {e["client"] for e in history.events if e.get("reason") == LEADS}
        assert told == {f"client {i}" for i in leading(history.weights)}, name
        led |= {name.partition("/")[0]} if told else set()
    assert led >= {"fedavg", "afl"}


def test_a_touched_round_has_no_certificate() -> None:
    here = with_liar(clients(), 0, update=1e5, start=3)
    rounds = train(Guarded(ScaffPD(WorstCase())), here, rounds=5, seed=1).rounds
    assert ["gap" in record.numbers for record in rounds] == [True, True, False, False, False]


def test_regression_with_two_clients_has_nobody_to_compare_with() -> None:
    here = simulate(regression((6, 9)), "linear", dtype=torch.float64)
    assert not touched(Guarded(FedAvg(LocalSGD(lr=0.05, steps=2))), with_liar(here, 0, update=50.0))


def test_reports_and_the_terminal_say_what_the_guard_did(tmp_path: Path) -> None:
    here = with_liar(clients(), 5, loss=1e6)
    run = {"rounds": 6, "seed": 1, "evaluate": ("test",)}
    on: Any = train(Guarded(AFL(WORK, 0.5)), here, **run)  # type: ignore[arg-type]
    seen: Any = train(Guarded(AFL(WORK, 0.5), Guard("watch")), here, **run)  # type: ignore[arg-type]
    page = write_report({"on": on, "watch": seen}, tmp_path / "page.html").read_text()
    assert "on: claims or updates of 1 client were kept in bounds" in page
    assert "is at the cap of" in page  # among the events
    assert "watch: 1 client stood out beside the others" in page
    told = describe_events(on)
    assert any("client 5 was kept in bounds in 6 round(s), first in round 1" in t for t in told)
    assert any("client 5 stood out in round 1: claims a loss" in t for t in describe_events(seen))


# -- settings --------------------------------------------------------------------------------------


def test_the_cap_is_part_of_the_objective() -> None:
    capped: Any = unwrap(Guarded(ScaffPD(WorstCase())))
    assert capped.objective.weights(np.arange(20.0)).max() == pytest.approx(0.2)
    ia: Any = unwrap(Guarded(ScaffPDIA(0.5)))
    assert np.abs(ia.objective_at(ia.init(clients(), torch.zeros(3))).weights(
        np.arange(20.0))).max() <= 0.2 + 1e-12  # fmt: skip
    assert unwrap(Guarded(AFL(), Guard(cap=1.0))) == AFL()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "maybe"}, "'watch', 'on' or 'off', got 'maybe'"),
        ({"claims": -1.0}, "Guard claims must be positive, got -1.0"),
        ({"updates": 0.5}, "updates must be at least 1, got 0.5"),
        ({"cap": 1.5}, r"cap must lie in \(0, 1\], got 1.5"),
        ({"dishonest": 0}, "dishonest must be at least 1, got 0"),
    ],
)
def test_wrong_limits_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Guard(**arguments)


def test_an_objective_without_an_exact_cap_is_refused_with_the_cure() -> None:
    objective = Transport(0.5, ((0.0, 1.0), (1.0, 0.0)))
    with pytest.raises(ValueError, match=r"Transport.*has no exact form.*or set cap = 1"):
        Guarded(AFL(objective=objective))
    Guarded(AFL(objective=objective), Guard(cap=1.0))
    Guarded(AFL(objective=objective), Guard("watch"))


TABLE = {"rounds": 2, "data": "penguins", "model": "logistic", "algorithm": "afl"}


@pytest.mark.parametrize("given", ["on", {"mode": "on", "cap": 0.3}, {"claims": 9.0}, {}])
def test_a_configuration_has_a_guard_that_is_read_back(given: Any) -> None:
    config = RunConfig.from_dict({**TABLE, "guard": given})
    wanted = Guard(given) if isinstance(given, str) else Guard(**given)
    assert config.guard == wanted
    assert RunConfig.from_dict(TABLE).guard == Guard("off")
    assert RunConfig.from_dict(config.to_dict()) == config


def test_a_configuration_says_what_is_wrong_with_a_guard() -> None:
    with pytest.raises(ConfigError, match="guard"):
        RunConfig.from_dict({**TABLE, "guard": "sometimes"})
    lp = {"name": "afl", "objective": {"name": "l1-distance", "strength": 0.5}}
    with pytest.raises(ConfigError, match=r"guard: L1Distance.*cap = 1"):
        RunConfig.from_dict({**TABLE, "algorithm": lp, "guard": "on"})


@pytest.mark.parametrize("broken", [1, 3, 5])
@pytest.mark.parametrize(
    ("name", "lie"),
    [("fedavg", "update NaN"), ("q-fedavg", "loss NaN"), ("scaff-pd", "update infinite")],
)
def test_who_sends_no_numbers_is_quarantined_at_once(name: str, lie: str, broken: int) -> None:
    assert play_with_nan(name, lie, broken, "on") is None
