"""What algorithms ask of their clients: calls, their arguments, fields of the local work."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import numpy as np
import pytest

from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.streams import Stream
from equifed.engines.loop import LoopClients
from equifed.engines.ordered_sums import DenseVectors
from equifed.testing.algorithms import _begin, _clients


def list_calls(cases: Mapping[str, AnyAlgorithm], rounds: int = 2) -> dict[str, set[str]]:
    """Return what a few rounds of each case call on the clients and their vectors."""
    heard: set[str] = set()
    calls: dict[str, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for owner in (LoopClients, DenseVectors):
            for name, method in inspect.getmembers(owner, inspect.isfunction):
                if not name.startswith("_"):
                    patch.setattr(owner, name, _listen(method, heard))
        clients = _clients()
        for name, algorithm in cases.items():
            heard.clear()
            state = _begin(algorithm, clients)
            for r in range(rounds):
                state, _ = algorithm.round(state, clients, Stream(1).at("round", r))
            calls[name] = set(heard)
    return calls


def choose_cases(calls: Mapping[str, set[str]]) -> list[str]:
    """Return cases that together make every call: those that are new to the ones before them."""
    chosen: list[str] = []
    known: set[str] = set()
    for name, made in calls.items():
        if not made <= known:
            chosen.append(name)
            known |= made
    return chosen


def _listen(method: Callable[..., Any], heard: set[str]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        words = [
            word
            for name, value in list(given.items())[1:]
            if value is not signature.parameters[name].default
            for word in _describe(name, value)
        ]
        heard.add(f"{method.__qualname__}({', '.join(words)})")
        return method(*args, **kwargs)

    return called


def _describe(name: str, value: Any) -> Iterator[str]:
    """Yield what an argument makes an engine do, whatever the numbers are."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if getattr(value, field.name) is not field.default:
                yield f"{name}.{field.name}"
    elif name == "index" and len(np.unique(value)) < len(value):
        yield "index, repeated"
    else:
        yield name
