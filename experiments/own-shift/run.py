"""Ten scanners: which own parameters help where features are shifted and labels are not.

Every client has the same mixture of classes, seen by a scanner of its own: blur, response curve,
dark and light exchanged, gain and offset. A small network with GroupNorm is trained by FedAvg with
nothing of its own, with own parameters of several kinds, on images that every client has scaled by
its own mean and deviation, and by each client alone. Step size and round of every method are chosen
by the clients' average accuracy on validation images, with as many tries for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Settings, Table
from experiments.harness.measures import with_interval, with_limits
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

import equifed as ef
from equifed.algorithms import FedAvg
from equifed.metrics import paired_difference, worst_fraction
from equifed.models import build

Array = NDArray[np.float64]
MEASURES: dict[str, Callable[[Array], float]] = {
    "average": lambda values: float(values.mean()),
    "worst 20 %": lambda values: float(worst_fraction(values, 0.2, higher_is_better=True)),
}
SHARED, SCALED, ALONE = "shared", "shared, scaled by each client", "alone"
SHORT = {SCALED: "shared, scaled", "own first layer and its norm": "first layer and norm"}
"""Names in the figure."""
AIMED = ("own norms", "own first layer", "own first layer and its norm")
Found = dict[str, dict[int, dict[str, Any]]]
"""By method and seed."""


def run(context: Context) -> Outcome:
    """Train what is not there yet, choose, and compare."""
    settings = context.settings
    methods = {**settings["own"], SCALED: [], ALONE: []}
    given = {key: settings[key] for key in ("data", "training", "device")}
    parts = {
        f"{method.replace(' ', '-').replace(',', '')}-{lr:g}-{seed}": Part(
            train, given | {"method": method, "own": own, "lr": lr, "seed": seed}
        )
        for seed in settings["seeds"]
        for method, own in methods.items()
        for lr in settings["lr"]
    }
    answers = compute_parts(context, parts)
    found: Found = {method: {} for method in methods}
    for seed in settings["seeds"]:
        for method in methods:
            tries = [
                a
                for name, a in answers.items()
                if (parts[name].given["method"], parts[name].given["seed"]) == (method, seed)
            ]
            found[method][seed] = choose(tries, settings["lr"])  # fmt: skip
    tables = {"accuracy": accuracy_table(found), "clients": clients_table(found)}
    tables |= {"chosen": chosen_table(found), "scanners": scanners_table(settings)}
    return Outcome(checks(found), tables, {"accuracy": drawn(found)})


# -- the scanners -----------------------------------------------------------------------------


def draw_scanners(data: Settings, seed: int) -> list[dict[str, float]]:
    """Return what every client's scanner does."""
    draw, n = np.random.default_rng([seed, 15]), data["clients"]
    inverted = draw.permutation(n) < data["inverted"]
    even = {key: draw.uniform(*data[key], n) for key in ("offset", "blur")}
    logs = {key: np.exp(draw.uniform(*np.log(data[key]), n)) for key in ("gain", "gamma")}
    return [
        {"inverted": float(inverted[i])} | {k: float(v[i]) for k, v in (even | logs).items()}
        for i in range(n)
    ]


def scan(images: Array, scanner: dict[str, float]) -> Array:
    """Return images (m, 1, 28, 28) of brightness 0 to 1 as a scanner gives them."""
    seen = gaussian_filter(images, (0, 0, scanner["blur"], scanner["blur"]))
    seen = np.clip(seen, 0.0, 1.0) ** scanner["gamma"]
    seen = 1 - seen if scanner["inverted"] else seen
    return scanner["gain"] * seen + scanner["offset"]


def load(data: Settings, seed: int, scaled: bool) -> ef.Federation:
    """Return the clients: each has images of its own, in three parts, from its scanner."""
    widths = [data[key] for key in ("train", "validation", "test")]
    given: Settings = {} if data["images"] == "fashion-three" else {
        "samples": data["clients"] * sum(widths), "partition": {"name": "iid", "clients": 1},
        "seed": seed,
    }  # fmt: skip
    source = ef.load(data["images"], **given)
    whole = source.train
    rows = np.random.default_rng([seed, 16]).permutation(len(whole.targets))
    parts: list[dict[str, Any]] = [{}, {}, {}]
    for i, scanner in enumerate(draw_scanners(data, seed)):
        mine = rows[i * sum(widths) : (i + 1) * sum(widths)]
        images, labels = scan(whole.inputs[mine], scanner), whole.targets[mine]
        if scaled:
            known = images[: data["train"]]
            images = (images - known.mean()) / known.std()
        ends = np.cumsum(widths)
        for part, a, b in zip(parts, ends - widths, ends, strict=True):
            part[f"scanner {i}"] = (images[a:b].astype(np.float32), labels[a:b])
    train, validation, test = parts
    return ef.Federation.from_clients(
        train, validation=validation, test=test, classes=source.classes
    )


# -- training ---------------------------------------------------------------------------------


