"""The settings of an app: what is trained (``equifed.toml``), and how the federation runs.

``equifed.toml`` travels with the app, so that server and clients read the same file. How the
federation runs stands in ``[tool.flwr.app.config]`` of ``pyproject.toml``, where ``flwr run
--run-config`` can override it. A run folder keeps both, so that a run goes on as what it was.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from torch import nn

from equifed.algorithms.guard import guard_algorithm
from equifed.algorithms.guard_limits import Guard
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.local import uses_minibatches
from equifed.data.federation import Federation
from equifed.data.fields import WORDS, Field, Layout, Padding
from equifed.data.site_table import TableSettings
from equifed.flower.handshake import StartError
from equifed.flower.mailbox import Deadlines, say
from equifed.flower.members import Members
from equifed.flower.participant import SiteData, read_arrays
from equifed.flower.plan import NORM
from equifed.flower.site import Privacy, check_privacy, read_site
from equifed.flower.task import Task
from equifed.runs.config import (
    RECORDS,
    DataSettings,
    Evaluate,
    ModelSettings,
    build_algorithm,
    construct_parts,
    read_table,
    resolve,
)
from equifed.runs.schema import (
    Checker,
    ConfigError,
    Table,
    choose,
    construct,
    describe_fields,
    mismatch,
    settings,
)
from equifed.training.checkpoint import UNUSABLE
from equifed.training.files import StoredRun
from equifed.training.final_model import GiveOut, StopWhen
from equifed.training.folder import find_addresses
from equifed.training.history import History
from equifed.training.tables import PREPARATION

Do = Literal["train", "fit", "evaluate", "statistics"]
FIT_ROUNDS = 600
"""Rounds of all candidates of a fit together, where nothing is said."""

KNOWN = ("rounds", "seed", "give_out", "model", "algorithm", "evaluate", "stop", "guard")
"""Settings and tables of a run that an app has, too, beside its data."""

ARRAYS = ("arrays", "pad", "mask")
"""Settings of ``[data]`` about samples of several arrays."""

DEADLINES = ("timeout", "grace", "quorum", "wait")
"""Numbers of :class:`Deadlines` that an app may set."""


@dataclass(frozen=True)
class AppConfig:
    """What is trained: the same tables as in the configuration of a simulated run.

    A guard is on unless ``guard = "off"`` or ``"watch"`` is written down.
    ``[data]`` is that of a run: an embedded data set for trying out, or the table that every site
    has a file of (:class:`TableSettings`: no ``path``, which is the site's own). It may also give
    ``classes``, the number in the whole federation, for arrays that ``load_data`` reads, and
    ``arrays``, ``pad`` and ``mask`` where a sample consists of several (:func:`read_layout`).

    Examples
    --------
    >>> config = AppConfig.from_dict(
    ...     {
    ...         "rounds": 3,
    ...         "data": {"name": "penguins"},
    ...         "model": {"name": "logistic"},
    ...         "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 5}},
    ...     }
    ... )
    >>> config.load_client(1).names
    ('Gentoo',)
    """

    rounds: int
    model: Table
    algorithm: Table
    seed: int = 0
    data: Table = field(default_factory=dict)
    evaluate: Evaluate = field(default_factory=Evaluate)
    stop: StopWhen = field(default_factory=StopWhen)
    give_out: GiveOut = "auto"
    guard: Guard = Guard("on")  # noqa: RUF009 - a frozen value

    @classmethod
    def read(cls, path: str | Path) -> AppConfig:
        """Read a TOML file."""
        return cls.from_dict(read_table(Path(path)))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> AppConfig:
        """Check a table as the file would hold it, and fill in the defaults."""
        table, checker = {"data": {}, **table}, Checker()
        data = table.pop("data")
        resolved = resolve(checker, table, KNOWN, guard="on")
        resolved["data"] = _read_data(checker, {"name": data} if isinstance(data, str) else data)
        checker.raise_problems()
        resolved |= construct_parts(resolved)
        config = cls(**{f.name: resolved[f.name] for f in fields(cls)})
        _ = config.table, config.samples  # refuses what cannot be
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the table that :meth:`from_dict` reads."""
        records = {key: describe_fields(getattr(self, key)) for key in RECORDS if key in KNOWN}
        return {f.name: getattr(self, f.name) for f in fields(self)} | records

    @property
    def table(self) -> TableSettings | None:
        """What was agreed on the sites' tables, where they give tables."""
        if "name" in self.data or "target" not in self.data:
            return None
        return cast(TableSettings, construct(TableSettings, self.data, "data"))

    @property
    def classes(self) -> int | None:
        """Number of classes that ``[data]`` gives for data of one's own."""
        value = self.data.get("classes") if "name" not in self.data else None
        return None if value is None else int(value)

    @property
    def samples(self) -> Layout | None:
        """The arrays of a sample that ``[data]`` describes, where there are several."""
        told = {} if "name" in self.data or self.table is not None else self.data
        if "arrays" not in told:
            return None
        padding = Padding(told["pad"], told.get("mask")) if "pad" in told else None
        return read_layout(told["arrays"], padding)

    def build_task(self) -> Task:
        """Return model, loss and precision."""
        shared: ModelSettings = construct(ModelSettings, self.model, "model")
        init = shared.resolve_init(self.model["name"])
        given = shared.loss, shared.l2, shared.dtype, init, shared.penalise, shared.class_weights
        steps = shared.own_steps
        if shared.own is not None and steps == "auto":  # profile losses need all samples
            steps = "joint" if uses_minibatches(build_algorithm(self.algorithm)) else "auto"
        try:
            own = shared.own, shared.own_l2, steps
            return Task(self._module, *given, *own, json.dumps(self.to_dict()), self.samples)
        except ValueError as error:
            raise ConfigError([str(error)]) from error

    def _module(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        made = choose("models", self.model, "model", input_shape=input_shape, outputs=outputs)
        return cast(nn.Module, made)

    def load_site(self, node: Mapping[str, Any]) -> Any:
        """Return the data that a node's settings name, for ``load_data``.

        With a ``target`` in ``[data]``, the CSV or Parquet file of the node's setting ``data``, its
        columns renamed as the site's file says (:func:`equifed.flower.site.read_site`); else the
        arrays of an ``.npz`` file; without either, one client of the named data set.
        """
        if self.table is not None:
            return SiteData.read(self.table, node)
        told = read_site(node)
        if "data" in told:
            return read_arrays(str(told["data"]))
        if "partition-id" not in told:
            raise ConfigError(["the node names neither data nor a partition-id of the data set"])
        return self.load_client(int(told["partition-id"]))

    def load_client(self, partition: int) -> Federation:
        """Return one client of the named data set, for trying out."""
        from equifed.runs.build import load_data

        if "name" not in self.data:
            raise ConfigError(["data.name: none is named; load_data must read the site's own data"])
        federation = load_data(self.data)
        if not 0 <= partition < len(federation):
            has = f"{federation.name} has clients 0..{len(federation) - 1}"
            raise ConfigError([f"partition-id: {has}, got {partition}"])
        return federation.subset([partition])

    def build_algorithm(self, sizes: list[int]) -> AnyAlgorithm:
        """Return the guarded algorithm; ``sizes`` are the clients' training samples."""
        return guard_algorithm(build_algorithm(self.algorithm, sizes), self.guard)


@dataclass(frozen=True)
class FederationSettings:
    """How the federation runs: ``[tool.flwr.app.config]``, with dashes in place of underscores.

    The settings of ``deadlines`` stand beside the others there. In an app ``resume`` may also be
    the names of the settings that the operator changes, for example ``"timeout wait"``.
    """

    clients: int  # at least so many take part, and every node that is connected then
    privacy: Privacy = "none"  # what the server sees of the clients' vectors
    deadlines: Deadlines = field(default_factory=Deadlines)
    rounds: int = 0  # 0 leaves the number in equifed.toml
    out: str = ""  # run folder on the server
    resume: bool = False  # go on with the run in ``out``
    changes: tuple[str, ...] = ()  # settings that are not those of the resumed run
    do: Do = "train"  # evaluate: the model of ``start``; fit: what equifed.fit does, at the sites
    deliver: bool = False  # whether sites get the model, its card and their own page at the end
    start: str = ""  # folder of a complete run, whose model and preparation this one starts from
    plan: str = ""  # the signed plan of the run, as ``equifed flower run`` writes it
    largest_model: float = NORM  # length of a model, in lengths of the first (at least 1)

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}.")
        check_privacy(self.privacy)
        if self.privacy != "none" and self.clients < 3 and self.do in ("train", "fit"):
            raise ValueError(
                "Hidden sums need at least three clients: with two, each could work out the "
                "other's values."
            )
        if self.do not in get_args(Do):
            raise ValueError(f"do must be one of {', '.join(get_args(Do))}; got {self.do!r}.")
        if self.resume and not self.out:
            raise ValueError("resume needs 'out', the run folder.")
        if self.start and self.start == self.out and not self.resume:
            raise ValueError(
                "'start' and 'out' must be different folders; to continue a run use resume."
            )
        if self.do == "evaluate" and not self.start:
            raise ValueError("do = 'evaluate' needs 'start', the folder of a complete run.")

    def count_rounds(self, config: AppConfig) -> int:
        """Return how many rounds there are at most; those of a fit are not those of a training."""
        return self.rounds or (FIT_ROUNDS if self.do == "fit" else config.rounds)

    @classmethod
    def from_run_config(cls, values: Mapping[str, Any]) -> FederationSettings:
        """Read Flower's run configuration; keys that are not ours are left to the app."""
        given = {key.replace("-", "_"): value for key, value in values.items()}
        if "clients" not in given:
            raise ConfigError(["clients is required in [tool.flwr.app.config] of pyproject.toml"])
        known = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        if isinstance(given.get("resume"), str):
            changes = tuple(given["resume"].replace("-", "_").split())
            known |= {"resume": bool(changes), "changes": changes}
        waits: dict[str, Any] = {key: float(given[key]) for key in DEADLINES if key in given}
        deadlines = Deadlines(given.get("on_missing", Deadlines.on_missing), **waits)
        return cls(**{**known, "deadlines": deadlines})


def _read_data(checker: Checker, data: Mapping[str, Any]) -> Table:
    """Check ``[data]``: a named data set, what was agreed on tables, or a number of classes."""
    rest = {key: value for key, value in data.items() if key != "name"}
    if data.get("name", "table") != "table":
        return checker.choice("data", data, "data", settings(DataSettings))
    if "name" in data or "target" in data:
        return checker.table(settings(TableSettings), rest, "data")
    if set(rest) - {"classes", *ARRAYS}:
        why = "has a name of a data set, the 'target' of the sites' tables, or 'classes' and"
        checker.problem("data", f"{why} {', '.join(ARRAYS)} of arrays")
    lacks = {"pad": "arrays", "mask": "pad"}
    for key in (key for key, other in lacks.items() if key in rest and other not in rest):
        checker.problem(f"data.{key}", f"goes with '{lacks[key]}'; give that, too")
    return rest


def read_layout(told: Any, padding: Padding | None = None) -> Layout:
    """Read the arrays of a sample: kind and shape (none: one number) by name, or in order.

    >>> str(read_layout({"ids": "int 128", "age": "float", "scan": "float 3 x 8 x 8"}))
    'age (one, real numbers), ids (128, whole numbers), scan (3 x 8 x 8, real numbers)'
    """
    named = isinstance(told, Mapping)
    if not told or not (named or isinstance(told, list | tuple)):
        raise ConfigError([f"data.arrays must be a table or an array of texts, got {told!r:.60}"])
    given = dict(sorted(told.items())) if named else {str(k): v for k, v in enumerate(told)}
    for name, text in given.items():
        if not re.fullmatch(r"(bool|int|float)( [1-9]\d*( x [1-9]\d*)*)?", str(text)):
            cure = "write bool, int or float and the shape: 'int 128', 'float 3 x 32 x 32'"
            raise ConfigError([f"data.arrays.{name} is {text!r:.60}; {cure}"])
    if padding is not None:
        fill = padding.fill if isinstance(padding.fill, Mapping) else {None: padding.fill}
        if odd := [value for value in fill.values() if mismatch(value, float)]:
            raise ConfigError(
                [f"data.pad must be a number, or numbers by name; got {odd[0]!r:.60}"]
            )
        if odd := [n for n in (*fill, padding.mask) if named and n not in (None, *given)]:
            raise ConfigError([f"data.pad, data.mask: {odd[0]!r:.60} is none of the arrays"])
    kinds = {name: WORDS[text.split()[0]] for name, text in given.items()}
    shapes = {name: tuple(map(int, re.findall(r"\d+", given[name]))) for name in given}
    fields = [Field(name, shapes[name], kinds[name]) for name in given]
    return Layout(tuple(fields), named, padding)


def read_app_settings(folder: Path) -> dict[str, Any]:
    """Return ``[tool.flwr.app.config]`` of an app's ``pyproject.toml``."""
    table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    config: dict[str, Any] = table["tool"]["flwr"]["app"]["config"]
    return config


# -- what a run folder keeps -----------------------------------------------------------------------

FLOWER = "flower.json"
"""What a run folder of a federation holds besides: identity, settings, and who took part."""


def describe_run(
    settings: FederationSettings, config: AppConfig, members: Members
) -> dict[str, Any]:
    """Return everything that a run needs to go on as what it was."""
    first = members.hellos[0]
    return {
        "run": members.run,
        "do": settings.do,
        "plan": members.told["plan"],
        "privacy": settings.privacy,
        "rounds": settings.rounds,
        "start": settings.start,
        "deadlines": {k: getattr(settings.deadlines, k) for k in ("on_missing", *DEADLINES)},
        "config": config.to_dict(),
        "model": first.model,
        "schema": json.loads(json.dumps(first.schema.to_dict())),
        "clients": [
            {"name": h.name, "sizes": h.sizes, "versions": h.versions} for h in members.hellos
        ],
    }


def read_model(folder: Path) -> dict[str, Any]:
    """Return the model of a complete run."""
    found = History.load(folder).parameters
    if found is None:
        raise StartError(f"The run in {folder} is not complete: it has no model yet.")
    return found


class Kept:
    """The folder's own account of a run, see :func:`describe_run`."""

    def __init__(self, folder: Path) -> None:
        try:
            run = StoredRun(folder)
            self.told = told = run.json(FLOWER)
            self.preparation = run.json(PREPARATION) if PREPARATION in run else None
            self.run, self.names = str(told["run"]), [str(c["name"]) for c in told["clients"]]
            self.deadlines = Deadlines(**told["deadlines"])
            _ = told["privacy"], int(told["rounds"]), told["config"]["algorithm"]
            _ = told["plan"]["text"], told["plan"]["signature"]
            _ = told["model"], told["schema"]["input_shape"]
        except UNUSABLE:
            raise StartError(f"{folder} holds no federation run to resume.") from None

    def config(self, app: AppConfig) -> AppConfig:
        """Return what was trained; refuse code that the app at hand does not name."""
        if foreign := find_addresses(self.told["config"]) - find_addresses(app.to_dict()):
            raise StartError(
                f"{FLOWER} names code that this app does not: {', '.join(sorted(foreign))}. Take "
                "the app that the run was started with."
            )
        return AppConfig.from_dict(self.told["config"])

    def apply(
        self, config: AppConfig, settings: FederationSettings
    ) -> tuple[AppConfig, FederationSettings]:
        """Return what the run started with, but for what the operator changed by name.

        What was agreed with the clients (who takes part, what the server sees of them, what is
        trained) cannot be changed; the app may say something else by now, and is told so.
        """
        same = {"privacy": self.told["privacy"], "clients": len(self.names)}
        wrong = [k for k in same if k in settings.changes and getattr(settings, k) != same[k]]
        if wrong:
            raise StartError(
                f"The run was started with {wrong[0]} = {same[wrong[0]]!r}, to which its clients "
                f"agreed; a resumed run cannot change it to {getattr(settings, wrong[0])!r}."
            )
        kept = self.config(config)
        changed = [name for name in ("on_missing", *DEADLINES) if name in settings.changes]
        waits = {name: getattr(settings.deadlines, name) for name in changed}
        rounds, start = settings.rounds or int(self.told["rounds"]), self.told.get("start") or ""
        waiting = replace(self.deadlines, **waits)
        now = replace(settings, **same, rounds=rounds, start=start, deadlines=waiting)
        now = replace(now, do=self.told.get("do", "train"))
        said = config.to_dict() | {k: getattr(settings, k) for k in same} | vars(settings.deadlines)
        for key, value in (kept.to_dict() | same | vars(waiting)).items():
            if key != "rounds" and said.get(key) != value:
                line = f"{key} is {value}, not {said.get(key)} as the app says now"
                say(f"the run continues with its first settings: {line}")
        return kept, now

    def check(self, members: Members, resumed: bool) -> None:
        """Refuse clients whose data or model are not those that the run started with."""
        first = members.hellos[0]
        schema = json.loads(json.dumps(first.schema.to_dict()))
        for key, value in self.told["schema"].items():
            if schema.get(key) != value:
                raise StartError(
                    f"The earlier run had data whose {key} is {value}; the clients have "
                    f"{schema.get(key)} now. Bring back the same columns, or start a new run."
                )
        if first.model != self.told["model"]:
            raise StartError("The earlier run had another model than the clients build now.")
        earlier = {client["name"]: client["sizes"] for client in self.told["clients"]}
        for hello in members.hellos if resumed else ():
            if hello.sizes != earlier[hello.name]:
                had = f"{earlier[hello.name]} samples when the run started"
                say(f"WARNING: {hello.name} had {had}, and has {hello.sizes} now")
