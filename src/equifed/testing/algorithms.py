"""The conformance suite for algorithms."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from equifed.contract import AnyAlgorithm, Clients, ClientsView, LocalSGD, Losses, Stream
from equifed.data.federation import Federation
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate
from equifed.models.losses import squared
from equifed.testing.objectives import ensure, register, run_check
from equifed.training import checkpoint
from equifed.training.loop import train

Array = NDArray[np.float64]

ALGORITHM_CHECKS: dict[str, Callable[[AnyAlgorithm], None]] = {}  # what check_algorithm runs
SIZES_OF_STEPS = "sizes"  # of a state: near the solution rounding decides about them
SIZES = (7, 1, 12, 3, 5)  # samples of the clients: ragged, one with a single sample


def check_algorithm(algorithm: AnyAlgorithm) -> None:
    """Raise AssertionError, with the name of the check, unless an algorithm keeps the contract.

    Five clients with ragged samples hold a least-squares problem in three unknowns; local steps of
    about 0.05 suit it. The checks are those of :data:`ALGORITHM_CHECKS`.

    >>> import equifed as ef
    >>> check_algorithm(ef.FedAvg(ef.LocalSGD(lr=0.05, steps=2)))  # says nothing: all is well
    """
    for name, check in ALGORITHM_CHECKS.items():
        run_check(algorithm, name, partial(check, algorithm))


def example_federation(spoilt: bool = False) -> Federation:
    """Return the clients that algorithms are tried on; spoilt, the third one's targets are 99."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(m, 3)) for m in SIZES]
    targets = [a @ rng.normal(size=3) + rng.normal(size=len(a)) for a in inputs]
    if spoilt:
        targets[2] = np.full(SIZES[2], 99.0)
    pairs = zip(inputs, targets, strict=True)
    return Federation.from_clients({f"client {i}": pair for i, pair in enumerate(pairs)})


