"""A view changes nothing by itself, and leaves no question of the contract to a default."""

from __future__ import annotations

import inspect

import numpy as np
import torch

import equifed as ef
from equifed.contract.arrays import ClientVectors
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView, VectorsView
from equifed.engines.simulate import simulate
from equifed.testing import check_engine
from equifed.testing.algorithms import example_federation


def test_a_view_passes_everything_on() -> None:
    """A new question that a view forgets would be declined in the name of its engine."""
    own = {"require_finite"}  # speaks of the index, which the view has
    for base, view in ((Clients, ClientsView), (ClientVectors, VectorsView)):
        asked = {name for name in vars(base) if not name.startswith("_")}
        public = {
            n for n in asked if callable(vars(base)[n]) or inspect.isdatadescriptor(vars(base)[n])
        }
        assert public - set(vars(view)) - own - {"collect"} == set()


def test_a_view_of_an_engine_keeps_the_contract() -> None:
    def make(data: ef.Federation, module: torch.nn.Module, loss: object) -> Clients:
        return ClientsView(simulate(data, module, loss, dtype=torch.float64))  # type: ignore[arg-type]

    check_engine(make)


def test_training_through_a_view_is_the_same() -> None:
    data = example_federation()
    plain = simulate(data, "linear", l2=0.1)
    one, other = (
        ef.train(ef.Scaffold(ef.LocalSGD(lr=0.05, steps=3)), c, rounds=3, seed=0, progress=False)
        for c in (plain, ClientsView(simulate(data, "linear", l2=0.1)))
    )
    assert one.parameters is not None and other.parameters is not None
    assert all(torch.equal(v, other.parameters[n]) for n, v in one.parameters.items())
    assert other.trained is not None
    x = np.zeros((2, *data.input_shape))
    np.testing.assert_array_equal(one.trained.predict(x), other.trained.predict(x))
    assert plain.subset([0]).losses(plain.initial(Stream(0)), Stream(0)).shape == (1,)
