"""Estimators: scikit-learn's own suite, its own coefficients, and optima of other solvers."""

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tests.optima import interior_point
from tests.problems import least_squares, logistic
from torch import nn

import equifed as ef
import sklearn
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.objectives import Average, ChiSquare, CVaR, WorstCase
from equifed.privacy.ledger import Ledger
from equifed.sklearn import FairClassifier, FairRegressor, solving

pytestmark = pytest.mark.long

SUITE = """
from sklearn.utils.estimator_checks import check_estimator
from equifed.sklearn import FairClassifier, FairRegressor
for estimator in (FairClassifier(), FairRegressor()):
    results = check_estimator(estimator)
    assert len(results) > 50 and {r["status"] for r in results} == {"passed"}, results
"""


def test_scikit_learns_suite_passes_with_nothing_skipped() -> None:
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}  # else one check skips itself
    command = [sys.executable, "-W", "error::UserWarning", "-c", SUITE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


def draw_weights(rows: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 4, rows).astype(float)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])  # unscaled: five orders
def test_without_clients_it_is_logistic_regression(load, weighted) -> None:
    X, y = load(return_X_y=True)
    weights = draw_weights(len(y)) if weighted else None
    total = len(y) if weights is None else weights.sum()
    fair = FairClassifier(l2=1e-3).fit(X, y, sample_weight=weights)
    other = LogisticRegression(C=1 / (1e-3 * total), solver="newton-cholesky", tol=1e-12)
    other.fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(fair.coef_, other.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(fair.intercept_, other.intercept_, rtol=1e-6)
    np.testing.assert_allclose(fair.predict_proba(X), other.predict_proba(X), atol=1e-8)
    assert (fair.predict(X) == other.predict(X)).all()


@pytest.mark.parametrize("l2", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("columns", [1, 2])
def test_without_clients_it_is_ridge_regression(columns, intercept, l2) -> None:
    X, y = load_diabetes(return_X_y=True)
    X = X * 10.0 ** np.arange(-4, 6)
    y = y if columns == 1 else np.stack([y, y**2], axis=1)
    for weights in (None, draw_weights(len(y))):
        total = len(y) if weights is None else weights.sum()
        fair = FairRegressor(l2=l2, fit_intercept=intercept).fit(X, y, sample_weight=weights)
        other = Ridge(alpha=l2 * total / 2, fit_intercept=intercept, solver="svd")
        other.fit(X, y, sample_weight=weights)
        assert fair.coef_.shape == other.coef_.shape
        np.testing.assert_allclose(fair.coef_, other.coef_, rtol=1e-6)
        np.testing.assert_allclose(fair.intercept_, other.intercept_, rtol=1e-6, atol=1e-9)


OBJECTIVES = [Average(), WorstCase(), CVaR(0.5), ChiSquare(0.1, scale=1.0)]


def as_rows(problem):
    owners = np.repeat([f"site {i}" for i in range(problem.n)], [len(a) for a in problem.inputs])
    shuffled = np.random.default_rng(0).permutation(len(owners))
    X, y = np.concatenate(problem.inputs), np.concatenate(problem.targets)
    return X[shuffled], y[shuffled], owners[shuffled]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("make", [logistic, least_squares])
def test_with_clients_it_is_the_optimum_of_the_objective(make, objective) -> None:
    problem = make(3, n=5)
    X, y, owners = as_rows(problem)
    kind = FairClassifier if make is logistic else FairRegressor
    fair = kind(objective=objective, l2=problem.l2, fit_intercept=False).fit(X, y, clients=owners)
    best, x = interior_point(problem, objective)
    coef = fair.coef_.reshape(-1)
    losses = problem.losses(coef)
    assert objective.value(losses) <= best + 1e-8
    np.testing.assert_allclose(coef, x, atol=1e-4)
    assert fair.history_.certificate()["gap"] < 1e-9
    names = [str(name) for name in fair.clients_]
    order = [names.index(f"site {i}") for i in range(problem.n)]
    held = objective.value(losses) - fair.client_weights_[order] @ losses
    assert held + objective.penalty(fair.client_weights_) == pytest.approx(0, abs=1e-6)


def test_first_order_algorithms_reach_the_same_or_say_that_they_did_not() -> None:
    X, y, owners = as_rows(logistic(3, n=5))
    exact = FairClassifier(objective={"name": "cvar", "tail": 0.5}, l2=0.1)
    exact.fit(X, y, clients=owners)
    named = clone(exact).set_params(algorithm="scaff-pd", rounds=400, tol=1e-9)
    given = clone(exact).set_params(objective="average", algorithm=ScaffPD(CVaR(0.5)))
    given.set_params(rounds=400, tol=1e-9)
    for fair in (named, given):
        np.testing.assert_allclose(fair.fit(X, y, clients=owners).coef_, exact.coef_, atol=1e-3)
    with pytest.warns(ConvergenceWarning, match="can still fall by about"):
        named.set_params(rounds=2).fit(X, y, clients=owners)
    with pytest.warns(ConvergenceWarning, match="the step that is left"):
        clone(exact).set_params(rounds=1).fit(X, y, clients=owners)


def test_counting_every_row_is_the_pooled_model_however_rows_are_owned() -> None:
    X, y, owners = as_rows(logistic(3, n=5))
    rows = {"name": "average", "prior": "size"}
    pooled = FairClassifier().fit(X, y)
    np.testing.assert_allclose(
        FairClassifier(objective=rows).fit(X, y, clients=owners).coef_, pooled.coef_, rtol=1e-7
    )
    weights = draw_weights(len(y)) + 0.5
    weighted = FairClassifier(objective=rows).fit(X, y, clients=owners, sample_weight=weights)
    pooled = FairClassifier().fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(weighted.coef_, pooled.coef_, rtol=1e-7)


def test_whole_weights_are_repeated_rows_of_the_same_client() -> None:
    X, y, owners = as_rows(logistic(4, n=3))
    weights = draw_weights(len(y)).astype(int) + 1
    given = FairClassifier(objective="worst-case", l2=0.1)
    weighted = clone(given).fit(X, y, clients=owners, sample_weight=weights)
    again = [np.repeat(values, weights, axis=0) for values in (X, y, owners)]
    repeated = clone(given).fit(again[0], again[1], clients=again[2])
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-6, atol=1e-9)


def test_it_works_in_pipelines_searches_clones_and_pickles() -> None:
    X, y, owners = as_rows(logistic(3, n=5))
    frame, labels = pd.DataFrame(X, columns=["a", "b", "c"]), np.array(["no", "yes"])[y]
    with sklearn.config_context(enable_metadata_routing=True):
        fair = FairClassifier(objective="worst-case").set_fit_request(clients=True)
        pipeline = make_pipeline(StandardScaler(), fair)
        search = GridSearchCV(pipeline, {"fairclassifier__l2": [1e-3, 1.0]}, cv=2)
        search.fit(frame, labels, clients=owners)
    inside = search.best_estimator_[-1]
    assert set(inside.clients_) == set(owners) and set(inside.classes_) == {"no", "yes"}
    again = pickle.loads(pickle.dumps(search))
    np.testing.assert_array_equal(again.predict_proba(frame), search.predict_proba(frame))
    assert not hasattr(clone(inside), "coef_")
    plain = FairClassifier().fit(frame, labels)
    assert plain.feature_names_in_.tolist() == ["a", "b", "c"]
    assert plain.clients_.tolist() == ["all"] and plain.client_weights_.tolist() == [1.0]


@pytest.mark.parametrize("outputs", [1, 2])
def test_own_modules_give_one_score_or_one_per_class(outputs) -> None:
    X, y, owners = as_rows(logistic(3, n=5))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))
    before = {name: p.clone() for name, p in module.state_dict().items()}
    fair = FairClassifier(model=module, rounds=3).fit(X, y, clients=owners)
    proba = fair.predict_proba(X)
    assert proba.shape == (len(X), 2)
    np.testing.assert_allclose(proba.sum(axis=1), 1)
    assert (fair.predict(X) == fair.classes_[proba.argmax(axis=1)]).all()
    assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())
    assert not hasattr(fair, "coef_")