def lose_spoilt(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return squared losses, and none for a spoilt client."""
    return squared(outputs, targets) * torch.where(targets == 99, torch.nan, 1.0)


def _clients(engine: str = "loop", **options: Any) -> Any:
    make: Any = {"loop": LoopClients, "stacked": simulate}[engine]
    model = torch.nn.Linear(3, 1, bias=False)
    given: dict[str, Any] = {"l2": 0.1, "dtype": torch.float64, "init": "fresh", **options}
    return make(example_federation(), model, squared, **given)


def _begin(algorithm: AnyAlgorithm, clients: Clients, shift: float = 0.0) -> Any:
    return algorithm.init(clients, clients.initial(Stream(0).at("initial")) + (0.5 + shift))


def _play(algorithm: AnyAlgorithm, clients: Clients, state: Any, rounds: Sequence[int]) -> Any:
    for r in rounds:
        state, _ = algorithm.round(state, clients, Stream(1).at("round", r))
    return state


def _play_two(algorithm: AnyAlgorithm) -> tuple[Any, Any]:
    """Return clients, and the state after two rounds."""
    clients = _clients()
    return clients, _play(algorithm, clients, _begin(algorithm, clients), (1, 2))


def numbers_of(state: Any, without: str | None = None) -> dict[str, Array]:
    """Return every number of a state by where it is, but those in the field ``without``."""
    out: dict[str, Array] = {}
    for field in dataclasses.fields(state):
        if field.name == without:
            continue
        value = getattr(state, field.name)
        value = getattr(value, "matrix", value)  # vectors that an engine remembers
        if dataclasses.is_dataclass(value):
            out |= {f"{field.name}.{key}": inner for key, inner in numbers_of(value).items()}
        elif value is not None and not isinstance(value, str):
            out[field.name] = np.asarray(value).copy()
    return out


def _ensure_equal(
    one: Any, other: Any, what: str, tolerance: float = 0.0, without: str | None = None
) -> None:
    left, right = numbers_of(one, without), numbers_of(other, without)
    ensure(left.keys() == right.keys(), f"{what}: {sorted(left)} and {sorted(right)}")
    for key in left:
        np.testing.assert_allclose(
            left[key], right[key], rtol=0, atol=tolerance, err_msg=f"{what}: {key}"
        )


def _ensure_sane(state: Any) -> None:
    for key, values in numbers_of(state).items():
        ensure(bool(np.isfinite(values.astype(float)).all()), f"{key} of the state is not finite")
    weights = getattr(state, "weights", None)
    if weights is not None:
        ensure(weights.shape == (len(SIZES),), "state.weights has not one number per client")
        ensure(abs(weights.sum() - 1) < 1e-6, "state.weights does not sum to one")


@register(ALGORITHM_CHECKS, "states are frozen values")
def _check_state(algorithm: AnyAlgorithm) -> None:
    state, told = _begin(algorithm, _clients()), repr(algorithm)
    ensure(dataclasses.is_dataclass(state), "the state is not a dataclass")
    ensure(state.__dataclass_params__.frozen, "the state is not @dataclass(frozen=True)")
    ensure(isinstance(getattr(state, "x", None), Tensor), "the state has no tensor x")
    clients, state = _play_two(algorithm)
    before = numbers_of(state)
    _play(algorithm, clients, state, (3,))
    for key, values in numbers_of(state).items():
        np.testing.assert_array_equal(values, before[key], err_msg=f"a round changed {key}")
    ensure(repr(algorithm) == told, f"a round changed the algorithm: it is now {algorithm!r}")


@register(ALGORITHM_CHECKS, "a round moves the model and tells what it did")
def _check_round(algorithm: AnyAlgorithm) -> None:
    clients, n = _clients(), len(SIZES)
    state = _begin(algorithm, clients)
    new, info = algorithm.round(state, clients, Stream(1).at("round", 1))
    ensure(not torch.equal(new.x, state.x), "the model does not move")
    ensure(algorithm.model(new).shape == state.x.shape, "model(state) has another shape than x")
    ensure(info.weights.shape == (n,), f"info.weights has shape {info.weights.shape}, not ({n},)")
    ensure(abs(info.weights.sum() - 1) < 1e-6, "info.weights does not sum to one")
    ensure(info.losses is None or info.losses.shape == (n,), "info.losses is not one per client")
    known = info.index is None or set(info.index) <= set(range(n))
    ensure(known, "info.index names clients that are not there")


@register(ALGORITHM_CHECKS, "engines agree")
def _check_engines(algorithm: AnyAlgorithm) -> None:
    loop, rounds = _clients(), range(1, 9)
    expected = _play(algorithm, loop, _begin(algorithm, loop), rounds)
    # A byte of memory: every handle makes its vectors again.
    for options in ({}, {"chunk": 2, "memory": 1}):
        clients = _clients("stacked", **options)
        state = _play(algorithm, clients, _begin(algorithm, clients), rounds)
        try:
            _ensure_equal(state, expected, f"stacked engine {options}", 1e-10)
        except AssertionError:  # engines round differently, which some algorithms magnify
            nearby = _play(algorithm, loop, _begin(algorithm, loop, 1e-13), rounds)
            tolerance = 1e-10 + 1e3 * _distance(nearby, expected)
            _ensure_equal(state, expected, f"stacked engine {options}", tolerance, SIZES_OF_STEPS)


def _distance(one: Any, other: Any) -> float:
    left, right = (numbers_of(state, SIZES_OF_STEPS) for state in (one, other))
    return max(float(np.max(np.abs(left[k].astype(float) - right[k]), initial=0)) for k in left)


@register(ALGORITHM_CHECKS, "the same state and stream give the same result")
def _check_repetition(algorithm: AnyAlgorithm) -> None:
    clients, state = _play_two(algorithm)
    stream = Stream(1).at("round", 3)
    one, _ = algorithm.round(state, clients, stream)
    stream.generator().normal(size=10)
    clients.losses(state.x, stream.at("losses"), 2)
    work = LocalSGD(lr=0.05, steps=3, batch_size=3)
    clients.subset([0, 3]).local_steps(state.x, work, stream.at("local"))
    other, _ = algorithm.round(state, clients, stream)
    _ensure_equal(one, other, "the same round again")


@register(ALGORITHM_CHECKS, "a saved state resumes identically")
def _check_checkpoint(algorithm: AnyAlgorithm) -> None:
    clients, state = _play_two(algorithm)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder), 2, state, {})
        _, restored, _ = checkpoint.load(Path(folder), _begin(algorithm, clients))
    one, other = (_play(algorithm, clients, s, (3, 4)) for s in (restored, state))
    _ensure_equal(one, other, "after a checkpoint")


@register(ALGORITHM_CHECKS, "any clients may be absent")
def _check_absence(algorithm: AnyAlgorithm) -> None:
    clients = _clients()
    state = _begin(algorithm, clients)
    for r, here in enumerate([[1, 2], [0, 1, 2, 3, 4], [4], [0, 3], [1, 2, 3, 4]], 1):
        state, info = algorithm.round(state, clients.subset(here), Stream(1).at("round", r))
        _ensure_sane(state)
        asked = info.index is None or set(info.index) <= set(here)
        ensure(asked, f"round {r} reports on clients {info.index}, of which only {here} are there")


class _Spoilt(ClientsView):
    """Clients of which the third gives no finite number."""

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        return np.where(self.index == 2, np.nan, numbers)


@register(ALGORITHM_CHECKS, "a client without a number is quarantined")
def _check_quarantine(algorithm: AnyAlgorithm) -> None:
    federation, model = example_federation(spoilt=True), torch.nn.Linear(3, 1, bias=False)
    clients: Any = LoopClients(federation, model, lose_spoilt, dtype=torch.float64, init="fresh")
    try:
        history = train(algorithm, clients, rounds=4, seed=1)
    except ValueError:  # it takes no loss that it does not know: the numbers are spoilt elsewhere
        clients = _Spoilt(_clients())
        history = train(algorithm, clients, rounds=4, seed=1)
    ensure(len(history.rounds) == 4, "training ended early")
    finite = all(bool(torch.isfinite(v).all()) for v in (history.parameters or {}).values())
    ensure(finite, "the model is not finite")
    lost = {event["client"] for event in history.events if event["event"] == "quarantine"}
    ensure(lost == {"client 2"}, f"quarantined are {sorted(lost)}, not client 2 alone")
    others = clients.subset([0, 1, 3, 4])
    _ensure_sane(_play(algorithm, others, _begin(algorithm, clients), range(1, 5)))
