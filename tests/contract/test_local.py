"""Local work as a value."""

import json

import pytest

from equifed.contract.local import LocalSGD, LocalWork, SmoothedHinge
from equifed.runs.config import ConfigError, RunConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.1}, "either steps or epochs"),
        ({"lr": 0.1, "steps": 1, "epochs": 1}, "either steps or epochs"),
        ({"lr": 0.0, "steps": 1}, "lr must be positive, got 0.0"),
        ({"lr": float("nan"), "steps": 1}, "lr must be positive and finite, got nan"),
        ({"lr": 0.1, "steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"lr": 0.1, "steps": 2, "batch_size": 0}, "batch_size must be a whole number"),
        ({"lr": 0.1, "steps": 2, "proximal": -1.0}, "proximal must be at least 0, got -1.0"),
        ({"lr": 0.1, "steps": 2, "radius": 0.0}, "radius must be positive, got 0.0"),
        ({"lr": 0.1, "steps": 2, "radius": 1.0, "onto": abs}, "without a radius beside it"),
        ({"lr": 0.1, "steps": 2, "onto": "box"}, "must be a function of a model"),
        ({"lr": 0.1, "steps": 2, "snapshot": 3}, "snapshot=3 lies beyond the 2 local steps"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalWork(**arguments)


def test_a_hinge_needs_a_positive_smoothing() -> None:
    with pytest.raises(ValueError, match=r"smoothing must be positive, got 0\.0"):
        SmoothedHinge(1.0, 0.0)


def test_the_value_survives_json() -> None:
    local = LocalSGD(lr=0.1, epochs=3, batch_size=7, radius=2.0)
    work = local.work(hinge=SmoothedHinge(0.3, 0.01))
    assert LocalWork.from_dict(json.loads(json.dumps(work.to_dict()))) == work


@pytest.mark.parametrize(
    ("batch_size", "steps"), [(None, [2, 2, 2]), (4, [2, 2, 4]), (5, [2, 2, 2])]
)
def test_epochs_count_the_last_smaller_batch(batch_size: int | None, steps: list[int]) -> None:
    assert LocalSGD(lr=1.0, epochs=2, batch_size=batch_size).steps_for([1, 4, 5]).tolist() == steps


def test_a_function_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="cannot be sent to clients; use radius"):
        LocalSGD(lr=0.1, steps=2, onto=abs).to_dict()


def test_users_set_eight_fields_and_algorithms_ask_for_more() -> None:
    local = LocalSGD(lr=0.1, steps=3, proximal=0.2)
    assert [*vars(local)] == [
        "lr", "steps", "epochs", "batch_size", "proximal", "radius", "correction", "onto",
    ]  # fmt: skip
    work = local.work(snapshot=2).work(average=True)  # what was asked for before stays
    assert (work.lr, work.steps, work.proximal) == (0.1, 3, 0.2)
    assert work.results == ("displacement", "snapshot", "average")
    assert local.work().results == ("displacement",)
    with pytest.raises(TypeError, match="snapshot"):
        LocalSGD(lr=0.1, steps=3, snapshot=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["snapshot", "average", "mean_gradient", "multiplier", "hinge"])
def test_a_configuration_that_sets_an_internal_is_refused_by_name(name: str) -> None:
    table = {
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2, name: 1}},
        "data": {"name": "fashion-three"},
        "rounds": 2,
    }
    with pytest.raises(ConfigError, match=rf"algorithm\.local\.{name}: there is no setting"):
        RunConfig.from_dict(table)
