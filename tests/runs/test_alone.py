"""Own models: as good as scikit-learn's on the same rows, and told beside the shared model."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import ttest_rel
from sklearn.linear_model import LogisticRegression, Ridge
from tests.problems import classification, regression
from typer.testing import CliRunner

import equifed as ef
from equifed.cli.main import app
from equifed.data.federation import Federation
from equifed.report import write_report
from equifed.runs.alone import GRID, alone
from equifed.runs.config import RunConfig
from equifed.runs.run import resume, run
from equifed.training.files import StoredRun
from equifed.training.folder import check_folder, is_complete
from equifed.training.show import tabulate_clients

pytestmark = pytest.mark.long


def fit_sklearn(data: Federation, i: int, split: str, l2: float) -> float:
    inputs, targets = data.train.client(i)
    there = data.splits()[split].client(i)
    model = LogisticRegression(C=1 / (l2 * len(targets)), tol=1e-9, max_iter=5000)
    return float(model.fit(inputs, targets).score(*there))


def test_hospitals_alone_are_within_half_a_point_of_scikit_learn() -> None:
    data = ef.load("heart-disease")
    found = alone(data, "logistic", "logistic", l2=0.02, tune=False, penalise="weights")
    for i, name in enumerate(data.names):
        if name not in found.one_class:
            wanted = fit_sklearn(data, i, found.record.split, 0.02)
            assert abs(found.record.values[i] - wanted) <= 0.005


def test_the_penalty_is_chosen_on_validation_samples() -> None:
    data = ef.load("heart-disease").split(validation=0.3, seed=1)
    found = alone(data, "logistic", l2=0.02)
    assert set(found.l2) <= {*GRID, 0.02} and "chosen on validation" in found.how
    plain = [alone(data, "logistic", l2=s, tune=False, metric="loss", split="validation")
             for s in (*GRID, 0.02)]  # fmt: skip
    best = np.min([p.record.values for p in plain], axis=0)
    chosen = alone(data, "logistic", l2=0.02, metric="loss", split="validation")
    np.testing.assert_allclose(chosen.record.values, best, rtol=1e-6)
    np.testing.assert_allclose(chosen.losses, plain[-1].losses)  # baselines keep the given l2


def test_a_regression_is_ridge() -> None:
    data = regression()
    found = alone(data, "linear", l2=0.1, penalise="weights", metric="mse", split="train")
    for i in range(len(data)):
        inputs, targets = data.train.client(i)
        model = Ridge(alpha=0.1 * len(targets) / 2, tol=1e-10).fit(inputs, targets)
        wanted = np.square(model.predict(inputs) - targets).mean()
        np.testing.assert_allclose(found.record.values[i], wanted, rtol=1e-5)


def test_losses_are_the_least_there_are() -> None:
    data = classification()
    found = alone(data, "logistic", l2=0.1)
    shared = ef.simulate(data, "logistic", l2=0.1, dtype=torch.float64)
    history = ef.train(ef.ScaffPD(ef.objectives.Average()), shared, rounds=20)
    losses = shared.losses(shared.flatten(history.parameters), None)
    assert (losses >= found.losses - 1e-9).all()


def test_networks_take_the_budget_of_the_shared_run() -> None:
    data = classification()
    with pytest.raises(ValueError, match="give algorithm= and rounds="):
        alone(data, "mlp")
    work = ef.FedAvg(ef.LocalSGD(lr=0.2, steps=3))
    found = alone(data, "mlp", algorithm=work, rounds=3)
    one = ef.simulate(data.subset([1]), "mlp")
    history = ef.train(work, one, rounds=3)
    assert "FedAvg" in found.how
    wanted = one.losses(one.flatten(history.parameters), None)
    np.testing.assert_allclose(found.losses[1], wanted[0], rtol=1e-6)


def one_sided() -> Federation:
    """Three clients, the last of which has one class in training."""
    draw = np.random.default_rng(0)
    parts = {}
    for name in ("a", "b", "c"):
        inputs = draw.normal(size=(40, 2))
        targets = (inputs[:, 0] * (-1 if name == "a" else 1) > 0).astype(int)
        parts[name] = (inputs[targets == 1], targets[targets == 1]) if name == "c" else (
            inputs, targets
        )  # fmt: skip
    return Federation.from_clients(parts).split(test=0.4, seed=0)


def test_a_hinge_loss_has_no_exact_solution() -> None:
    """Its second derivatives are zero where there are any: Newton's steps would lead nowhere."""
    data = ef.load("heart-disease")
    with pytest.raises(ValueError, match=r"no exact solution; give algorithm= and rounds="):
        alone(data, "logistic", "hinge", l2=0.01)
    steps = ef.FedAvg(ef.LocalSGD(lr=0.1, steps=5))
    found = alone(data, "logistic", "hinge", l2=0.01, algorithm=steps, rounds=2)
    assert "Newton" not in found.how and np.isfinite(found.losses).all()