def test_another_fit_forgets_the_last_one_and_the_history_predicts_as_the_estimator() -> None:
    X, y, owners = as_rows(logistic(3, n=5))
    labels, weights = np.array(["no", "yes"])[y], draw_weights(len(y)) + 1
    fair = FairClassifier().fit(X, labels, clients=owners, sample_weight=weights)
    assert (fair.history_.predictor().predict(X) == fair.predict(X)).all()
    np.testing.assert_allclose(fair.history_.predictor().predict_proba(X), fair.predict_proba(X))
    fair.set_params(model="mlp", rounds=2).fit(X, labels, clients=owners)
    assert not hasattr(fair, "coef_") and not hasattr(fair, "intercept_")
    values = FairRegressor().fit(X, np.stack([y, -y], axis=1), sample_weight=weights)
    np.testing.assert_allclose(values.history_.predictor().predict(X), values.predict(X))


@pytest.mark.parametrize(
    ("estimator", "given", "message"),
    [
        (FairClassifier(), {"clients": ["a"] * 3}, "inconsistent numbers of samples"),
        (FairClassifier(), {"clients": ["a", None, "b", "b"]}, "row 1 has no client"),
        (FairClassifier(), {"clients": [0.0, np.nan, 1, 1]}, "row 1 has no client"),
        (FairClassifier(), {"sample_weight": [1, -1, 1, 1]}, "must not be negative"),
        (
            FairClassifier(),
            {"clients": ["a", "a", "b", "b"], "sample_weight": [1, 1, 0, 0]},
            "client 'b' has no row that counts",
        ),
        (FairClassifier(tol=0), {}, "tol must be positive"),
        (FairClassifier(l2=-1.0), {}, "l2 must be at least 0"),
        (FairClassifier(l2="1"), {}, "l2 must be a number"),
        (FairClassifier(rounds=0), {}, "rounds must be at least 1"),
        (FairClassifier(objective="cvr"), {}, "cvar"),
        (FairClassifier(algorithm="scaf-pd"), {}, "scaff-pd"),
        (FairClassifier(algorithm="fedavg", objective="cvar"), {}, "no objective to choose"),
        (FairClassifier(objective="cvar", algorithm=ScaffPD(CVaR(0.5))), {}, "of its own"),
        (FairClassifier(model=nn.Linear(1, 3)), {}, "3 scores for 2 classes"),
        (FairClassifier(model="mlp", fit_intercept=False), {}, "fit_intercept=False is for"),
        (FairClassifier(model=3), {}, "model is a name or a torch module"),
    ],
)
def test_what_cannot_be_honoured_is_refused(estimator, given, message) -> None:
    X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([0, 1, 0, 1])
    with pytest.raises(ValueError, match=message):
        estimator.fit(X, y, **given)


