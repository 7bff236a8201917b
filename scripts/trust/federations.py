"""Drawn federations for trying out guards: clients that differ in every honest way there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equifed.algorithms import tilted_erm
from equifed.algorithms.afl import AFL, AgnosticFedAvg
from equifed.algorithms.delta_fl import DeltaFL
from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fedavg import FedAvg, fedprox
from equifed.algorithms.qfedavg import QFedAvg, qfedsgd
from equifed.algorithms.rfedfair import RFedFair
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaff_pd_ia import ScaffPDIA
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.objectives import ChiSquare, WorstCase

CLASSES, FEATURES, TURN = 3, 8, 0.3
Kind = Literal["concepts", "labels", "scales", "noise", "tiny", "hard"]
KINDS: tuple[Kind, ...] = ("concepts", "labels", "scales", "noise", "tiny", "hard")
Array = NDArray[Any]

WORK = LocalSGD(lr=0.1, steps=5)

ALGORITHMS: dict[str, Any] = {
    "fedavg": FedAvg(WORK),
    "fedprox": fedprox(0.1, WORK),
    "scaffold": Scaffold(WORK),
    "afl": AFL(WORK, 0.05),
    "drfa": DRFA(WORK, 0.02),
    "rfedfair": RFedFair(WORK),
    "q-fedavg": QFedAvg(WORK, 1.0),
    "q-fedsgd": qfedsgd(0.5, 1.0),
    "delta-fl": DeltaFL(WORK),
    "agnostic-fedavg": AgnosticFedAvg(WORK),
    "tilted-erm": tilted_erm(WORK, scale=1.0),
    "scaff-pd": ScaffPD(WorstCase()),
    "scaff-pd chi-square": ScaffPD(ChiSquare(0.1, scale=1.0)),
    "scaff-pd-ia": ScaffPDIA(0.3),
}
"""The algorithms of the catalogue, SCAFF-PD with two objectives; as they suit these data."""


def draw_federation(
    seed: int,
    clients: int = 20,
    kind: Kind = "concepts",
    test: int = 1000,
    flip: int | None = None,
    turn: float = TURN,
    hard: Sequence[int] = (),
) -> Federation:
    """Draw clients whose labels follow a linear map with a ``turn`` of each client's own.

    Beside that they differ in their shares of the classes (``"labels"``), in the scale of their
    features and their label noise (``"scales"``, ``"noise"``: a third of the labels of some is
    random), or in their number of samples, down to two (``"tiny"``). Among ``"hard"`` ones are
    three that nobody can serve well: two thirds of their labels are random, or two of their classes
    have changed places. The labels of client ``flip`` are turned around in training,
    and the concepts of clients ``hard`` are turned four times as far.
    """
    draw = np.random.default_rng([seed, KINDS.index(kind)])
    truth = draw.normal(size=(FEATURES, CLASSES))
    train: dict[str, tuple[Array, Array]] = {}
    held: dict[str, tuple[Array, Array]] = {}
    for i in range(clients):
        own = truth + (4 * turn if i in hard else turn) * draw.normal(size=truth.shape)
        size = int(draw.integers(60, 140))
        noise = 0.02
        scale = np.ones(FEATURES)
        if kind == "tiny":
            size = int(np.ceil(2 * 300 ** draw.uniform()))
        if kind == "scales":
            scale = np.full(FEATURES, float(draw.choice([0.3, 1.0, 1.0, 3.0])))
        if kind in ("scales", "noise"):
            noise = float(draw.choice([0.0, 0.02, 0.1, 0.33]))
        if kind == "hard" and i < 3:
            own, noise = (own[:, [1, 0, 2]], noise) if i == 0 else (own, 0.67)
        share = draw.dirichlet(np.full(CLASSES, 0.3)) if kind == "labels" else None
        for name, count in (("train", size), ("test", test)):
            inputs, labels = _draw_samples(draw, own, count, noise, scale, share)
            if name == "train" and i == flip:
                labels = CLASSES - 1 - labels
            (train if name == "train" else held)[f"client {i}"] = inputs, labels
    return Federation.from_clients(
        train, test=held, name=f"drawn, {kind}", classes=CLASSES, task="classification"
    )


def _draw_samples(
    draw: np.random.Generator, own: Array, count: int, noise: float, scale: Array,
    share: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Draw samples with labels; by rejection where the client has shares of the classes."""
    inputs = draw.normal(size=(count if share is None else 30 * count, FEATURES))
    labels = (inputs @ own).argmax(axis=1)
    if share is not None:
        wanted = draw.choice(CLASSES, size=count, p=share)
        places = [draw.choice(np.flatnonzero(labels == c)) for c in wanted]
        inputs, labels = inputs[places], labels[places]
    wrong = draw.uniform(size=count) < noise
    labels = np.where(wrong, draw.integers(0, CLASSES, size=count), labels)
    return (inputs * scale).astype(np.float64), labels.astype(np.int64)
