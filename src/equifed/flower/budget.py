"""A site under a privacy budget: what it answers then, and what a plan would cost it.

Answers about rows are clipped, get noise from the operating system's cryptographic source, and are
entered in a ledger that stays at the site over all runs, on the disk before they leave. What
follows from answers (sums, lengths, masks) is free. Everything else is refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from equifed.contract.local import LocalWork
from equifed.data.federation import Federation
from equifed.flower.memory import slug
from equifed.flower.plan import Plan
from equifed.privacy.ledger import Bounds, Ledger, Planned, mu_of

if TYPE_CHECKING:  # which loads torch
    from equifed.flower.task import OneClient, Task

TABLE = "a table's columns and labels"
CURES = {
    "metrics": " ([evaluate] splits = [])",
    TABLE: " (give arrays, prepared with public scales and categories)",
}

MOMENTS = "moments"
"""Stands for the model in hidden sums of noised curvature, which is the same at all models."""

PAID = ("losses", "gradient", "local", "curvature")
"""Requests that are answered with noise."""

FREE = ("hello", "sum", "norms", "recall", "keys", "shares", "boxes", "unmask", "bounds", "deliver")
"""Requests whose answers depend on rows through noised ones alone, or not at all."""


class Refused(Exception):
    """The site does not do this; says in our own words which of its rules is against it."""


@dataclass(frozen=True)
class Budget:
    """What a site's rows may tell over all runs, and by which bounds: ``[budget]`` of its policy.

    Bounds and units are those of :class:`equifed.Privacy`.

    >>> Budget(epsilon=3.0, rows=4.0, loss=3.0).describe()
    'answers with noise: epsilon 3 at delta 1e-05 for every record, over all runs'
    """

    epsilon: float  # of all runs together
    rows: float  # length to which rows are shortened
    loss: float  # to which losses of rows are clipped
    per_run: float | None = None  # epsilon of one run; by default all there is
    delta: float = 1e-5
    unit: Literal["record", "person"] = "record"
    most_rows: int = 1  # of one person
    gradient: float | None = None  # length to which gradients of rows are clipped

    def __post_init__(self) -> None:
        if not (self.per_run is None or self.per_run <= self.epsilon):
            raise ValueError(f"per_run must be at most epsilon = {self.epsilon:g}.")
        self.bound(1)  # refuses what cannot be

    def bound(self, rounds: int) -> Bounds:
        """Return bounds and budget of a run of so many rounds."""
        return Bounds(
            self.per_run or self.epsilon, self.rows, self.loss, max(rounds, 1), self.delta,
            self.unit, self.gradient, most_rows=self.most_rows,
        )  # fmt: skip

    def describe(self) -> str:
        """Return what the others should know of it."""
        budget = f"epsilon {self.epsilon:g} at delta {self.delta:g} for every {self.unit}"
        return f"answers with noise: {budget}, over all runs"

    def open_ledger(self, root: Path, name: str) -> Ledger:
        """Return the ledger of a site as it is on the disk now."""
        (root / "ledger").mkdir(parents=True, exist_ok=True, mode=0o700)
        path = root / "ledger" / f"{slug(name)}.json"
        return Ledger(self.epsilon, self.delta, unit=self.unit, path=path, name=name)

    def check_plan(self, plan: Plan, rows: int, root: Path, name: str) -> None:
        """Refuse a plan that asks for what has no mechanism, or costs more than is left."""
        planned, bounds = count(plan, rows), self.bound(plan.rounds)
        if not planned.counts():
            return
        bounds.multipliers(planned)  # says what is not installed
        ledger = self.open_ledger(root, name)
        if ledger.left < mu_of(bounds.epsilon, self.delta) ** 2 * (1 - 1e-9):
            raise Refused(
                f"this site's privacy budget does not suffice: the plan costs epsilon "
                f"{bounds.epsilon:g}, and {ledger.spent:.3g} of {self.epsilon:g} are spent"
            )

    def build_engine(
        self, task: Task, federation: Federation, plan: Plan, root: Path, name: str
    ) -> OneClient:
        """Return the engine whose answers carry noise and are entered in the ledger."""
        from equifed.privacy.noise import SecretNoise
        from equifed.privacy.site import linear_loss

        engine = task.build_private(federation, self.bound(plan.rounds))
        planned = count(plan, len(federation.train))
        if linear_loss(engine.model) == "squared":  # all follows from moments
            planned = Planned(moments=1)
        given = self.open_ledger(root, name), SecretNoise(), planned
        engine.answer_as([engine.make_site(0, *given)], self.describe())
        engine.site(0).keep_moments(root / "ledger" / f"{slug(name)}.moments", plan.run)
        return engine  # type: ignore[return-value]


def count(plan: Plan, rows: int) -> Planned:
    """Return how often a plan asks a site with so many rows, or raise :class:`Refused`."""
    found, q = Counter[str](), 1.0
    if plan.fit:
        raise Refused(
            "this site answers under a privacy budget, and a fit compares losses of validation "
            "rows, which it does not tell with noise. Train one model (do = 'train'), or choose on "
            "rows at one place with equifed.fit(privacy=...)"
        )
    if plan.evaluations:
        refuse("metrics")
    for name, step in plan.steps.items():
        op, once = name.removeprefix("once ").partition(" ")[0], name.startswith("once ")
        times = int(step["times"]) * (1 if once else plan.rounds + plan.repeats)
        if op in ("losses", "gradient"):
            found["losses"] += times
            found["gradients"] += times if op == "gradient" else 0
        elif op == "local":
            work = step.get("work") or {}
            if work.get("steps") is None and work.get("epochs") is None:
                raise Refused("local work with a varying number of steps cannot be accounted for")
            steps = LocalWork.from_dict({"lr": 1.0, **work}).steps_for([rows])
            found["steps"] += times * int(steps[0])
            q = min(1.0, (step.get("batch") or rows) / rows)
        elif op == "curvature":
            found["moments"] = 1  # told once
        elif op not in (*FREE, "opened"):
            refuse(op)
    return Planned(found["moments"], found["losses"], found["gradients"], found["steps"], q)


def refuse(op: str) -> NoReturn:
    """Refuse a request that no mechanism answers."""
    cure = CURES.get(op, "")
    raise Refused(
        f"this site answers under a privacy budget, and {op!r} has no declared sensitivity{cure}"
    )
