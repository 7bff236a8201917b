"""Configuration: what is accepted comes back complete, what is not is named."""

from __future__ import annotations

import dataclasses
import pickle
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.contract.local import DEFAULT_WORK, LocalSGD
from equifed.models.losses import LOSSES
from equifed.runs import run as runs
from equifed.runs.catalogue import SECTIONS, UnknownName
from equifed.runs.config import ConfigError, RunConfig, apply_override
from equifed.runs.schema import mismatch
from equifed.runs.schema import settings as settings_of


def small(**changes: Any) -> dict[str, Any]:
    """Return a configuration that runs in a moment."""
    return {
        "rounds": 2,
        "data": {"name": "fashion-three", "train": 6, "test": 4},
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2, "batch_size": 3}},
        **changes,
    }


def scaff_pd(**changes: Any) -> dict[str, Any]:
    return {
        "name": "scaff-pd",
        "objective": {"name": "chi-square", "rho": 0.1},
        "local": {"lr": 0.1, "steps": 2},
        "steps": {"name": "constant", "primal": 0.2, "dual": 0.1},
        **changes,
    }


def refused(table: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(table)
    return caught.value.problems


# -- the catalogue -------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_every_entry_imports_and_its_settings_can_be_read(section: str) -> None:
    for name, entry in SECTIONS[section].entries().items():
        wanted = settings_of(entry.load(), SECTIONS[section].given)
        assert all(isinstance(key, str) for key in wanted), name
        assert entry.summary and "\n" not in entry.summary


def test_unknown_name_lists_the_allowed_and_the_closest() -> None:
    with pytest.raises(UnknownName, match=r"'scafold'.*did you mean 'scaffold'.*fedavg, fedprox"):
        SECTIONS["algorithms"]["scafold"]


# -- accepted ------------------------------------------------------------------------------------


def test_resolved_configuration_is_complete_and_reads_back() -> None:
    config = RunConfig.from_dict(small(algorithm=scaff_pd()))
    again = RunConfig.from_dict(tomllib.loads(config.to_toml()))
    assert again == config
    assert config.algorithm["objective"] == {
        "name": "chi-square",
        "rho": 0.1,
        "base": {"name": "worst-case"},
    }
    assert config.algorithm["participation"] == 1.0
    assert config.engine["name"] == "auto"


def test_a_name_alone_stands_for_its_table() -> None:
    config = RunConfig.from_dict(small(algorithm=scaff_pd(objective="worst-case")))
    assert config.algorithm["objective"] == {"name": "worst-case"}


def test_settings_reach_the_objects() -> None:
    algorithm = scaff_pd(
        objective={"name": "chi-square", "rho": 0.3, "base": {"name": "cvar", "tail": 0.5}}
    )
    run = runs.build_run(RunConfig.from_dict(small(algorithm=algorithm)))
    assert run.algorithm.objective.rho == 0.3
    assert run.algorithm.objective.base.tail == 0.5
    assert run.algorithm.local.lr == 0.1
    assert run.clients.sizes.tolist() == [6, 6, 6]


def test_prior_size_is_the_training_samples() -> None:
    table = small(
        data={"name": "penguins", "test": 0.0},
        algorithm=scaff_pd(objective={"name": "average", "prior": "size"}),
    )
    run = runs.build_run(RunConfig.from_dict(table))
    np.testing.assert_array_equal(run.algorithm.objective.prior, run.federation.train.sizes)


def test_holdout_takes_from_training() -> None:
    data = {"name": "fashion-three", "train": 10, "test": 4, "holdout": {"validation": 0.2}}
    federation = runs.build_run(RunConfig.from_dict(small(data=data))).federation
    assert federation.train.sizes.tolist() == [8, 8, 8]
    assert federation.validation is not None
    assert federation.validation.sizes.tolist() == [2, 2, 2]


def test_partitions_nest() -> None:
    base = {"name": "dirichlet", "clients": 4, "alpha": 0.3}
    data = {"name": "mnist", "partition": {"name": "imbalance", "base": base}}
    config = RunConfig.from_dict(small(data=data))
    assert config.data["partition"]["base"]["min_samples"] == 10


def test_loss_follows_the_data() -> None:
    regression = {"name": "synthetic-regression", "samples": 5}
    assert runs.build_run(RunConfig.from_dict(small())).config.model["loss"] == "cross_entropy"
    assert (
        runs.build_run(RunConfig.from_dict(small(data=regression))).config.model["loss"]
        == "squared"
    )


def test_own_table_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("site,age,ill\nn,1,no\nn,2,yes\ns,3,no\ns,5,yes\n")
    (tmp_path / "run.toml").write_text(
        'rounds = 2\nmodel.name = "logistic"\n'
        'data = {name = "table", path = "people.csv", client = "site", target = "ill"}\n'
        'algorithm = {name = "fedavg", local = {lr = 0.1, steps = 1}}\n'
    )
    config = RunConfig.read(tmp_path / "run.toml")
    assert Path(config.data["path"]).is_absolute()
    assert runs.build_run(config).federation.names == ("n", "s")


def test_threads_are_set_for_the_run_and_restored() -> None:
    import torch

    seen, before = [], torch.get_num_threads()

    class Look(runs.Callback):
        def start(self, history: Any, rounds: int) -> None:
            seen.append(torch.get_num_threads())

    runs.run(RunConfig.from_dict(small(threads=before + 1)), callbacks=[Look()])
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


# -- tables that are given in part ---------------------------------------------------------------


def local_of(**local: Any) -> dict[str, Any]:
    config = RunConfig.from_dict(small(algorithm={"name": "fedavg", "local": local}))
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config
    table: dict[str, Any] = config.algorithm["local"]
    return table


def described(work: LocalSGD) -> dict[str, Any]:
    return {key: value for key, value in work.to_dict().items() if value is not None}


def test_what_a_table_leaves_out_comes_from_the_algorithm() -> None:
    whole = described(DEFAULT_WORK)
    assert local_of(lr=0.1) == {**whole, "lr": 0.1}
    assert local_of(steps=3) == {**whole, "lr": "auto", "steps": 3}
    assert local_of() == {**whole, "lr": "auto"}


def test_epochs_take_the_place_of_steps() -> None:
    found = local_of(lr=0.1, epochs=2)
    assert found["epochs"] == 2 and "steps" not in found
    assert found["batch_size"] == DEFAULT_WORK.batch_size


def test_none_takes_a_default_away_and_stays_away() -> None:
    table = {"name": "fedavg", "local": {"lr": 0.1, "batch_size": "none"}}
    config = RunConfig.from_dict(small(algorithm=table))
    for one in (config, RunConfig.from_dict(tomllib.loads(config.to_toml()))):
        assert runs.build_run(one).algorithm.local == dataclasses.replace(
            DEFAULT_WORK, lr=0.1, batch_size=None
        )


def test_a_partial_table_means_the_same_in_the_file_and_on_the_command_line() -> None:
    table = small(algorithm="fedavg")
    apply_override(table, "algorithm.local.lr=0.1")
    assert RunConfig.from_dict(table).algorithm["local"] == local_of(lr=0.1)


def test_a_table_without_a_name_is_that_of_the_default() -> None:
    steps = {"name": "scaff-pd", "objective": "worst-case", "steps": {"smoothness": 5.0}}
    config = RunConfig.from_dict(small(algorithm=steps))
    assert config.algorithm["steps"]["name"] == "auto"
    assert config.algorithm["steps"]["smoothness"] == 5.0
    assert refused(small(algorithm={"name": "afl", "objective": {"rho": 0.1}})) == [
        "algorithm.objective.rho: there is no setting 'rho'; there are none here"
    ]


def test_defaults_are_not_shared_between_configurations() -> None:
    first = RunConfig.from_dict(small(algorithm="fedavg"))
    first.algorithm["local"]["lr"] = 17.0
    first.data["holdout"]["test"] = 0.9
    again = RunConfig.from_dict(small(algorithm="fedavg"))
    assert again.algorithm["local"]["lr"] == "auto" and again.data["holdout"]["test"] == 0.0


def test_an_algorithm_is_constructed_once_unless_it_needs_the_sizes() -> None:
    config = RunConfig.from_dict(small(algorithm=scaff_pd()))
    assert runs.build_run(config).algorithm is runs.build_run(config).algorithm
    prior = scaff_pd(objective={"name": "average", "prior": "size"})
    config = RunConfig.from_dict(small(algorithm=prior))
    assert runs.build_run(config).algorithm.objective.prior == (6.0, 6.0, 6.0)


def test_losses_have_a_section() -> None:
    assert list(SECTIONS["losses"].entries()) == list(LOSSES)
    message = "model.loss: there is no loss 'hinges' (did you mean 'hinge'?)"
    assert refused(small(model={"name": "logistic", "loss": "hinges"}))[0].startswith(message)


@given(value=st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=3), st.none()))
def test_a_plain_value_fits_its_own_type_alone(value: Any) -> None:
    """Strict types: only a whole number is a number of another kind, too."""
    fits = {kind for kind in (bool, int, float, str) if mismatch(value, kind) is None}
    expected = {type(value)} & {bool, int, float, str}
    assert fits == (expected | {float} if type(value) is int else expected)
    assert (mismatch(value, int | None) is None) == (value is None or type(value) is int)
    wrong = mismatch([1, value], tuple[int, ...])
    assert wrong == (None if type(value) is int else ("[1]", "a whole number"))


