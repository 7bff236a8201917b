"""A CNN on CIFAR-10 under label skew: shared, own output bias (joint and after training), own head.

Trained by FedAvg with server momentum. The own bias after training is fitted to held-out outputs at
the shared model's parameters (``history.personalise``), temperature and penalty chosen on
validation images. Each client's own network has the same architecture and local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Settings, Table
from experiments.harness.measures import with_interval, with_limits
from experiments.harness.parts import Part, compute_parts
from numpy.typing import NDArray

import equifed as ef
from equifed.algorithms import FedAvg, ServerOptimised
from equifed.contract import Stream
from equifed.data import build_partition
from equifed.metrics import paired_difference, worst_fraction
from equifed.models import build

Array = NDArray[np.float64]
MEASURES: dict[str, Callable[[Array], float]] = {
    "average": lambda values: float(values.mean()),
    "worst 20 %": lambda values: float(worst_fraction(values, 0.2, higher_is_better=True)),
}
SHARED, AFTER, ALONE = "shared", "own bias, after training", "alone"
ALONE_AT_ONCE = 4


def run(context: Context) -> Outcome:
    """Measure what is not there yet, each method of each seed for itself, and compare."""
    given: Settings
    seeds, parts = context.settings["seeds"], {}
    settings = {key: value for key, value in context.settings.items() if key != "seeds"}
    for seed in seeds:
        for name, own in settings["variants"].items():
            given = {"own": own, "seed": seed, "settings": settings}
            parts[f"{seed}-{name}"] = Part(train, given)
        for first in range(0, settings["clients"], ALONE_AT_ONCE):
            given = {"first": first, "seed": seed, "settings": settings}
            parts[f"{seed}-{ALONE}-{first:02d}"] = Part(train_alone, given)
    answers = compute_parts(context, parts)
    found: dict[int, dict[str, Any]] = {}
    for seed in seeds:
        here = [name for name in parts if name.startswith(f"{seed}-")]
        mine = {name.removeprefix(f"{seed}-"): answers[name] for name in here}
        alone = [part for name, part in sorted(mine.items()) if name.startswith(ALONE)]
        found[seed] = {name: mine[name]["joint"] for name in settings["variants"]}
        found[seed] |= {AFTER: mine[SHARED]["after"], ALONE: [v for part in alone for v in part]}
    tables = {"accuracy": accuracy_table(found), "clients": clients_table(found)}
    return Outcome(checks(found, context.settings), tables, {"accuracy": drawn(found)})


# -- measuring --------------------------------------------------------------------------------


def read_images(settings: Settings) -> tuple[Array, NDArray[np.int64]]:
    """Return standardised images and labels, from the small file, which is made if need be."""
    path = Path(settings["images"])
    if not path.exists():
        whole = ef.load("cifar10", partition={"name": "iid", "clients": 1},
                        samples=settings["samples"])  # fmt: skip
        pixels = np.round(255 * whole.train.inputs).astype(np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, x=pixels, y=whole.train.targets)
    with np.load(path, allow_pickle=False) as stored:
        x, y = stored["x"].astype(np.float32) / 255, stored["y"].astype(np.int64)
    if len(y) != settings["samples"]:
        raise ValueError(f"{path} has {len(y)} images, not {settings['samples']}; remove it.")
    axes = (0, 2, 3)
    mean, deviation = (np.expand_dims(f(x, axis=axes), (1, 2)) for f in (np.mean, np.std))
    return (x - mean) / deviation, y


def divide(settings: Settings, seed: int) -> ef.Federation:
    """Return the clients: divided by labels, thinned, then split."""
    images, labels = read_images(settings)
    partition = build_partition({"name": "dirichlet", "clients": settings["clients"],
                                 "alpha": settings["alpha"], "imbalance": True})  # fmt: skip
    parts = partition.assign(labels, Stream(seed).at("partition"))
    clients = {f"client {i:02d}": (images[rows], labels[rows]) for i, rows in enumerate(parts)}
    data = ef.Federation.from_clients(clients, classes=10, name="cifar10 under label skew")
    return data.split(validation=settings["validation"], test=settings["test"], seed=seed)


def train(own: list[str], seed: int, settings: Settings) -> dict[str, Any]:
    """Return the clients' accuracies of one variant; shared: also with a bias fitted afterwards."""
    data, plain, module = _start(seed, settings)
    algorithm = ServerOptimised(plain, "momentum", lr=1 - settings["momentum"],
                                betas=(settings["momentum"], 0.0))  # fmt: skip
    clients = ef.simulate(
        data, module, l2=settings["l2"], device=settings["device"], init="fresh",
        own=own[0] if own else None, own_l2=settings["l2"] if own else None,
    )  # fmt: skip
    history = ef.train(
        algorithm, clients, rounds=settings["rounds"], seed=seed, evaluate=("test",),
        every=settings["rounds"], progress=False,
    )  # fmt: skip
    record = history.last("accuracy", "test")
    assert record is not None
    found: dict[str, Any] = {"joint": record.values.tolist()}
    if not own:
        fitted = history.personalise(data)
        found |= {"after": fitted.after.tolist(), "choices": str(dict(fitted.choices))}
    return found


