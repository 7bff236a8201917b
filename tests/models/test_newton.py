"""Newton's method for many clients at once: a client's answer is its own."""

from __future__ import annotations

import numpy as np
import torch

from equifed.models.newton import Factored, fit_many, inverse_root


def test_steps_are_those_of_the_pseudo_inverse_at_any_rank() -> None:
    draw = np.random.default_rng(0)
    roots = draw.standard_normal((3, 5, 9))
    roots[1, 4] = roots[1, 3]  # two equal columns: no full rank
    roots[2] *= 10.0 ** np.arange(-6, 4, 2)[:, None]  # units that differ
    matrices = roots @ roots.swapaxes(1, 2)
    gradients = (roots @ draw.standard_normal((3, 9, 1)))[..., 0]
    found = Factored.make(torch.as_tensor(matrices)).solve(torch.as_tensor(gradients))
    step, downhill = (values.numpy() for values in found)
    back = (matrices @ step[..., None])[..., 0]
    for i in range(3):
        np.testing.assert_allclose(back[i], gradients[i], rtol=1e-7)
    np.testing.assert_allclose(downhill, (step * gradients).sum(1), rtol=1e-7)
    np.testing.assert_allclose(step[1, 3], step[1, 4])  # the shortest of them


def test_a_client_does_not_feel_who_is_solved_beside_it() -> None:
    draw = torch.Generator().manual_seed(0)
    design = torch.randn(6, 40, 3, generator=draw, dtype=torch.float64)
    design *= torch.logspace(-1, 1.5, 6, dtype=torch.float64)[:, None, None]  # some take longer
    targets = (torch.rand(6, 40, generator=draw) < 0.5).long()
    targets[5] = (design[5, :, 0] > 0).long()  # told apart: long on the way
    outputs, counts = design.new_zeros(6, 40, 2), design.new_full((6, 40), 1 / 40)
    ridge, start = design.new_tensor([1e-6, 1e-6, 0.0]), design.new_zeros(6, 3, 2)
    given = design, outputs, targets, counts
    together, late = fit_many(*given, "cross_entropy", ridge, start)
    for i in range(6):
        one = (values[i : i + 1] for values in given)
        single, going = fit_many(*one, "cross_entropy", ridge, start[:1])
        torch.testing.assert_close(together[i], single[0], rtol=1e-6, atol=1e-8)
        assert bool(going[0]) == bool(late[i])
    assert not start.any()  # what was given is left as it was


def test_units_that_differ_by_many_orders_do_not_matter():
    draw = np.random.default_rng(0)
    root, units = draw.standard_normal((5, 9)), 10.0 ** draw.integers(-9, 10, 5)
    matrix = (root @ root.T) * np.outer(units, units)
    vector = draw.standard_normal(5) * units
    inverse = inverse_root(torch.as_tensor(matrix)).numpy()
    inside = inverse.T @ vector
    wanted = np.linalg.solve(root @ root.T, vector / units)
    np.testing.assert_allclose(inverse @ inside * units, wanted, rtol=1e-9)
    np.testing.assert_allclose(inside @ inside, vector / units @ wanted, rtol=1e-9)