# -- overrides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=0.2", 0.2),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b='x y'", "x y"),
        ("a.b=cuda:0", "cuda:0"),
        ('a.b={name="cvar"}', {"name": "cvar"}),
    ],
)
def test_override_is_toml_or_a_bare_word(override: str, value: Any) -> None:
    table: dict[str, Any] = {}
    apply_override(table, override)
    assert table == {"a": {"b": value}}


def test_override_goes_into_a_table_given_by_name() -> None:
    table: dict[str, Any] = {"objective": "cvar"}
    apply_override(table, "objective.tail=0.5")
    assert table == {"objective": {"name": "cvar", "tail": 0.5}}


@pytest.mark.parametrize("override", ["a", "=3", "a.b", "a=x y", "a..b=1", "n.m=1", "a=1\nb=2"])
def test_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_override({"n": 3}, override)


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rond": 3}, "rond: there is no setting or table 'rond' (did you mean 'rounds'?)"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"rounds": "many"}, 'rounds: must be a whole number; got "many"'),
        ({"rounds": True}, "rounds: must be a whole number; got true"),
        ({"seed": -1}, "seed must lie in 0..2^63 - 1, got -1"),
        ({"data": 3}, "data: must be a table with a name; got 3"),
        ({"data": {}}, "data.name: is required: one of fashion-three"),
        ({"data": "fashion-tree"}, "data.name: there is no data set 'fashion-tree' (did you mean"),
        ({"data": {"name": "penguins", "tset": 0.1}}, "data.tset: there is no setting 'tset'"),
        (
            {
                "data": {
                    "name": "table",
                    "path": "a.csv",
                    "client": "c",
                    "target": "y",
                    "group": "p",
                }
            },
            "data.group: there is no setting 'group' (it is called 'keep_together' now)",
        ),
        (
            {"data": {"name": "penguins", "holdout": {"test": 1.5}}},
            "data.holdout: The fractions validation and",
        ),
        (
            {"model": {"name": "mlp", "hidden": [3, "x"]}},
            "model.hidden[1]: must be a whole number",
        ),
        ({"model": {"name": "mlp", "dtype": "float16"}}, "model.dtype: must be 'float32' or"),
        ({"model": {"name": "logistic", "l2": -1}}, "model: l2 must be at least 0, got -1"),
        (
            {"model": {"name": "nowhere:model"}},
            "model.name: nowhere:model is not found: there is no installed module nowhere",
        ),
        ({"algorithm": {"name": "scaff-pd"}}, "algorithm.objective: is required: one of the obj"),
        ({"algorithm": scaff_pd(objective="cvra")}, "algorithm.objective.name: there is no objec"),
        ({"algorithm": scaff_pd(objective="cvar")}, "algorithm.objective.tail: is required: float"),
        (
            {"algorithm": scaff_pd(objective={"name": "cvar", "tail": 2.0})},
            "algorithm.objective: CVaR tail must lie in (0, 1], got 2.0",
        ),
        (
            {"algorithm": scaff_pd(objective={"name": "average", "prior": "sizes"})},
            'algorithm.objective.prior: must be an array; got "sizes"',
        ),
        (
            {"algorithm": scaff_pd(local={"lr": -0.1, "steps": 1})},
            "algorithm.local: LocalSGD lr must be positive, got -0.1",
        ),
        (
            {"algorithm": scaff_pd(local={"lr": 0.1, "steps": 1, "sneaky": 1})},
            "algorithm.local.sneaky: there is no setting 'sneaky'",
        ),
        ({"engine": {"name": "loop", "chunk": 3}}, "engine.chunk: there is no setting 'chunk'"),
        ({"engine": "stack"}, "engine.name: there is no engine 'stack' (did you mean 'stacked'?)"),
        ({"evaluate": {"every": 0}}, "evaluate: every must be at least 1, got 0"),
        (
            {"evaluate": {"splits": ["tests"]}},
            "evaluate.splits[0]: must be 'train' or 'validation'",
        ),
        ({"stop": {"patience": 0}}, "stop: StopWhen patience must be at least 1, got 0"),
        ({"missing": {"policy": "ignore"}}, "missing.policy: must be 'continue' or 'fail'"),
    ],
)
def test_problem_names_the_key_the_value_and_what_is_allowed(
    changes: dict[str, Any], message: str
) -> None:
    problems = refused(small(**changes))
    assert len(problems) == 1
    assert problems[0].startswith(message)