def train_alone(first: int, seed: int, settings: Settings) -> list[float]:
    """Return the accuracies of some clients' own networks."""
    data, plain, module = _start(seed, settings)
    few = data.subset(data.names[first : first + ALONE_AT_ONCE])
    alone = ef.alone(
        few, module, l2=settings["l2"], algorithm=plain, rounds=settings["alone_rounds"],
        seed=seed, metric="accuracy", split="test",
    )  # fmt: skip
    values: list[float] = alone.record.values.tolist()
    return values


def _start(seed: int, settings: Settings) -> tuple[ef.Federation, FedAvg, Any]:
    data = divide(settings, seed)
    plain = FedAvg(ef.LocalSGD(**settings["local"]), weighting="uniform")
    return data, plain, build("cnn", data.input_shape, 10, **settings["model"])


# -- comparing --------------------------------------------------------------------------------


def column(found: dict[int, dict[str, Any]], method: str, measure: str) -> Array:
    """Return a measure of a method in %, seed by seed; clients without test images left out."""
    values = [np.array(one[method]) for one in found.values()]
    return np.array([100 * MEASURES[measure](v[~np.isnan(v)]) for v in values])


def methods(found: dict[int, dict[str, Any]]) -> list[str]:
    """Return the names of all methods."""
    return list(next(iter(found.values())))


def accuracy_table(found: dict[int, dict[str, Any]]) -> Table:
    """Return every method's measures, and differences to the shared model."""
    rows: list[list[Cell]] = []
    for method in methods(found):
        shown = [with_interval(column(found, method, m)) for m in MEASURES]
        more = [with_limits(paired_difference(column(found, method, m), column(found, SHARED, m)))
                for m in MEASURES]  # fmt: skip
        rows.append([method, len(found), *shown, *more])
    titles = (*MEASURES, *(f"{m}, minus shared" for m in MEASURES))
    return Table("Test accuracy in %, mean over seeds ± 95 %, differences within seeds",
                 ("method", "seeds", *titles), rows)  # fmt: skip


def clients_table(found: dict[int, dict[str, Any]]) -> Table:
    """Return every client's accuracy, for other questions."""
    rows: list[list[Cell]] = [
        [seed, method, client, None if np.isnan(value) else round(100 * value, 2)]
        for seed, one in found.items()
        for method, values in one.items()
        for client, value in enumerate(values)
    ]
    return Table("Test accuracy in % of every client",
                 ("seed", "method", "client", "accuracy"), rows)  # fmt: skip


def drawn(found: dict[int, dict[str, Any]]) -> str:
    """Draw average against the worst 20 %."""
    lines = {
        m: Line([column(found, m, "average").mean()], [column(found, m, "worst 20 %").mean()],
                dots=True)
        for m in methods(found)
    }  # fmt: skip
    return figure(lines, title="Test accuracy, mean over seeds", x_label="average, %",
                  y_label="worst 20 %, %")  # fmt: skip


def checks(found: dict[int, dict[str, Any]], settings: Settings) -> list[Check]:
    """Hold what was aimed at against what came out."""
    wanted, worst = settings["wanted"]["own bias"], "worst 20 %"
    base, out = column(found, SHARED, worst), []
    ours = {m: column(found, m, worst) for m in methods(found) if m.startswith("own bias")}
    best = max(ours, key=lambda m: float(ours[m].mean()))
    told = "; ".join(f"{m} {with_limits(paired_difference(v, base))}" for m, v in ours.items())
    out.append(Check(f"an own bias gains at least {wanted:g} points, {worst}", "our aim", told,
                     float((ours[best] - base).mean()) >= wanted))  # fmt: skip
    for measure in MEASURES:
        change = paired_difference(column(found, best, measure), column(found, ALONE, measure))
        out.append(Check(f"{best}: above a network alone, {measure}", "our aim",
                         f"{with_limits(change)} points", change.estimate > 0))  # fmt: skip
    return out
