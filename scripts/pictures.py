"""Draw the pictures of the site, with the library's own figures where it has them.

    python -m scripts.pictures            # or: make pictures; all of them, into docs/pictures
    python -m scripts.pictures demo sets  # some

Each is one function; the same code, data and seed give the same file.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.spatial import ConvexHull
from torch import nn

import equifed as ef
from equifed.cli.many import METHODS, configure
from equifed.report import as_methods, build, colour, draw_figures, frontier_svg, standalone
from equifed.runs import run as runs

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "pictures"
STYLE = {
    "svg.hashsalt": "equifed",
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.figsize": (6.4, 3.2),
}
MORE_STYLE = (
    ".ring{fill:none;stroke:#1b1f24;stroke-width:1.4}.mean{stroke:#1b1f24;stroke-width:2}"
    ".line.accent{stroke:#0f5fae}.line.thin{stroke-width:1}"
)
"""What the page of a report has in its own style."""
Picture = Callable[[], str | plt.Figure]


def draw_report_figure(histories: Mapping[str, ef.History], key: str) -> str:
    """Return one figure of a report, as a file."""
    drawn = draw_figures(build(as_methods(dict(histories))))
    figure = {figure.key: figure for group in drawn.values() for figure in group}[key]
    names = list(histories)
    return frame_drawing(standalone(figure.drawing), [(m, names[m]) for m in figure.legend])


def frame_drawing(drawn: str, legend: Sequence[tuple[int, str]] = ()) -> str:
    """Return a drawing in a file of its size, with a legend where the page would have one."""
    wide, high = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawn)[0])
    tall = high + 18 * bool(legend)
    box = f'width="{2 * wide}" height="{2 * tall}" viewBox="0 0 {wide} {tall}"'
    drawn = re.sub(r'width="\d+" height="\d+"', box, drawn, count=1)
    drawn = drawn.replace("<svg viewBox", f'<svg width="{wide}" height="{high}" viewBox', 1)
    drawn = drawn.replace("</style>", MORE_STYLE + "</style>", 1)
    marks = []
    for k, (m, name) in enumerate(legend):
        x = 14 + k * (wide - 28) / len(legend)
        marks.append(
            f'<path d="M{x:.0f} {high + 4}h22" class="line {colour(m)}"/>'
            f'<text x="{x + 28:.0f}" y="{high + 8}">{escape(name)}</text>'
        )
    return drawn.replace("</svg>\n", "".join(marks) + "</svg>\n")


def train(algorithm: Any, clients: Any, rounds: int, every: int = 5, **more: Any) -> ef.History:
    """Train and measure on the test split."""
    return ef.train(
        algorithm, clients, rounds=rounds, evaluate=["test"], every=every, progress=False, **more
    )


def demo() -> str:
    """Draw every client under the demo's methods."""
    with tempfile.TemporaryDirectory() as folder:
        found = {m: runs.run(configure(m), Path(folder) / m) for m in METHODS}
        return draw_report_figure(found, "distribution")


def hospitals() -> plt.Figure:
    """Draw every hospital of the example table over the rounds."""
    figure, ax = plt.subplots(layout="constrained")
    fair = ef.FairNewton(ef.objectives.ChiSquare(0.1))
    train(fair, _simulate_hospitals(), 20, every=1).plot("loss", ax=ax)
    return figure


def own_model() -> plt.Figure:
    """Draw the clients of a small network over the rounds."""
    torch.manual_seed(0)
    data = ef.load("heart-disease")
    width = data.input_shape[0]
    net = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, 2))
    local = ef.LocalSGD(steps=10, lr=0.05, batch_size=20)
    fair = ef.ScaffPD(ef.objectives.CVaR(tail=0.5), local=local)
    history = train(fair, ef.simulate(data, net), 60, every=3)
    figure, axes = plt.subplots(1, 2, layout="constrained")
    history.plot("accuracy", ax=axes[0])
    history.plot("loss", ax=axes[1])
    return figure


