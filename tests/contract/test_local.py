"""Local work as a value."""

import json

import pytest

from equifed.contract.local import LocalSGD, SmoothedHinge


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.1}, "either steps or epochs"),
        ({"lr": 0.1, "steps": 1, "epochs": 1}, "either steps or epochs"),
        ({"lr": 0.0, "steps": 1}, "lr must be a positive number, got 0.0"),
        ({"lr": float("nan"), "steps": 1}, "lr must be a positive number, got nan"),
        ({"lr": 0.1, "steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"lr": 0.1, "steps": 2, "batch_size": 0}, "batch_size must be a whole number"),
        ({"lr": 0.1, "steps": 2, "proximal": -1.0}, "proximal must be at least 0, got -1.0"),
        ({"lr": 0.1, "steps": 2, "radius": 0.0}, "radius must be positive, got 0.0"),
        ({"lr": 0.1, "steps": 2, "snapshot": 3}, "snapshot=3 lies beyond the 2 steps"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(**arguments)


def test_a_hinge_needs_a_positive_smoothing() -> None:
    with pytest.raises(ValueError, match=r"smoothing must be positive, got 0\.0"):
        SmoothedHinge(1.0, 0.0)


def test_the_value_survives_json() -> None:
    work = LocalSGD(lr=0.1, epochs=3, batch_size=7, radius=2.0, hinge=SmoothedHinge(0.3, 0.01))
    assert LocalSGD.from_dict(json.loads(json.dumps(work.to_dict()))) == work


@pytest.mark.parametrize(
    ("batch_size", "steps"), [(None, [2, 2, 2]), (4, [2, 2, 4]), (5, [2, 2, 2])]
)
def test_epochs_count_the_last_smaller_batch(batch_size: int | None, steps: list[int]) -> None:
    assert LocalSGD(lr=1.0, epochs=2, batch_size=batch_size).steps_for([1, 4, 5]).tolist() == steps