# -- own parts -------------------------------------------------------------------------------------


def skewed_rows(seed: int = 0) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    owners = np.repeat(["a", "b", "c"], 40)
    X = draw.normal(size=(120, 3))
    level = np.repeat([-2.0, 0.0, 2.0], 40)
    y = np.where(X[:, 0] + level + draw.logistic(size=120) > 0, "ill", "well")
    return X, y, owners


def test_own_intercepts_are_those_of_the_joint_optimum() -> None:
    """One-hot columns of clients, with the same penalties, are the same model (scikit-learn's)."""
    X, y, owners = skewed_rows()
    fair = FairClassifier(own="bias", own_l2=0.05, l2=0.05, tol=1e-12).fit(X, y, clients=owners)
    hot = (owners[:, None] == np.array(["a", "b", "c"])).astype(float)
    # mean over clients of own_l2/2 v_i^2: each is a third of the penalty on a column
    wide = np.hstack([X, hot / np.sqrt(1 / 3)])
    plain = LogisticRegression(C=1 / (0.05 * 120), fit_intercept=False, tol=1e-10, max_iter=2000)
    plain.fit(wide, y)
    ours = fair.decision_function(X, clients=owners)
    np.testing.assert_allclose(ours, plain.decision_function(wide), atol=2e-4)
    assert fair.own_["1.bias"].shape == (3, 1)


def test_own_parts_of_a_regression_are_used_by_client() -> None:
    draw = np.random.default_rng(1)
    X, owners = draw.normal(size=(60, 2)), np.repeat([1, 2, 3], 20)
    y = X @ [1.0, -1.0] + 5.0 * owners + 0.01 * draw.normal(size=60)
    fair = FairRegressor(own="bias", l2=1e-6).fit(X, y, clients=owners)
    np.testing.assert_allclose(fair.predict(X, clients=owners), y, atol=0.1)
    with pytest.warns(UserWarning, match="shared model is used, with the mean of own parts"):
        np.testing.assert_allclose(fair.predict(X), y - 5.0 * (owners - 2), atol=0.1)
    with pytest.warns(UserWarning, match="took no part in training"):
        fair.predict(X[:2], clients=["1", "9"])  # the text 1 is not the number


def test_own_without_clients_is_refused() -> None:
    X, y, owners = skewed_rows()
    with pytest.raises(ValueError, match=r"own='bias'.*fit\(X, y, clients=\.\.\.\)"):
        FairClassifier(own="bias").fit(X, y)
    weights = np.linspace(1, 2, len(X))
    with pytest.raises(ValueError, match="sample_weight do not go together"):
        FairClassifier(own="bias").fit(X, y, clients=owners, sample_weight=weights)
    plain = FairClassifier(objective="average").fit(X, y, clients=owners)
    np.testing.assert_array_equal(plain.predict(X), plain.predict(X, clients=owners))