def federation() -> plt.Figure:
    """Draw who sends what to whom."""
    figure, ax = plt.subplots(layout="constrained")
    ax.set(xlim=(0, 10), ylim=(0, 5), xticks=[], yticks=[])
    ax.axis("off")
    box = {"boxstyle": "round,pad=0.5", "facecolor": "#eef3fb", "edgecolor": "#3566a8"}
    ax.text(5, 4.3, "server (SuperLink)\nmodel, weights of the clients", ha="center", bbox=box)
    for k, name in enumerate(("north", "south", "west")):
        x = 1.6 + 3.4 * k
        ax.text(x, 0.6, f"{name} (node)\nsamples stay here", ha="center", bbox=box)
        arrow = {"arrowstyle": "->", "color": "#3566a8"}
        ax.annotate("", (x - 0.2, 1.35), (5 - 0.9 + 0.7 * k, 3.75), arrowprops=arrow)
        ax.annotate("", (5 - 0.6 + 0.7 * k, 3.75), (x + 0.2, 1.35), arrowprops=arrow)
    ax.text(1.5, 3.0, "down: the model, step sizes", color="#333")
    ax.text(5.9, 2.2, "up: one loss,\nsums of masked updates", color="#333")
    return figure


# -- objectives -----------------------------------------------------------------------------------

SETS: dict[str, tuple[Any, str]] = {
    "average": (ef.objectives.Average(), "average: one point"),
    "worst case": (ef.objectives.WorstCase(), "worst case: the simplex"),
    "cvar": (ef.objectives.CVaR(tail=0.5), "CVaR, tail 1/2: no weight above 2/3"),
    "chi-square": (ef.objectives.ChiSquare(rho=1.0), "chi-square, rho 1: pulled to the middle"),
    "kl": (ef.objectives.KL(strength=1.0), "KL, strength 1: never at the edge"),
    "relative": (
        ef.objectives.RelativeFairness(phi=0.15),
        "relative fairness, phi 0.15: beyond it",
    ),
}
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(0.75)]])


def sets() -> plt.Figure:
    """Draw where weights of three clients may lie, and what the objective makes of losses.

    Shaded: the weights that some losses lead to, darker where more of them do. Lines: the value of
    the objective for losses that sum to one, as a function of these.
    """
    figure, axes = plt.subplots(2, 3, figsize=(8, 5.4), layout="constrained")
    draw = np.random.default_rng(0)
    losses = 2.0 * draw.standard_normal((300, 3)) + 3
    for ax, (objective, title) in zip(axes.flat, SETS.values(), strict=True):
        _draw_simplex(ax)
        weights = np.array([objective.weights(np.abs(row)) for row in losses])
        place = weights @ CORNERS
        if np.linalg.matrix_rank(place - place[0], tol=1e-6) == 2:
            hull = place[ConvexHull(place).vertices]
            ax.fill(*hull.T, color="#3566a8", alpha=0.15, linewidth=0)
        ax.scatter(*place.T, s=6, color="#3566a8", alpha=0.5, linewidths=0)
        _draw_levels(ax, objective)
        ax.set_title(title, fontsize=8)
    return figure


def _draw_simplex(ax: Any) -> None:
    closed = np.vstack([CORNERS, CORNERS[:1]])
    ax.plot(*closed.T, color="#888", linewidth=0.8)
    for corner, name in zip(CORNERS, ("client 1", "client 2", "client 3"), strict=True):
        shift = -0.09 if corner[1] == 0 else 0.05
        ax.text(corner[0], corner[1] + shift, name, ha="center", fontsize=7, color="#555")
    ax.set(xlim=(-0.3, 1.3), ylim=(-0.32, 1.1), aspect="equal")
    ax.axis("off")


def _draw_levels(ax: Any, objective: Any) -> None:
    """Draw lines of equal value over the losses with sum one, in the same triangle."""
    grid = np.linspace(0, 1, 41)
    points = np.array([(a, b, 1 - a - b) for a in grid for b in grid if a + b <= 1 + 1e-9])
    values = np.array([objective.value(np.clip(p, 0, 1)) for p in points])
    place = points @ CORNERS
    if np.ptp(values) > 1e-9:
        ax.tricontour(*place.T, values, levels=8, colors="#b5541c", linewidths=0.7, alpha=0.9)


def weights() -> str:
    """Draw how the weights move over the rounds."""
    clients = ef.simulate(ef.load("heart-disease"), "logistic", l2=0.01)
    fair = ef.FairNewton(ef.objectives.ChiSquare(0.1))
    return draw_report_figure({"FairNewton": train(fair, clients, 60)}, "weights-0")


