"""``check_engine`` passes engines that keep the contract, and names what others break."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equifed as ef
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients
from equifed.testing import check_engine
from equifed.testing.algorithms import example_federation

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def toy_code() -> str:
    recipe = PAGE.read_text(encoding="utf-8").partition("## Recipe: an engine")[2]
    found = re.search(r"```python\n(.*?)```", recipe, flags=re.S)
    assert found is not None
    return found[1]


def toy() -> Any:
    scope: dict[str, Any] = {}
    exec(toy_code(), scope)
    return scope["ToyClients"]


def of(engine: Any, **options: Any) -> Callable[..., Clients]:
    def make(data: Any, module: Any, loss: Any) -> Clients:
        return engine(data, module, loss, dtype=torch.float64, **options)  # type: ignore[no-any-return]

    return make


@pytest.mark.parametrize(
    "make",
    [of(LoopClients), of(StackedClients), of(StackedClients, chunk=2, memory=1)],
    ids=["loop", "stacked", "made again"],
)
def test_our_engines_pass(make: Callable[..., Clients]) -> None:
    check_engine(make)


def test_the_toy_of_the_page_passes_and_trains() -> None:
    lines = [line for line in toy_code().splitlines() if line.strip()]
    assert len(lines) < 60
    check_engine(toy())
    data, module = example_federation(), torch.nn.Linear(3, 1, bias=False)
    loss, fair = ef.models.losses.squared, ef.DRFA(local=ef.LocalSGD(lr=0.05, steps=3))
    one, other = (
        ef.train(fair, make(data, module, loss), rounds=3, seed=1, progress=False)
        for make in (toy(), of(LoopClients))
    )
    assert one.parameters is not None and other.parameters is not None
    for name, value in other.parameters.items():
        torch.testing.assert_close(one.parameters[name], value)


def test_what_is_abstract_must_be_there() -> None:
    class Half(Clients):
        pass

    with pytest.raises(TypeError, match=r"losses.*subset.*value_and_gradient"):
        Half()  # type: ignore[abstract]


def test_questions_decline_with_a_reason() -> None:
    clients = toy()(example_federation(), torch.nn.Linear(3, 1), ef.models.losses.squared)
    x = clients.initial(Stream(0))
    weights = np.ones(5)
    for found in (
        clients.curvature(),
        clients.curvature_sum(x, weights),
        clients.inner_products(clients.value_and_gradient(x, Stream(0))[1], lambda rows: rows),
        clients.predictor(x),
        clients.feature_scales(),
    ):
        assert isinstance(found, str) and " " in found
    with pytest.raises(TypeError, match="keep no vectors from round to round"):
        clients.remembered(None, clients.index)


def broken(name: str) -> Any:
    """Return the loop engine with one mistake."""

    class Broken(LoopClients):
        def losses(self, x: Any, stream: Any, batch_size: Any = None) -> Any:
            stream = Stream(7) if name == "draws" else stream
            found = super().losses(x, stream, batch_size)
            if name == "exchanges":
                self.traffic.exchanges += 1
            return found[::-1] if name == "order" else found

        def require_finite(self, values: Any, what: str) -> Any:
            return values if name == "missing" else super().require_finite(values, what)

        def local_steps(self, x: Any, local: Any, *rest: Any, **named: Any) -> Any:
            work = local.work(radius=None) if name == "ball" else local
            return super().local_steps(x, work, *rest, **named)

        def subset(self, index: Any) -> Any:
            part = super().subset(index)
            if name == "ledger":
                part.traffic = copy.deepcopy(self.traffic)
            return part

        def curvature_sum(self, x: Any, weights: Any, *form: Any) -> Any:
            return super().curvature_sum(x, (1 + (name == "curvature")) * weights, *form)

    return of(Broken)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        ("draws", "losses and gradients are the loop's"),
        ("order", "losses and gradients are the loop's"),
        ("ball", "local steps are the loop's"),
        ("ledger", "a subset answers as the whole does"),
        ("missing", "a client without a number is named"),
        ("exchanges", "traffic is booked"),
        ("curvature", "questions are answered or declined"),
    ],
)
def test_mistakes_are_named(mistake: str, check: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(check)):
        check_engine(broken(mistake))