def test_all_problems_come_together() -> None:
    table = small(rounds="x", data="nope", engine={"chunk": 1.5})
    assert [p.split(":")[0] for p in refused(table)] == ["rounds", "data.name", "engine.chunk"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"name": "logistic", "loss": "hinge"}},
            "model.loss: Loss hinge needs exactly 2",
        ),
        ({"model": {"name": "lstm"}}, "model: lstm needs sequences of tokens"),
        (
            {"model": {"name": "logistic", "own": "0.none"}},
            "model.own: the model trains no parameter named '0.none'",
        ),
        ({"engine": {"device": "gpu"}}, "engine.device: unknown device 'gpu'"),
        ({"engine": {"chunk": 0}}, "engine: chunk is a number of clients of at least 1"),
        ({"stop": {"target": 0.9}}, "stop.split: the data have no validation split"),
        ({"data": {"name": "fashion-three", "train": 9999}}, "data: fashion-three: train must lie"),
    ],
)
def test_what_only_the_data_can_tell_is_named_too(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        runs.build_run(RunConfig.from_dict(small(**changes)))
    assert str(caught.value).startswith(message)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "lr", "steps", "rho", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)
PLACES = [
    "rounds", "seed", "data", "model", "algorithm", "engine", "evaluate", "stop", "missing",
    "data.train", "data.holdout", "algorithm.name", "algorithm.local", "algorithm.local.lr",
    "algorithm.objective", "algorithm.objective.rho", "algorithm.objective.base",
    "algorithm.steps.dual", "evaluate.splits", "stop.seconds", "model.l2",
]  # fmt: skip


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(place=st.sampled_from(PLACES), value=json_values)
def test_any_value_anywhere_is_refused_by_key_or_makes_a_configuration(
    place: str, value: Any
) -> None:
    table: dict[str, Any] = small(algorithm=scaff_pd())
    *path, last = place.split(".")
    inner = table
    for key in path:
        inner = inner.setdefault(key, {})
    inner[last] = value
    try:
        config = RunConfig.from_dict(table)
    except ConfigError as error:
        assert all(problem.startswith(place.split(".")[0]) for problem in error.problems)
    else:
        assert isinstance(dataclasses.asdict(config), dict)


