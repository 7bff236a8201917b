"""The conformance suite for engines: the plain loop is what every other one must agree with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equifed.contract import BlockMatrix, Clients, ClientVectors, Curvature, MissingClients, Stream
from equifed.contract.local import LocalSGD, LocalWork, SmoothedHinge
from equifed.data.federation import Federation
from equifed.engines.loop import LoopClients
from equifed.models.losses import SampleLoss, squared
from equifed.testing.algorithms import SIZES, example_federation, lose_spoilt
from equifed.testing.objectives import ensure, register, run_check

MakeClients = Callable[[Federation, nn.Module, SampleLoss], Clients]
"""Returns the engine's clients in double precision, without an L2 penalty."""

ENGINE_CHECKS: dict[str, Callable[[Clients, Clients, Tensor], None]] = {}
SPOILT = "a client without a number is named"
WEIGHTS = np.array([0.3, -0.2, 0.5, 0.1, 0.3])
STREAM = Stream(1).at("round", 3)
METRIC = BlockMatrix(
    torch.tensor([[[0.5, 0.3], [0.3, 2.0]]], dtype=torch.float64), torch.tensor([[0, 2]])
)
WORKS: dict[str, LocalWork] = {  # of every kind
    "steps": LocalWork(lr=0.05, steps=4, batch_size=3),
    "epochs": LocalWork(lr=0.05, epochs=2, batch_size=5),
    "full batches, FedProx and a ball": LocalWork(lr=0.05, steps=3, proximal=0.3, radius=0.8),
    "snapshot": LocalWork(lr=0.05, epochs=2, batch_size=5, snapshot=3),
    "average": LocalWork(lr=0.05, steps=4, batch_size=3, average=True),
    "mean gradient": LocalWork(lr=0.05, steps=4, batch_size=3, mean_gradient=True),
    "multiplier": LocalWork(lr=0.05, steps=3, proximal=0.3, multiplier=True),
    "hinge": LocalWork(lr=0.05, steps=3, batch_size=3, hinge=SmoothedHinge(0.6, 0.2)),
    "damped correction": LocalWork(lr=0.05, steps=3, correction=0.5),
    "scaled steps": LocalWork(lr=0.05, steps=3, proximal=0.3, scale=METRIC),
    "scaled minibatches": LocalWork(lr=0.05, epochs=1, batch_size=3, scale=METRIC),
}


def check_engine(make_clients: MakeClients) -> None:
    """Raise AssertionError, with the name of the check, unless an engine keeps the contract.

    ``make_clients(data, module, loss)`` makes the clients of a federation of five, whose module is
    a linear map of three features to one output; their answers are compared with those of the loop
    engine in double precision. The checks are those of :data:`ENGINE_CHECKS`.

    >>> from equifed.engines.loop import LoopClients
    >>> check_engine(partial(LoopClients, dtype=torch.float64))  # says nothing: all is well
    """
    for name, check in ENGINE_CHECKS.items():
        run_check(make_clients, name, partial(_try, check, make_clients, name == SPOILT))


def _try(check: Callable[..., None], make: MakeClients, spoilt: bool) -> None:
    """Check the engine's clients beside the loop's; spoilt, the third of them has no loss."""
    data, module = example_federation(spoilt), nn.Linear(3, 1, bias=False)
    loss = lose_spoilt if spoilt else squared
    loop = LoopClients(data, module, loss, dtype=torch.float64)
    check(make(data, module, loss), loop, torch.tensor([0.4, -0.7, 0.2], dtype=torch.float64))


def _ensure_near(found: Any, expected: Any, what: str, tolerance: float = 1e-9) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    ensure(found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}")
    near = np.allclose(found, expected, rtol=tolerance, atol=tolerance)
    ensure(near, f"{what}: {found} and not {expected}")


def _ensure_same_vectors(found: Any, expected: ClientVectors, what: str) -> None:
    ensure(isinstance(found, ClientVectors), f"{what}: {type(found).__name__}, no ClientVectors")
    weights = WEIGHTS[: len(expected.squared_norms())]
    sums = found.weighted_sum(weights)
    _ensure_near(sums, expected.weighted_sum(weights), f"weighted sum of {what}")
    for scale in (None, METRIC):
        norms = expected.squared_norms(scale)
        _ensure_near(found.squared_norms(scale), norms, f"squared norms of {what}")
    again = torch.equal(sums, found.weighted_sum(weights))
    ensure(again, f"{what}: the same weighted sum has other bits the second time")


@register(ENGINE_CHECKS, "the clients say who they are")
def _check_facts(clients: Clients, loop: Clients, x: Tensor) -> None:
    ensure(isinstance(clients, Clients), "it is not an equifed.contract.clients.Clients")
    ensure(list(clients.names) == list(loop.names), f"names are {clients.names}")
    ensure(clients.index.tolist() == loop.index.tolist(), f"index is {clients.index}")
    ensure(clients.sizes.tolist() == list(SIZES), f"sizes are {clients.sizes}")
    ensure(clients.traffic.totals() == (0, 0, 0), "traffic is booked before anything was asked")
    ensure(clients.initial(STREAM).shape == x.shape, "initial() is not a vector of three numbers")
    _ensure_near(clients.flatten(clients.parameters(x)), x, "flatten(parameters(x))")


