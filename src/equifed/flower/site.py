"""What a site decides for itself: which app it runs, with which settings, by which rules.

Its rules (``policy.toml``) say what it takes part in, and how much of it may leave. Under a privacy
budget answers about rows are clipped, get noise from the operating system's cryptographic source,
and are entered in a ledger that stays at the site over all runs, on the disk before they leave.
What follows from answers (sums, lengths, masks) is free. Everything else is refused.
"""

from __future__ import annotations

import math
import pkgutil
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from equifed.contract.local import LocalSGD, LocalWork
from equifed.data.federation import Federation
from equifed.flower.memory import Refused, find_root, refuse_if, slug
from equifed.flower.plan import Plan
from equifed.privacy.ledger import Bounds, Ledger, Planned, mu_of
from equifed.runs.schema import Checker, ConfigError, construct, settings
from equifed.training.keys import PublicKey, read_keys

if TYPE_CHECKING:  # which loads torch
    from equifed.flower.task import OneClient, Task


class SiteError(ValueError):
    """What the site was given cannot be used, and what to do."""


# -- its settings ----------------------------------------------------------------------------------

# What a site's file may hold: text, and tables of text
PLAIN = ("name", "data", "memory", "privacy", "policy", "results", "peers")
TABLES = ("columns", "units")


class Site:
    """The app that a site installed, and the settings of its node (see :func:`read_site`).

    ``app`` is the folder of a Flower app (its ``pyproject.toml`` names the client), or
    ``module:name`` of a ``ClientApp`` that can be imported.

    >>> Site(settings={"name": "north"}).name, Site(settings={"partition-id": 2}).name
    ('north', 'client-2')
    """

    def __init__(self, app: str = "", settings: Mapping[str, Any] = {}, node: int = 0) -> None:
        self.app, self.given, self.settings = app, settings, read_site(settings)
        part = self.settings.get("partition-id")  # of a data set, where the node says so
        self.partition = None if part is None else int(part)
        default = f"node-{node}" if part is None else f"client-{part}"
        self.name = str(self.settings.get("name", default))
        self.memory = Path(str(self.settings.get("memory", find_root())))

    def load(self) -> tuple[ClientApp, dict[str, Any]]:
        """Import the app; return it with the run settings that the site's own copy states."""
        address, settings = _read_app(self.app) if Path(self.app).is_dir() else (self.app, {})
        if ":" not in address:
            raise SiteError(
                f"{self.app!r} is neither the folder of an app nor the address of a ClientApp; "
                "write package.module:app."
            )
        try:
            app = pkgutil.resolve_name(address)
        except (ImportError, AttributeError, ValueError) as error:
            raise SiteError(f"{address} cannot be imported: {error}") from error
        if not isinstance(app, ClientApp):
            raise SiteError(f"{address} is a {type(app).__name__}, not a ClientApp.")
        return app, settings