def test_an_error_says_the_same_when_it_comes_from_another_process() -> None:
    error = ConfigError(["data.name: unknown", "rounds: must be at least 1"])
    back = pickle.loads(pickle.dumps(error))
    assert back.problems == error.problems
    assert str(back) == str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"name": "drfa", "clients_per_round": 10**40}}, "number out of range"),
        ({"threads": 10**9}, r"threads must lie in 1\.\.1024"),
    ],
)
def test_numbers_beyond_all_measure_are_refused(change: dict[str, Any], message: str) -> None:
    base = {"rounds": 1, "data": {"name": "synthetic-regression"}, "model": {"name": "linear"}}
    with pytest.raises(ConfigError, match=message):
        runs.run({**base, "algorithm": {"name": "fedavg"}, **change})


def test_threads_may_be_left_open_by_name() -> None:
    base = {"rounds": 1, "data": {"name": "synthetic-regression"}, "model": {"name": "linear"}}
    algorithm = {"name": "fedavg", "local": {"lr": 0.1, "steps": 1}}
    assert len(runs.run({**base, "algorithm": algorithm, "threads": "none"}).rounds) == 1


NAMED = """
rounds = 3
data = "fashion-three"
model = { name = "logistic", l2 = 0.01 }
[algorithm]
name = "fair-newton"
metric = "full"
objective = { name = "chi-square", rho = 0.1 }
"""


@pytest.mark.parametrize(
    ("override", "left_out", "kept"),
    [
        ("algorithm.name=fedavg", "metric, objective, which fedavg", {"weighting": "size"}),
        ("algorithm.name=scaff-pd", "metric, which scaff-pd",
         {"participation": 1.0}),
        ("algorithm.objective.name=average", "rho, which average", {"metric": "full"}),
    ],
)  # fmt: skip
def test_another_name_leaves_out_what_no_longer_fits(
    tmp_path: Path, override: str, left_out: str, kept: dict[str, Any]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NAMED)
    with pytest.warns(UserWarning, match=f"--set {override}: left out {left_out} lacks"):
        found = RunConfig.read(path, [override])
    assert {key: found.algorithm[key] for key in kept} == kept and found.model["l2"] == 0.01


def test_another_name_still_needs_its_own_settings_to_be_right(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NAMED)
    with pytest.raises(ConfigError, match="there is no algorithm 'fedvag'"):
        RunConfig.read(path, ["algorithm.name=fedvag"])
    with pytest.raises(ConfigError, match="there is no setting 'rhoo'"):
        RunConfig.read(path, ["algorithm.objective.rhoo=1"])