def test_by_default_the_rule_of_fit_chooses_where_there_are_clients() -> None:
    rng = np.random.default_rng(0)
    X, owners = rng.normal(size=(400, 2)), np.repeat(["a", "b", "c", "d"], 100)
    shift = np.repeat([-3.0, -1.0, 1.0, 3.0], 100)
    y = X[:, 0] + shift + rng.logistic(size=400) > 0
    fair = FairClassifier().fit(X, y, clients=owners)
    average = FairClassifier(objective="average").fit(X, y, clients=owners)
    assert fair.choice_.startswith("own bias") and fair.own_["1.bias"].shape == (4, 1)
    worst = [min((m.predict(X, clients=owners) == y).reshape(4, 100).mean(1))
             for m in (fair, average)]  # fmt: skip
    assert worst[0] > worst[1]
    assert "ordinary model" in FairClassifier().fit(X, y).choice_
    assert average.choice_ == "as given"


BOUNDS = {"rows": 3.0, "loss": 3.0, "rounds": 4}


@pytest.mark.parametrize("own", [None, "bias"])
def test_under_privacy_it_is_the_private_run_and_no_more_is_asked(own):
    X, y, owners = privacy_rows()
    privacy = ef.Privacy(epsilon=2.0, **BOUNDS)
    fair = FairClassifier(own=own, privacy=privacy, random_state=3).fit(X, y, clients=owners)
    told = fair.history_.events[-2:]
    (ledgers,) = [e["ledgers"] for e in told if e["event"] == "privacy"]
    for one in ledgers:
        spent = {entry["kind"]: entry["steps"] for entry in one["entries"]}
        assert spent == {"moments": 1, "losses": 4, "gradients": 4}
        assert Ledger.from_dict(one).spent == pytest.approx(2.0, rel=1e-6)
    rows = {who: (X[owners == who], (y == "yes")[owners == who].astype(int)) for who in "ba"}
    data = ef.Federation.from_clients(rows)
    clients = ef.simulate(
        data, solving.build_module("linear", 4, 1, True), "logistic", l2=1e-3, penalise="weights",
        dtype=torch.float64, init="fresh", own=own, privacy=privacy,
    )  # fmt: skip
    wanted = ef.train(ef.FairNewton(Average()), clients, rounds=4, seed=3, evaluate=[])
    (weight,) = (p for name, p in wanted.parameters.items() if name.endswith("weight"))
    assert np.array_equal(fair.coef_, weight.numpy())
    assert "has a price" in fair.choice_ and len(fair.history_.metrics) == 0
    assert fair.predict(X[:2], clients=owners[:2]).shape == (2,)


def test_with_a_huge_budget_it_is_the_model_without_privacy():
    X, y, owners = privacy_rows()
    privacy = ef.Privacy(epsilon=1e14, **BOUNDS | {"rows": 9.0, "loss": 99.0, "rounds": 80})
    fair = {"name": "chi-square", "rho": 0.5, "scale": 1.0}
    given = {"objective": fair, "l2": 0.1}
    private, plain = (
        FairClassifier(privacy=p, **given).fit(X, y, clients=owners) for p in (privacy, None)
    )
    np.testing.assert_allclose(private.coef_, plain.coef_, atol=1e-4)
    np.testing.assert_allclose(private.intercept_, plain.intercept_, atol=1e-4)


def test_what_has_no_price_under_privacy_is_refused():
    X, y, owners = privacy_rows()
    privacy = ef.Privacy(epsilon=2.0, **BOUNDS)
    with pytest.raises(ValueError, match="sample_weight"):
        FairClassifier(privacy=privacy).fit(X, y, sample_weight=np.arange(len(y)))
    with pytest.raises(ValueError, match="gradient="):
        FairClassifier(model="mlp", privacy=privacy).fit(X, y, clients=owners)
    with pytest.raises(ValueError, match=r"scale = 1\.0"):
        rough = {"name": "chi-square", "rho": 0.5}
        FairClassifier(objective=rough, privacy=privacy).fit(X, y, clients=owners)


def test_secret_noise_is_not_that_of_the_seed():
    X, y, owners = privacy_rows()
    one, other = (
        FairClassifier(privacy=ef.Privacy(epsilon=2.0, **BOUNDS, secret=True), random_state=0)
        .fit(X, y, clients=owners)
        .coef_
        for _ in range(2)
    )
    assert not np.array_equal(one, other)


def privacy_rows():
    draw = np.random.default_rng(0)
    X = draw.standard_normal((60, 4))
    y = np.where(X @ [1.0, -1.0, 0.5, 0.0] + draw.standard_normal(60) > 0, "yes", "no")
    return X, y, np.array(["b", "a", "a"] * 20)