def _read_app(app: str) -> tuple[str, dict[str, Any]]:
    """Return where an app has its client, which can be imported then, and its run settings."""
    path = Path(app, "pyproject.toml")
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        found = str(told["components"]["clientapp"]), dict(told.get("config", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SiteError(
            f"{path} names no client in [tool.flwr.app.components] ({type(error).__name__}); write "
            "one with: equifed flower new"
        ) from error
    import_from(Path(app))
    return found


def import_from(folder: Path) -> None:
    """Let the code of an app be imported, a model of its own for instance."""
    sys.path.insert(0, str(folder.absolute()))


def read_site(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's settings, completed from the file that its setting ``site`` names.

    The file is TOML: ``name``, ``data`` (a CSV or Parquet file), ``memory``, ``privacy``,
    ``policy``, ``results`` (a folder for the models of runs that ended) and ``peers`` (the public
    keys of all sites, one on a line with the site's name at its end); ``[columns]`` with agreed
    column names and the titles that they have in the file, and ``[units]`` with the units of
    columns. What the node was started with counts more.
    """
    if "site" not in settings:
        return dict(settings)
    path = Path(str(settings["site"]))
    told = _read_toml(path, "site's file")
    for key, value in told.items():
        texts = value.values() if key in TABLES and isinstance(value, dict) else [value]
        if key not in (*PLAIN, *TABLES) or not all(isinstance(text, str) for text in texts):
            raise SiteError(
                f"{path}: {key} = {value!r:.60} is not a setting of a site; there are "
                f"{', '.join(PLAIN)} with text, and the tables of text {', '.join(TABLES)}."
            )
    for key in {"data", "memory", "policy", "results", "peers"} & set(told):
        told[key] = str(path.parent / told[key])  # as seen from the file
    return {**told, **settings}


def _read_toml(path: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SiteError(f"The {what} {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise SiteError(f"The {what} {path} cannot be used: {error}") from error


# -- its rules -------------------------------------------------------------------------------------

Privacy = Literal["none", "secure"]  # a client shows all of its vectors, or nothing but sums


def check_privacy(level: object) -> None:
    """Refuse what is no level of privacy; "sums" was one until version 0.2."""
    if level == "sums":
        cure = "use 'secure'. A run that was started with 'sums' cannot be resumed; start a new one"
        raise ConfigError([f"privacy = 'sums' (masks of pairs alone) was removed: {cure}"])
    if level not in get_args(Privacy):
        raise ConfigError([f"privacy must be 'none' or 'secure', got {level!r}"])


@dataclass(frozen=True)
class Policy:
    """What a site agrees to, whatever a run asks for: its ``policy.toml``.

    >>> Policy(max_steps=10).check_work(LocalSGD(lr=0.1, steps=20), 100)
    Traceback (most recent call last):
    equifed.flower.memory.Refused: 20 local steps are asked for, this site takes at most 10
    """

    privacy: str = "none"  # the least that it takes part in: "none" or "secure"
    min_samples: int = 1  # training samples below which it takes no part
    max_steps: int | None = None  # local steps of one request
    max_seconds: float | None = None  # of work on a request (by ``equifed flower node``)
    clip: float | None = None  # length to which gradients and updates are shortened
    show_by_name: bool = True  # whether means, gaps and label shares are shown under its name
    operators: tuple[str, ...] = ()  # public keys of those whose runs it answers; none: anybody's
    approve: Literal["listed", "ask"] = "listed"  # "ask": each plan waits for the site's people
    budget: Budget | None = None  # what its rows may tell over all runs

    def __post_init__(self) -> None:
        check_privacy(self.privacy)
        for name in ("min_samples", "max_steps", "max_seconds", "clip"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError([f"{name} must be above 0 and finite, got {value!r}"])
        for name, rule in {"approve": self.approve == "ask", "[budget]": self.budget}.items():
            if rule and not self.operators:
                raise ConfigError([f"{name} needs operators, whose plans say what is asked"])
        _ = self.operator_keys  # refuses what is none

    @cached_property
    def operator_keys(self) -> dict[str, PublicKey]:
        """Return the operators' keys by name."""
        return read_keys(self.operators, "operators")

    @classmethod
    def read(cls, path: str | Path) -> Policy:
        """Read ``policy.toml``, or raise :class:`SiteError`."""
        table, checker = _read_toml(Path(path), "policy"), Checker()
        try:
            values = checker.table(settings(Policy), table, "")
            checker.raise_problems()
            return construct(cls, values, "")  # type: ignore[no-any-return]
        except ConfigError as error:
            told = " ".join(str(error).split())
            raise SiteError(f"The policy {path} cannot be used: {told}") from error

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Policy:
        """Return the policy that a node's settings name; its ``privacy`` can only add to it."""
        policy = cls.read(str(node["policy"])) if "policy" in node else cls()
        level = node.get("privacy", "none")
        try:
            check_privacy(level)
        except ConfigError as error:
            raise SiteError(str(error)) from None
        return replace(policy, privacy=level) if level == "secure" else policy

    def allow_clear(self) -> None:
        """Refuse to show a vector, if the site takes part in hidden sums alone."""
        told = f"this node takes part with privacy {self.privacy!r} only"
        refuse_if({told: self.privacy != "none"})

    def check_work(self, work: LocalSGD, samples: int) -> None:
        """Refuse more local steps than the site does."""
        steps, most = int(work.steps_for([samples])[0]), self.max_steps
        told = f"{steps} local steps are asked for, this site takes at most {most}"
        refuse_if({told: most is not None and steps > most})

    def check_run(self, samples: int, plan: Plan | None = None) -> None:
        """Refuse a run that would ask for what the site does not do, before anything is told."""
        least = f"at least {self.min_samples} training samples, and has fewer"
        refuse_if({f"this site takes part with {least}": samples < self.min_samples})
        if plan is not None and plan.privacy != "secure":
            self.allow_clear()
        works = [step["work"] for step in plan.steps.values() if step.get("work")] if plan else []
        for work in works[:1]:
            self.check_work(LocalWork.from_dict({"lr": 1.0, **work}), samples)

    def shorten(self, vector: NDArray[Any]) -> NDArray[Any]:
        """Return a vector that is not longer than the site's limit.

        >>> Policy(clip=2.5).shorten(np.array([3.0, 4.0])).tolist()
        [1.5, 2.0]
        """
        length = float(np.linalg.norm(vector.astype(np.float64)))
        if self.clip is None or length <= self.clip:
            return vector
        return (vector * (self.clip / length)).astype(vector.dtype)

    def describe(self) -> list[str]:
        """Return what the others should know of it, in sentences."""
        told = [] if self.budget is None else [self.budget.describe()]
        if self.clip is not None:
            told.append(f"shortens gradients and updates to length {self.clip:g}")
        if self.max_seconds is not None:
            told.append(f"works at most {self.max_seconds:g} s on a request")
        return told


# -- its privacy budget ----------------------------------------------------------------------------

TABLE = "a table's columns and labels"
CURES = {
    "metrics": " ([evaluate] splits = [])",
    TABLE: " (give arrays, prepared with public scales and categories)",
}

NO_FIT = (
    "this site answers under a privacy budget, and a fit compares losses of validation rows, which "
    "it does not tell with noise. Train one model (do = 'train'), or choose on rows at one place "
    "with equifed.fit(privacy=...)"
)
MOMENTS = "moments"  # for the model in hidden sums of noised curvature, the same at all models
PAID = ("losses", "gradient", "local", "curvature")  # are answered with noise
# Their answers depend on rows through noised ones alone, or not at all
FREE = ("hello", "sum", "norms", "recall", "keys", "shares", "boxes", "unmask", "bounds", "deliver")


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
        ledger, least = self.open_ledger(root, name), mu_of(bounds.epsilon, self.delta) ** 2
        costs, spent = f"epsilon {bounds.epsilon:g}", f"{ledger.spent:.3g} of {self.epsilon:g}"
        told = f"the plan costs {costs}, and {spent} are spent"
        too_much = ledger.left < least * (1 - 1e-9)
        refuse_if({f"this site's privacy budget does not suffice: {told}": too_much})

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
    refuse_if({NO_FIT: plan.fit})
    found, q = Counter[str](), 1.0
    for name, step in plan.limits.items():
        op, once = name.removeprefix("once ").partition(" ")[0], name.startswith("once ")
        times = int(step["times"]) * (1 if once else plan.rounds + plan.repeats)
        if op in ("losses", "gradient"):
            found["losses"] += times
            found["gradients"] += times if op == "gradient" else 0
        elif op == "local":
            told = step.get("work") or {}
            varying = told.get("steps") is None and told.get("epochs") is None
            refuse_if({"local work with a varying number of steps has no known price": varying})
            work = LocalWork.from_dict({"lr": 1.0, **told})
            found["steps"] += times * int(work.steps_for([rows])[0])
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