def test_clients_with_one_class_are_shown_and_not_compared(tmp_path) -> None:
    data = one_sided()
    shared = ef.simulate(data, "logistic", l2=0.01)
    history = ef.train(ef.ScaffPD(ef.objectives.Average()), shared, rounds=10, evaluate=("test",))
    found = alone(data, "logistic", l2=0.01)
    assert found.one_class == ("c",) and found.record.values[2] == 1.0
    found.add_to(history)

    history.save(tmp_path / "run")
    again = ef.History.load(tmp_path / "run")
    np.testing.assert_array_equal(again.alone.values, found.record.values)
    page = write_report(again, tmp_path / "report.html").read_text()
    assert "would be better off alone" in page and "of 2 clients" in page


def test_the_command_line_writes_the_column(tmp_path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        'rounds = 3\n[data]\nname = "heart-disease"\n[model]\nname = "logistic"\nl2 = 0.01\n'
        '[algorithm]\nname = "scaff-pd"\nobjective = "worst-case"\n'
    )
    folder = tmp_path / "out"
    command = ["run", str(config), "--out", str(folder), "--with-alone", "--quiet"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    history = ef.History.load(folder)
    assert history.alone is not None
    page = write_report(history, tmp_path / "report.html").read_text()
    assert "better off alone" in page and ">Alone" in page


def test_what_could_not_be_fitted_is_refused_before_training(tmp_path) -> None:
    table = {"rounds": 2, "data": {"name": "heart-disease"}, "model": {"name": "mlp"},
             "algorithm": {"name": "scaff-pd", "objective": "average"}}  # fmt: skip
    with pytest.raises(ValueError, match="leave out --with-alone"):
        run(RunConfig.from_dict(table), tmp_path / "run", with_alone=True)
    assert not (tmp_path / "run").exists()
    work = {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}}
    found = run(RunConfig.from_dict({**table, "algorithm": work}), with_alone=True)
    assert found.alone is not None and np.isfinite(found.alone.values).any()


def small(**more) -> dict:
    """Return the table of a run on four hospitals with a linear model."""
    return {
        "rounds": 2,
        "data": {"name": "heart-disease"},
        "model": {"name": "logistic", "l2": 0.01},
        "algorithm": {"name": "scaff-pd", "objective": "average"},
        **more,
    }


def test_small_convex_runs_have_own_models_unless_told_otherwise(tmp_path) -> None:
    history = run(small(), tmp_path / "auto")
    assert history.alone is not None
    assert run(small(with_alone=False)).alone is None
    network = {**small(), "model": {"name": "mlp"}, "algorithm": "fedavg"}
    assert run(network).alone is None
    loaded = ef.History.load(tmp_path / "auto")
    told = next(e for e in loaded.events if e["event"] == "alone")
    np.testing.assert_array_equal(loaded.alone.values, history.alone.values)
    shared = history.last("accuracy")
    for name, (difference, lower, upper, p) in told["gains"].items():
        i = loaded.names.index(name)
        assert np.isclose(difference, loaded.alone.values[i] - shared.values[i])
        assert lower <= difference <= upper and 0 <= p <= 1