def train(
    method: str,
    own: list[str],
    lr: float,
    seed: int,
    data: Settings,
    training: Settings,
    device: str,
) -> dict[str, Any]:
    """Return the clients' validation and test accuracies at every evaluated round."""
    clients = load(data, seed, method == SCALED)
    if method != ALONE:
        return _follow(clients, own, lr, seed, training, device)
    each = [_follow(clients.subset([n]), own, lr, seed, training, device) for n in clients.names]
    joined = {s: np.hstack([one[s] for one in each]).tolist() for s in ("validation", "test")}
    return {"rounds": each[0]["rounds"], **joined}


def _follow(
    data: ef.Federation, own: list[str], lr: float, seed: int, training: Settings, device: str
) -> dict[str, Any]:
    module = build("cnn", data.input_shape, data.classes or 1, **training["model"])
    engine = "loop" if device == "cpu" else "stacked"
    clients = ef.simulate(data, module, l2=training["l2"], init="fresh", own=own or None,
                          own_l2=training["l2"] if own else None, engine=engine,
                          device=device)  # fmt: skip
    history = ef.train(
        FedAvg(ef.LocalSGD(lr=lr, **training["local"]), weighting="uniform"), clients,
        rounds=training["rounds"], every=training["every"], evaluate=("validation", "test"),
        seed=seed, progress=False,
    )  # fmt: skip
    rounds, test = history.series("accuracy", "test")
    _, validation = history.series("accuracy", "validation")
    return {"rounds": rounds.tolist(), "validation": validation.tolist(), "test": test.tolist()}


def choose(tries: list[dict[str, Any]], rates: list[float]) -> dict[str, Any]:
    """Return step size, round and test accuracies where validation accuracy is best on average."""
    scores = [np.mean(one["validation"], axis=1) for one in tries]
    which = max(range(len(tries)), key=lambda k: float(scores[k].max()))
    at = int(scores[which].argmax())
    chosen = tries[which]
    return {"lr": rates[which], "round": chosen["rounds"][at], "test": chosen["test"][at]}


# -- comparing --------------------------------------------------------------------------------


def column(found: Found, method: str, measure: str) -> Array:
    """Return a measure of a method in %, seed by seed."""
    return np.array(
        [100 * MEASURES[measure](np.array(one["test"])) for one in found[method].values()]
    )


def accuracy_table(found: Found) -> Table:
    """Return every method's measures, and differences to the shared model and to models alone."""
    rows: list[list[Cell]] = []
    for method, runs in found.items():
        shown = [with_interval(column(found, method, m)) for m in MEASURES]
        more = [
            with_limits(paired_difference(column(found, method, m), column(found, rival, m)))
            for rival in (SHARED, ALONE)
            for m in MEASURES
        ]
        rows.append([method, len(runs), *shown, *more])
    titles = [*MEASURES, *(f"{m}, minus {rival}" for rival in (SHARED, ALONE) for m in MEASURES)]
    return Table("Test accuracy in %, mean over seeds ± 95 %, differences within seeds",
                 ("method", "seeds", *titles), rows)  # fmt: skip


def clients_table(found: Found) -> Table:
    """Return every client's accuracy, for other questions."""
    rows: list[list[Cell]] = [
        [seed, method, client, round(100 * value, 2)]
        for method, runs in found.items()
        for seed, one in runs.items()
        for client, value in enumerate(one["test"])
    ]
    return Table("Test accuracy in % of every client",
                 ("seed", "method", "scanner", "accuracy"), rows)  # fmt: skip


def chosen_table(found: Found) -> Table:
    """Return what was chosen for every method and seed."""
    rows: list[list[Cell]] = [
        [method, seed, one["lr"], one["round"]]
        for method, runs in found.items()
        for seed, one in runs.items()
    ]
    return Table("Chosen by validation accuracy", ("method", "seed", "lr", "round"), rows)


def scanners_table(settings: Settings) -> Table:
    """Return what the scanners do."""
    rows: list[list[Cell]] = [
        [seed, i, *(round(v, 3) for v in scanner.values())]
        for seed in settings["seeds"]
        for i, scanner in enumerate(draw_scanners(settings["data"], seed))
    ]
    keys = draw_scanners(settings["data"], 0)[0]
    return Table("The scanners", ("seed", "scanner", *keys), rows)


def drawn(found: Found) -> str:
    """Draw average against the worst 20 %."""
    lines = {
        SHORT.get(m, m): Line([column(found, m, "average").mean()],
                              [column(found, m, "worst 20 %").mean()], dots=True)
        for m in found
    }  # fmt: skip
    return figure(lines, title="Test accuracy, mean over seeds", x_label="average, %",
                  y_label="worst 20 %, %")  # fmt: skip


def checks(found: Found) -> list[Check]:
    """Say what own parts do here: above the shared model, above alone, or neither."""
    out = []
    for method in (m for m in AIMED if m in found):
        for rival in (SHARED, SCALED, ALONE):
            told = {
                m: paired_difference(column(found, method, m), column(found, rival, m))
                for m in MEASURES
            }
            shown = "; ".join(f"{m} {with_limits(one)}" for m, one in told.items())
            good = all(one.estimate > 0 for one in told.values())
            out.append(Check(f"{method} above: {rival}", "our question", shown, good))
    return out
