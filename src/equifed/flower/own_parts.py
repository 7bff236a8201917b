"""Own parts on a real federation: they are on the sites' disks, and the server knows of them only.

A site begins with the own part of the model that the run draws, which it draws itself, and keeps
the one that its local steps of a round ended with. A round starts from that of an earlier round, so
that a round may be repeated and a run resumed. A site whose answer was lost keeps what it trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract.arrays import Losses, Vector
from equifed.contract.curvature import Inexactness
from equifed.contract.local import own_strength
from equifed.contract.streams import Stream
from equifed.data.split import Split
from equifed.engines.base import OwnRows
from equifed.engines.own import JOINT
from equifed.flower.memory import Memory
from equifed.flower.messenger import Messenger, pack_tensor
from equifed.flower.task import OneClient
from equifed.flower.wire import Reply, WireError, digest_model, expect_number
from equifed.models.own_part import fit_new_client


def bind_own_part(
    engine: OneClient,
    memory: Memory,
    args: dict[str, Any],
    before: int,
    fit: Callable[[], Tensor],
) -> None:
    """Let a site's engine start from the own part of the last round before another one.

    A site that comes after the end has none, and no run to draw one for: it fits its own.
    """
    if not engine.remembers_own():
        return
    kept = memory.own_before(before)
    if kept is None and "start" not in args:
        engine.own_rows = OwnRows(fit()[None])
        return
    if kept is None or kept.shape != (engine.model.own_size,):
        seed, *address = args["start"]
        engine.initial(Stream(int(seed), tuple(address)))  # draws the own part, too
        engine.own_rows = OwnRows(engine.own_rows.start)
        return
    row = engine.own_rows.start.new_tensor(kept)
    engine.own_rows = OwnRows(row[None])


def fit_own_part(engine: OneClient, train: Split, x: Tensor) -> Tensor:
    """Return the best own part (p,) for a site's training samples at the shared part x."""
    told = engine.predictor(x)
    names = tuple(engine.model.own_shapes)
    try:
        module = fit_new_client(
            told.module, names, lambda m: torch.as_tensor(told.run_module(m, train.inputs)),
            torch.as_tensor(train.targets), told.loss,
            own_strength(told.own_l2, len(train.targets)),
        )  # fmt: skip
    except ValueError as error:  # our own words, about parameters and settings
        raise WireError(f"no own part can be fitted here: {error}") from error
    return torch.cat([module.get_parameter(n).detach().reshape(-1) for n in names]).to(x)


def measure_error(engine: OneClient, x: Tensor) -> dict[str, list[float]]:
    """Return how far loss and gradient at x may be off, where own parts are found numerically."""
    found = engine.inexactness(x)
    if not isinstance(found, Inexactness):
        return {}
    return {"own_error": [float(found.losses[0]), float(found.gradients[0])]}


class OwnPartsElsewhere(Messenger):
    """What the server says of own parts, which are elsewhere."""

    def describe_own(self) -> str | None:
        """Say what the own parts are, how they are found, and where; None: there are none."""
        told = self.members.engine.describe_own()
        return None if told is None else f"{told}, which stay at the sites"

    def warn_of_own(self) -> str | None:
        """Return None: which classes a site has is not known here."""
        return None

    def inexactness(self, x: Vector) -> Inexactness | str | None:
        """Return how far answers at x may be off, as the sites said with their gradients."""
        engine = self.members.engine
        if engine.own is None:
            return None
        if engine.remembers_own():
            return JOINT
        errors = self._own_errors.get(digest_model(pack_tensor(x).data))
        if errors is None:
            return "the sites have not said how exact their own parts are at this model"
        return Inexactness(errors[:, 0], errors[:, 1])

    _own_errors: dict[str, NDArray[np.float64]]

    def keep_errors(self, x: Vector, replies: dict[int, Reply]) -> None:
        """Remember what the sites said with their gradients at x."""
        engine = self.members.engine
        if engine.own is not None and not engine.remembers_own():
            errors: Losses = np.full((len(self.members.names), 2), np.inf)
            for i, reply in replies.items():
                errors[i] = reply.numbers["own_error"]
            self._own_errors.clear()
            self._own_errors[digest_model(pack_tensor(x).data)] = errors

    def check_error(self, reply: Reply) -> None:
        """Refuse a statement about own parts that is none."""
        engine = self.members.engine
        if engine.own is not None and not engine.remembers_own():
            told = reply.numbers.get("own_error")
            both = told if isinstance(told, list) and len(told) == 2 else [None, None]
            for name, value in zip(("loss", "gradient"), both, strict=True):
                expect_number(f"error of the {name}", value, least=0.0)

    def round_of(self, x: Vector) -> int:
        """Return the round whose own parts belong to a model: the one it was first measured in."""
        digest = digest_model(pack_tensor(x).data)
        return self._own_rounds.setdefault(digest, self.round)

    _own_rounds: dict[str, int]