def frontier() -> str:
    """Draw average against worst client for several rho."""
    clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    found = {
        f"rho = {rho:g}": train(ef.FairNewton(ef.objectives.ChiSquare(rho)), clients, 60)
        for rho in (0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
    }
    report = build(as_methods(found), title="rho")
    return frame_drawing(frontier_svg(report, [1] * len(found)))


def convergence() -> str:
    """Draw the worst client against rounds."""
    return draw_report_figure(_train_fashion(), "worst-rounds")


def certificate() -> str:
    """Draw the proved gap over the rounds."""
    clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    plain = train(ef.ScaffPD(ef.objectives.ChiSquare(0.1)), clients, 100)
    fast = train(ef.FairNewton(ef.objectives.ChiSquare(0.1)), clients, 100)
    return draw_report_figure({"SCAFF-PD": plain, "FairNewton": fast}, "certificate")


# -- guides ---------------------------------------------------------------------------------------


def features() -> str:
    """Compare a trained network with a fair head on its frozen features."""
    torch.manual_seed(0)
    data = ef.load("fashion-three", train=300, test=300)
    width = int(np.prod(data.input_shape))
    net = nn.Sequential(nn.Flatten(), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 3))
    start = train(ef.FedAvg(ef.LocalSGD(steps=5, lr=0.05)), ef.simulate(data, net), 20)
    frozen = ef.simulate(ef.features(start.model, data, layer="2"), "logistic", l2=1e-2)
    head = train(ef.FairNewton(ef.objectives.ChiSquare(0.1)), frozen, 40)
    return draw_report_figure({"FedAvg on all layers": start, "fair head": head}, "distribution")


def participation() -> plt.Figure:
    """Draw the largest loss when everybody, or fewer, take part in a round."""
    clients = ef.simulate(ef.load("synthetic-regression"), "linear", l2=1e-3)
    figure, ax = plt.subplots(layout="constrained")
    for share in (1.0, 0.6, 0.4):
        fair = ef.ScaffPD(ef.objectives.ChiSquare(0.1), participation=share)
        found = ef.train(fair, clients, rounds=100, evaluate=["train"], every=2, progress=False)
        rounds, values = found.series("loss", "train")
        ax.plot(rounds, values.max(axis=1), label=f"{share:.0%} of the clients per round")
    ax.set(xlabel="round", ylabel="largest training loss", yscale="log")
    ax.legend()
    return figure


def guards() -> str:
    """Compare runs with a liar, with and without a guard."""
    data = _draw_concepts()
    clients = ef.simulate(data, "logistic", l2=1e-2)
    liars = ef.testing.with_liar(clients, data.names[-1], loss=1e3)
    afl = ef.AFL(local=ef.LocalSGD(steps=5, lr=0.3), dual_step=0.05)
    found = {
        "honest": train(afl, clients, 40),
        "a liar": train(afl, liars, 40),
        "a liar, guarded": train(ef.Guarded(afl), liars, 40),
    }
    return draw_report_figure(found, "distribution")


def own_part() -> str:
    """Compare one shared model with one that has an own last layer for each client."""
    torch.manual_seed(0)
    data = _draw_concepts()
    found = {}
    for name, own in (("shared", None), ("own output layer", ["1.weight", "1.bias"])):
        torch.manual_seed(0)
        width = data.input_shape[0]
        net = nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 2))
        clients = ef.simulate(data, net, own=own, l2=1e-3)
        local = ef.LocalSGD(steps=10, lr=0.1)
        found[name] = train(ef.FedAvg(local), clients, 40)
    return draw_report_figure(found, "distribution")


def reproducible() -> plt.Figure:
    """Draw the same run twice: random clients, random minibatches, one seed."""
    clients = ef.simulate(ef.load("heart-disease"), "logistic", l2=0.01)
    local = ef.LocalSGD(steps=5, lr=0.1, batch_size=10)
    drfa = ef.DRFA(local=local, dual_step=0.01, clients_per_round=2)
    figure, axes = plt.subplots(1, 2, sharey=True, layout="constrained")
    for ax, title in zip(axes, ("one day", "another day, same seed"), strict=True):
        train(drfa, clients, 40, every=1).plot("loss", ax=ax)
        ax.set_title(title, fontsize=9)
    return figure


def masks() -> plt.Figure:
    """Draw what the server sees of three updates under hidden sums, and their sum."""
    draw = np.random.default_rng(0)
    true = 0.1 * draw.standard_normal((3, 24)) + np.sin(np.arange(24) / 4) * np.array(
        [[1], [0.4], [-0.7]]
    )
    mask = draw.uniform(-8, 8, (3, 24))
    mask[2] = -mask[0] - mask[1]
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.6), layout="constrained")
    for ax, rows, title in (
        (axes[0], true, "three updates"),
        (axes[1], true + mask, "what leaves: masked"),
        (axes[2], [np.sum(true + mask, axis=0)], "their sum: masks are gone"),
    ):
        for row in rows:
            ax.plot(row, linewidth=1)
        ax.set_title(title, fontsize=9)
        ax.set(xticks=[])
    axes[2].plot(true.sum(axis=0), "k:", linewidth=2)
    return figure