@register(ENGINE_CHECKS, "losses and gradients are the loop's")
def _check_losses(clients: Clients, loop: Clients, x: Tensor) -> None:
    for batch in (None, 2, 2):  # an address always draws the same, whatever was asked before
        what = "all samples" if batch is None else "a minibatch (drawn by Minibatches)"
        one, other = (c.losses(x, STREAM.at("a"), batch) for c in (clients, loop))
        _ensure_near(one, other, f"losses on {what}")
        found, gradients = clients.value_and_gradient(x, STREAM.at("b"), batch)
        expected, true = loop.value_and_gradient(x, STREAM.at("b"), batch)
        _ensure_near(found, expected, f"losses with gradients on {what}")
        _ensure_same_vectors(gradients, true, f"gradients on {what}")


def _move(clients: Clients, x: Tensor, work: LocalSGD, corrected: bool) -> Any:
    given: dict[str, Any] = {}
    n = len(clients.index)
    if corrected:
        _, control = clients.value_and_gradient(x, STREAM.at("control"))
        given = {"control": control, "target": control.weighted_sum(WEIGHTS[:n])}
    if work.work().hinge is not None:
        given["slopes"] = np.linspace(0.2, 1.0, n)
    return clients.local_steps(x, work, STREAM.at("local"), **given)


@register(ENGINE_CHECKS, "local steps are the loop's")
def _check_local_steps(clients: Clients, loop: Clients, x: Tensor) -> None:
    plain = LocalSGD(lr=0.05, steps=2)
    _ensure_near(_move(clients, x, plain, False).steps, [2] * len(SIZES), "steps of a LocalSGD")
    for name, work in WORKS.items():
        for corrected in (False, True):
            if not corrected and (work.multiplier or work.correction != 1):
                continue
            found, expected = (_move(c, x, work, corrected) for c in (clients, loop))
            what = f"{name}, {'corrected' if corrected else 'plain'}"
            _ensure_near(found.steps, expected.steps, f"{what}: steps")
            for kind in work.results:
                pair = getattr(found, kind), getattr(expected, kind)
                _ensure_same_vectors(*pair, f"{what}: {kind}")
            if work.hinge is not None:
                _ensure_near(found.thresholds, expected.thresholds, f"{what}: thresholds")


@register(ENGINE_CHECKS, "a subset answers as the whole does")
def _check_subset(clients: Clients, loop: Clients, x: Tensor) -> None:
    whole, part = clients.losses(x, STREAM, 2), clients.subset([3, 0, 2])
    ensure(part.index.tolist() == [0, 2, 3], f"subset([3, 0, 2]) has the index {part.index}")
    ensure(part.sizes.tolist() == [SIZES[i] for i in (0, 2, 3)], f"its sizes are {part.sizes}")
    ensure(clients.index.tolist() == [0, 1, 2, 3, 4], "subset() changed the clients themselves")
    _ensure_near(part.losses(x, STREAM, 2), whole[[0, 2, 3]], "losses of a subset")
    work = WORKS["steps"]
    one = _move(clients, x, work, False).displacement.squared_norms()[[0, 2, 3]]
    _ensure_near(_move(part, x, work, False).displacement.squared_norms(), one, "its local steps")
    ensure(part.traffic is clients.traffic, "a subset has a ledger of its own")
    again = part.subset([4])
    ensure(again.index.tolist() == [4], "a subset of a subset counts positions in names")
    for wrong in ([], [0, 0], [5], [-1]):
        try:
            clients.subset(wrong)
        except ValueError:
            continue
        raise AssertionError(f"subset({wrong}) is not refused")


@register(ENGINE_CHECKS, SPOILT)
def _check_missing(clients: Clients, loop: Clients, x: Tensor) -> None:
    asks: dict[str, Callable[[Clients], object]] = {
        "losses": lambda c: c.losses(x, STREAM),
        "value_and_gradient": lambda c: c.value_and_gradient(x, STREAM),
        # An engine may do the work only when its result is asked for.
        "local_steps": lambda c: _move(c, x, WORKS["steps"], False).displacement.squared_norms(),
    }
    for verb, ask in asks.items():
        try:
            ask(clients)
        except MissingClients as lost:
            ensure(set(lost.reasons) == {2}, f"{verb} names clients {sorted(lost.reasons)}, not 2")
        else:
            raise AssertionError(f"{verb} does not raise MissingClients for a loss that is NaN")
        ask(clients.subset([0, 1, 3, 4]))


@register(ENGINE_CHECKS, "traffic is booked")
def _check_traffic(clients: Clients, loop: Clients, x: Tensor) -> None:
    for c in (clients, loop):
        c.losses(x, STREAM)
        c.subset([1, 4]).value_and_gradient(x, STREAM)
        for name in ("steps", "average", "hinge"):
            _move(c, x, WORKS[name], name == "average")
    ledger, expected = clients.traffic, loop.traffic
    ensure(ledger.exchanges == expected.exchanges, f"{ledger.exchanges} exchanges are booked")
    _ensure_near(ledger.down, expected.down, "bytes down")
    _ensure_near(ledger.up, expected.up, "bytes up")


@register(ENGINE_CHECKS, "questions are answered or declined")
def _check_questions(clients: Clients, loop: Clients, x: Tensor) -> None:
    bounds = clients.curvature()
    ensure(isinstance(bounds, Curvature | str), f"curvature() returns {type(bounds).__name__}")
    weights = np.abs(WEIGHTS)
    found = clients.curvature_sum(x, weights)
    if not isinstance(found, str):
        expected: Any = loop.curvature_sum(x, weights)
        _ensure_near(found.blocks, expected.blocks, "curvature_sum")
    _, vectors = clients.value_and_gradient(x, STREAM)
    products = clients.inner_products(vectors, lambda rows: rows @ rows.T)
    if not isinstance(products, str):
        _ensure_near(np.diag(products), vectors.squared_norms(), "inner products")
