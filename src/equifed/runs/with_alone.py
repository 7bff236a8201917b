"""When a run fits every client's own model beside the shared one, and where that is written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal, TypeAlias

from equifed.algorithms.fedavg import FedAvg
from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.models.curvature import linear_layer
from equifed.models.losses import base_loss, binary_logistic, cross_entropy, hinge, squared
from equifed.runs.alone import MOST_PARAMETERS, alone
from equifed.training.folder import RunFolder
from equifed.training.history import History

WithAlone: TypeAlias = Literal["auto"] | bool
"""Whether own models are fitted; ``"auto"``: where :func:`is_small_and_convex`."""

FEW_CLIENTS, FEW_PARAMETERS, LITTLE_WORK = 50, 200, 10_000_000
"""Up to so many clients, parameters, and training samples times parameters a run is small."""
CONVEX = (squared, binary_logistic, cross_entropy)


def is_small_and_convex(clients: Any, data: Federation) -> bool:
    """Tell whether own models cost next to nothing, so that every run can have them.

    A linear model of at most 200 parameters with the squared, logistic or cross-entropy loss, at
    most 50 clients that all have training samples, at most 10 million numbers (training samples
    times parameters), in one process.
    """
    model, train = clients.model, data.train
    if model is None or clients.group() is not None:
        return False
    if linear_layer(model.module, model.input_dimensions) is None:
        return False
    size = model.size + model.own_size
    few = len(data.names) <= FEW_CLIENTS and size <= FEW_PARAMETERS
    little = int(train.sizes.sum()) * size <= LITTLE_WORK and int(train.sizes.min()) > 0
    return few and little and base_loss(model.loss) in CONVEX


def wants_alone(asked: WithAlone, built: Any) -> bool:
    """Tell whether to fit own models; refuse, before anything is trained, what has none."""
    if asked == "auto":
        measured = bool(built.config.evaluate.splits)
        return measured and is_small_and_convex(built.clients, built.federation)
    if not asked:
        return False
    model = built.clients.model
    linear = linear_layer(model.module, model.input_dimensions) is not None
    solved = linear and model.size <= MOST_PARAMETERS and base_loss(model.loss) is not hinge
    if not solved and find_local(built.algorithm) is None:
        raise ValueError(
            "Own models of this kind are trained by local steps of a fixed length, which "
            f"{type(built.algorithm).__name__} has not: compare with fedavg or scaffold, call "
            "equifed.alone(..., algorithm=), or leave out --with-alone."
        )
    if not built.config.evaluate.splits:
        raise ValueError("Own models are compared by what is measured: give evaluate.splits.")
    return True


def add_alone(history: History, built: Any, out: Path | None) -> None:
    """Fit own models beside a trained run; write them into its folder, if any, and finish it.

    ``built`` is the :class:`equifed.runs.build.Run` that was trained. Where own models cannot be
    fitted, the shared one is still there.
    """
    config, clients = built.config, built.clients
    folder = None if out is None else RunFolder(out, history.names, built.clients.group())
    try:
        event = fit_alone(history, clients, built.federation, built.algorithm, config.rounds)
    except Exception:
        if folder is not None:
            folder.finish(history.summary(), history.parameters, history.own)
        raise
    if folder is None:
        return
    if event is not None:
        folder.event(event)
        folder.alone(history.alone)
    folder.finish(history.summary(), history.parameters, history.own)


def fit_alone(
    history: History, clients: Any, data: Federation, algorithm: Any, rounds: int
) -> dict[str, Any] | None:
    """Fit own models to be told beside a shared one, and return the event; None: no metric.

    What would be warnings of the fit is told with it: the shared model is what was asked for.
    """
    shown, local = history.main_metric(), find_local(algorithm)
    if shown is None:
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        found = alone(
            data, clients._template, clients.model.loss, l2=clients.model.l2,
            penalise="all" if clients.model.penalised is None else "weights",
            dtype=clients.model.dtype, algorithm=None if local is None else FedAvg(local),
            rounds=rounds, seed=history.seed or 0, metric=shown[0], split=shown[1],
        )  # fmt: skip
    event = found.add_to(history)
    notes = [str(w.message) for w in said if issubclass(w.category, UserWarning)]
    event["reason"] = " ".join([event["reason"], *notes])
    return event


def find_local(algorithm: Any) -> LocalSGD | None:
    """Return the plain local steps of an algorithm, or of the one inside it; None: not fixed.

    A schedule sets the length of SCAFF-PD's steps, round by round.
    """
    work, inner = getattr(algorithm, "local", None), getattr(algorithm, "algorithm", None)
    if hasattr(algorithm, "steps"):  # a schedule
        return None
    if not isinstance(work, LocalSGD):
        return None if inner is None else find_local(inner)
    return LocalSGD(
        lr=work.lr, steps=work.steps, epochs=work.epochs, batch_size=work.batch_size,
    )  # fmt: skip