def engines() -> plt.Figure:
    """Draw what a round of some methods sends, as the engines book it."""
    clients = ef.simulate(ef.load("fashion-three", train=20, test=10), "logistic", l2=1e-3)
    work = ef.LocalSGD(steps=5, lr=0.05)
    methods = {
        "FedAvg": ef.FedAvg(work),
        "SCAFFOLD": ef.Scaffold(work),
        "AFL": ef.AFL(work),
        "q-FedAvg": ef.QFedAvg(q=1.0, local=work),
        "FairNewton": ef.FairNewton(ef.objectives.ChiSquare(0.1)),
    }
    last = [train(method, clients, 20).rounds[-1] for method in methods.values()]
    figure, ax = plt.subplots(layout="constrained")
    ax.barh(list(methods), [r.bytes_up / 3e3 for r in last], color="#0f5fae", label="up")
    left = [r.bytes_up / 3e3 for r in last]
    ax.barh(
        list(methods), [r.bytes_down / 3e3 for r in last], left=left, color="#c45a12", label="down"
    )
    for place, record in enumerate(last):
        total = (record.bytes_up + record.bytes_down) / 3e3
        said = f" {record.exchanges} exchange{'s' * (record.exchanges != 1)}"
        ax.text(total, place, said, va="center", fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.2)
    ax.set(xlabel="kB per client and round")
    ax.legend()
    return figure


# -- data that pictures share ---------------------------------------------------------------------


def _simulate_hospitals() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # columns that are left out
        table = ROOT / "examples" / "hospitals.csv"
        data = ef.Federation.from_table(table, "hospital", "outcome", test=0.25)
    return ef.simulate(data, "logistic", l2=1e-3)


def _train_fashion() -> dict[str, ef.History]:
    clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    plain = ef.FedAvg(ef.LocalSGD(steps=5, lr=0.03))
    fair = ef.FairNewton(ef.objectives.ChiSquare(0.1))
    return {"FedAvg": train(plain, clients, 100, 4), "FairNewton": train(fair, clients, 40, 2)}


def _draw_concepts(clients: int = 8, samples: int = 120) -> ef.Federation:
    """Return clients whose labels follow turned directions; the last few have turned furthest."""
    draw = np.random.default_rng(0)
    train, test, half = {}, {}, samples // 2
    for k in range(clients):
        angle = 0.9 * (k / (clients - 1)) ** 2 * np.pi / 2
        X = draw.standard_normal((samples, 5)).astype("float32")
        y = (np.cos(angle) * X[:, 0] + np.sin(angle) * X[:, 1] > 0).astype(int)
        train[f"client {k + 1}"], test[f"client {k + 1}"] = (
            (X[:half], y[:half]),
            (X[half:], y[half:]),
        )
    return ef.Federation.from_clients(train, test=test)


PICTURES: dict[str, Picture] = {
    "demo": demo,
    "hospitals": hospitals,
    "own-model": own_model,
    "federation": federation,
    "sets": sets,
    "weights": weights,
    "frontier": frontier,
    "convergence": convergence,
    "certificate": certificate,
    "features": features,
    "participation": participation,
    "guards": guards,
    "own-part": own_part,
    "reproducible": reproducible,
    "masks": masks,
    "engines": engines,
}


def draw(names: Sequence[str], out: Path = OUT) -> list[Path]:
    """Draw pictures by name, and return their files."""
    unknown = [name for name in names if name not in PICTURES]
    if unknown:
        raise SystemExit(f"There is no picture {unknown[0]!r}; there are {', '.join(PICTURES)}.")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    paths = []
    for name in names or PICTURES:
        with matplotlib.rc_context(STYLE):
            found = PICTURES[name]()
            path = out / f"{name}.svg"
            if isinstance(found, str):
                path.write_text(found, encoding="utf-8")
            else:
                found.savefig(path, metadata={"Date": None})
                plt.close(found)
        paths.append(path)
        print(path.name)
    return paths


if __name__ == "__main__":
    draw(sys.argv[1:])