def test_gains_of_errors_are_those_of_a_paired_t_test() -> None:
    draw = np.random.default_rng(0)
    parts = {name: (draw.normal(size=(60, 3)), draw.normal(size=60)) for name in "ab"}
    data = Federation.from_clients(parts).split(test=0.5, seed=0)
    clients = ef.simulate(data, "linear", l2=0.1)
    history = ef.train(ef.ScaffPD(ef.objectives.Average()), clients, rounds=5, evaluate=("test",))
    found = alone(data, "linear", l2=0.1)
    event = found.add_to(history)
    for i, name in enumerate(data.names):
        inputs, targets = data.test.client(i)
        theirs = np.square(history.predictor().predict(inputs) - targets)
        wanted = ttest_rel(found.samples[i], theirs, alternative="less")
        ends = wanted.confidence_interval(0.975)  # one-sided: the upper end of 95 % both ways
        difference, _, upper, p = event["gains"][name]
        change = found.samples[i].mean() - theirs.mean()
        np.testing.assert_allclose(
            [difference, upper, p], [change, ends.high, wanted.pvalue], rtol=1e-4
        )


@pytest.fixture(scope="module")
def unharmed():
    return run(small())


@pytest.mark.parametrize("moment", ["round", "end", "fit", "write"])
def test_a_killed_run_gets_its_own_models_when_it_is_resumed(
    moment, unharmed, tmp_path, monkeypatch
) -> None:
    """Whenever it is killed: it counts as complete only when all is written."""

    class Kill(ef.Callback):
        def round(self, record, info):
            if record.round == 2 and moment == "round":
                raise KeyboardInterrupt

        def end(self, history):
            if moment == "end":
                raise KeyboardInterrupt

    def die(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        if moment == "fit":
            patch.setattr("equifed.runs.alone.fit_alone", die)
        if moment == "write":
            write = "equifed.training.folder.RunFolder.finish"
            patch.setattr(write, lambda _, history: history.alone is not None and die())
        run(small(), tmp_path / "run", callbacks=[Kill()])
    assert not is_complete(tmp_path / "run")
    found = resume(tmp_path / "run")
    np.testing.assert_array_equal(found.alone.values, unharmed.alone.values)
    check_folder(StoredRun(tmp_path / "run"))
    loaded = ef.History.load(tmp_path / "run")
    assert loaded.alone is not None and [e["event"] for e in loaded.events].count("alone") == 1


def test_a_run_of_another_objective_has_the_average_beside_it(tmp_path) -> None:
    """Oracle: scikit-learn with every client's rows weighted to the same sum."""
    config = small()
    config["model"] = {"name": "logistic", "loss": "logistic", "l2": 0.02}
    config["model"]["penalise"] = "weights"
    config["data"] = {"name": "heart-disease"}
    assert run(config).average is None  # its own objective is the average
    config["algorithm"] = {"name": "fair-newton", "objective": {"name": "chi-square", "rho": 0.1}}
    history = run(config, tmp_path / "run")
    data = ef.load("heart-disease")
    inputs, targets = data.train.inputs, data.train.targets
    weights = np.concatenate([np.full(n, 1 / n) for n in data.train.sizes]) / len(data)
    model = LogisticRegression(C=1 / 0.02, tol=1e-10, max_iter=9000)
    model.fit(inputs, targets, sample_weight=weights)
    wanted = [model.score(*data.test.client(i)) for i in range(len(data))]
    np.testing.assert_allclose(history.average.values, wanted, atol=0.005)
    loaded = ef.History.load(tmp_path / "run")
    np.testing.assert_array_equal(loaded.average.values, history.average.values)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tabulate_clients({"run": loaded}))
    assert "solved for the average" in console.export_text()
    page = write_report(loaded, tmp_path / "report.html").read_text()
    low = f"{100 * history.average.values.min():.1f}"
    assert f"(solved for the average: worst {low}" in page.replace("\N{NO-BREAK SPACE}", " ")
    network = {**config, "model": {"name": "mlp"}, "algorithm": {"name": "scaff-pd"}}
    network["algorithm"]["objective"] = {"name": "worst-case"}
    assert run({**network, "rounds": 2}).average is None


def test_where_own_models_fail_the_shared_one_is_kept(tmp_path, monkeypatch) -> None:
    def fail(*_, **__):
        raise ValueError("no own models today")

    with monkeypatch.context() as patch:
        patch.setattr("equifed.runs.alone.fit_alone", fail)
        with pytest.raises(ValueError, match="no own models today"):
            run(small(), tmp_path / "run")
    check_folder(StoredRun(tmp_path / "run"))
    assert is_complete(tmp_path / "run") and ef.History.load(tmp_path / "run").alone is None
