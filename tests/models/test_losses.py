"""Losses against their formulas, and against each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.data import Federation
from equifed.models import LOSSES, loss_by_name, outputs_for, predicted_classes

few = settings(deadline=None, max_examples=40)
numbers = st.floats(-30, 30)


@few
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5), st.integers(0, 2))
def test_cross_entropy_is_minus_the_log_of_the_softmax(rows, label):
    outputs = torch.tensor(rows, dtype=torch.float64)
    targets = torch.full((len(rows),), label)
    expected = [
        -np.log(np.exp(r[label] - max(r)) / np.exp(np.array(r) - max(r)).sum()) for r in rows
    ]
    np.testing.assert_allclose(LOSSES["cross_entropy"](outputs, targets), expected, atol=1e-10)


@few
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5), st.integers(0, 2))
def test_squared_loss_of_classes_is_that_of_one_hot_targets(rows, label):
    outputs = torch.tensor(rows, dtype=torch.float64)
    targets = torch.full((len(rows),), label)
    expected = ((np.array(rows) - np.eye(3)[label]) ** 2).sum(1)
    np.testing.assert_allclose(LOSSES["squared"](outputs, targets), expected)
    one_hot = torch.eye(3, dtype=torch.float64)[targets]
    np.testing.assert_allclose(LOSSES["squared"](outputs, one_hot), expected)


def test_squared_loss_has_no_factor_one_half():
    assert LOSSES["squared"](torch.tensor([[3.0]]), torch.tensor([1.0])).tolist() == [4.0]


def test_one_output_meets_targets_of_either_shape():
    outputs = torch.tensor([[3.0], [1.0]])
    flat = LOSSES["squared"](outputs, torch.tensor([1.0, 1.0]))
    column = LOSSES["squared"](outputs, torch.tensor([[1.0], [1.0]]))
    assert flat.tolist() == column.tolist() == [4.0, 0.0]


@few
@given(numbers, st.booleans())
def test_binary_losses_take_both_codings_and_follow_the_formula(score, positive):
    outputs, sign = torch.tensor([[score]], dtype=torch.float64), 1 if positive else -1
    for coding in (
        torch.tensor([int(positive)]),
        torch.tensor([sign]),
        torch.tensor([float(sign)]),
    ):
        np.testing.assert_allclose(
            LOSSES["logistic"](outputs, coding), [np.logaddexp(0, -sign * score)], atol=1e-12
        )
        np.testing.assert_allclose(
            LOSSES["hinge"](outputs, coding), [max(0.0, 1 - sign * score)], atol=1e-12
        )


@few
@given(numbers)
def test_binary_logistic_is_cross_entropy_with_one_score_at_zero(score):
    outputs = torch.tensor([[score]], dtype=torch.float64)
    both = torch.tensor([[0.0, score]], dtype=torch.float64)
    for label in (0, 1):
        target = torch.tensor([label])
        np.testing.assert_allclose(
            LOSSES["logistic"](outputs, target), LOSSES["cross_entropy"](both, target), atol=1e-12
        )


@pytest.mark.parametrize("name", LOSSES)
def test_losses_work_under_vmap_and_grad(name):
    classes = 1 if name in ("logistic", "hinge") else 3
    outputs = torch.randn(4, 5, classes, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(20).reshape(4, 5) % max(classes, 2)
    together = torch.func.vmap(LOSSES[name])(outputs, targets)
    for i in range(4):
        torch.testing.assert_close(together[i], LOSSES[name](outputs[i], targets[i]))
    slopes = torch.func.vmap(torch.func.grad(lambda o, t: LOSSES[name](o, t).sum()))(
        outputs, targets
    )
    assert slopes.shape == outputs.shape and torch.isfinite(slopes).all()


@pytest.mark.parametrize("name", ["logistic", "cross_entropy"])
def test_losses_stay_finite_for_huge_scores(name):
    outputs = torch.tensor([[1e30, -1e30]]) if name == "cross_entropy" else torch.tensor([[-1e30]])
    assert torch.isfinite(LOSSES[name](outputs, torch.tensor([1]))).all()


def federation(targets, **options):
    return Federation.from_clients({"a": (np.ones((len(targets), 2)), targets)}, **options)


def test_outputs_fit_data_and_loss():
    three, two = federation([0, 1, 2]), federation([0, 1])
    assert outputs_for(three, "cross_entropy") == outputs_for(three, "squared") == 3
    assert outputs_for(two, "hinge") == outputs_for(two, "logistic") == 1
    assert outputs_for(federation([0.5, 1.5]), "squared") == 1
    assert outputs_for(federation(np.ones((3, 4))), "squared") == 4


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: outputs_for(federation([0, 1, 2]), "hinge"), "exactly 2 classes, .* has 3"),
        (lambda: outputs_for(federation([0.5]), "cross_entropy"), "use the loss squared"),
        (lambda: LOSSES["hinge"](torch.ones(1, 2), torch.ones(1)), "one output, got 2"),
        (lambda: LOSSES["squared"](torch.ones(1, 2), torch.ones(1, 3)), "2 outputs and 3 targets"),
        (lambda: loss_by_name("huber"), "no loss 'huber'; choose from cross_entropy"),
        (lambda: loss_by_name("torch.nn.functional:no"), "Cannot import the loss"),
    ],
)
def test_losses_that_do_not_fit_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_losses_by_name_or_import():
    assert loss_by_name("hinge") is LOSSES["hinge"]
    assert loss_by_name("equifed.models.losses:squared") is LOSSES["squared"]


def test_predicted_classes():
    assert predicted_classes(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])).tolist() == [1, 0]
    assert predicted_classes(torch.tensor([[-0.1], [0.1]])).tolist() == [0, 1]
