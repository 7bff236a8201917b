"""Configuration files: TOML in, a checked and complete :class:`RunConfig` out.

A name is one of the catalogue, or ``package.module:Name`` for code of your own. A table that is
given in part is completed from the default of what it belongs to; ``"none"`` takes a default away.
A resolved configuration has every default and the path of every file: it can be run as it is.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from equifed.algorithms.guard import guard_algorithm
from equifed.algorithms.guard_limits import Guard
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.local import OwnL2, OwnSteps
from equifed.data.split import Holdout, refuse_any
from equifed.privacy.clients import Privacy
from equifed.runs import schema
from equifed.runs.catalogue import unknown
from equifed.runs.schema import Checker, ConfigError, Table, settings
from equifed.training import StoredRun, tables
from equifed.training.final_model import GiveOut, SplitName, StopWhen
from equifed.training.play_round import MissingPolicy

__all__ = ["ConfigError", "Evaluate", "Holdout", "RunConfig"]

BARE = re.compile(r"[A-Za-z_./~][^\s\"'\[\]{}=#,]*")  # text that --set takes without quotes
MOST_THREADS = 1024  # beyond it the thread library ends the process for want of memory
PRIVACY = settings(Privacy, ("rounds",))  # the budget is split over the rounds of the run


@dataclass(frozen=True)
class DataSettings:
    """Settings that every data set has."""

    holdout: Holdout = field(default_factory=Holdout)


@dataclass(frozen=True)
class ModelSettings:
    """Settings that every model has; loss ``auto`` is cross-entropy for classes, else squared.

    ``init = "auto"`` draws named models afresh and lets your code (``module:Name``) start as it is.
    ``class_weights`` are as for :func:`equifed.models.losses.weigh_classes`.
    ``own``, ``own_l2`` and ``own_steps`` are as for :func:`equifed.simulate`.
    """

    loss: str = "auto"
    l2: float = 0.0
    penalise: Literal["all", "weights"] = "all"
    init: Literal["auto", "fresh", "given"] = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    class_weights: str | dict[str, float] | None = None
    own: str | tuple[str, ...] | None = None
    own_l2: OwnL2 | None = None
    own_steps: OwnSteps = "auto"

    def __post_init__(self) -> None:
        if not self.l2 >= 0:
            raise ValueError(f"l2 must be at least 0, got {self.l2}.")
        weights = self.class_weights
        if isinstance(weights, str) and weights != "balanced":
            raise ValueError(f"class_weights must be 'balanced' or a table, got {weights!r}.")

    def resolve_init(self, name: str) -> Literal["fresh", "given"]:
        """Return how a model of this name starts."""
        if self.init != "auto":
            return self.init
        return "given" if ":" in name else "fresh"


@dataclass(frozen=True)
class Evaluate:
    """How often to evaluate, on which splits, and which metrics beside loss and accuracy (or MSE).

    Parameters
    ----------
    every : int
        Rounds from one evaluation to the next.
    splits : sequence of str
        On which samples; splits that the data lack are skipped.
    metrics : sequence of str
        Names (``equifed list metrics``), or ``module:function`` of your own.
    """

    every: int = 1
    splits: tuple[SplitName, ...] = ("train", "validation", "test")
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}.")


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The settings outside the tables.

    Parameters
    ----------
    rounds : int
        How many rounds at most.
    seed : int
        Of every draw: the model's start, who takes part, the minibatches.
    threads : int, optional
        Processor threads of torch; the same number gives the same bits.
    give_out : str
        Which model the run ends with, as for :func:`equifed.train`.
    """

    rounds: int
    seed: int = 0
    threads: int | None = None
    give_out: GiveOut = "auto"
    with_alone: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        threads = 1 if self.threads is None else self.threads
        few = f"threads must lie in 1..{MOST_THREADS}, got {self.threads}."
        refuse_any(
            (self.rounds < 1, f"rounds must be at least 1, got {self.rounds}."),
            (not 1 <= threads <= MOST_THREADS, few),
            (not 0 <= self.seed < 2**63, f"seed must lie in 0..2^63 - 1, got {self.seed}."),
        )


# Tables with a name: their section of the catalogue, and the settings that all of it share
CHOSEN: dict[str, tuple[str, type | None]] = {
    "data": ("data", DataSettings),
    "model": ("models", ModelSettings),
    "algorithm": ("algorithms", None),
    "engine": ("engines", None),
}
# Tables without a name
RECORDS: dict[str, type] = {
    "evaluate": Evaluate, "stop": StopWhen, "missing": MissingPolicy, "guard": Guard,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunConfig(Plain):
    """A run: which data, model, algorithm and engine, how many rounds, from which seed.

    ``data``, ``model``, ``algorithm`` and ``engine`` are resolved tables with a ``name`` and every
    setting of what it names. ``guard`` (``guard = "on"``, or a table with its limits) is as for
    :class:`equifed.Guarded`, ``loaded_code`` lists code of one's own as (address, file). Make one
    with :meth:`read` or :meth:`from_dict`, which check it.

    Examples
    --------
    >>> config = RunConfig.from_dict(
    ...     {
    ...         "rounds": 10,
    ...         "data": "fashion-three",
    ...         "model": {"name": "logistic"},
    ...         "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 5}},
    ...     }
    ... )
    >>> config.data["train"], config.algorithm["participation"], config.seed
    (1000, 1.0, 0)
    """

    data: Table
    model: Table
    algorithm: Table
    engine: Table
    evaluate: Evaluate = field(default_factory=Evaluate)
    stop: StopWhen = field(default_factory=StopWhen)
    missing: MissingPolicy = field(default_factory=MissingPolicy)
    guard: Guard = Guard("off")  # noqa: RUF009 - a frozen value
    privacy: Privacy | None = None
    loaded_code: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a TOML file, apply overrides of the form ``key.path=value``, and check the result.

        Relative paths of data are taken from the folder of the file, and code of one's own is
        looked for there first. Of a table that gets another name (``algorithm.name=fedavg``) what
        this does not take is left out, with a warning.
        """
        table, folder = read_table(Path(path)), Path(path).parent
        if (folder / "run.json").exists():  # a run's own, perhaps of an earlier version
            table = in_words_of_today(table)
        given = [apply_override(table, override) for override in overrides]
        return cls._check(Checker(folder, measures=True, overridden=given), table)

    @classmethod
    def of_run(cls, run: StoredRun) -> Self:
        """Return the configuration of a run folder, perhaps of an earlier version."""
        return cls.from_dict(in_words_of_today(run.toml(tables.CONFIG)), base=run.path)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], base: Path | None = None) -> Self:
        """Check a table as a TOML file in ``base`` would hold it, and fill in the defaults."""
        return cls._check(Checker(base, measures=True), table)

    @classmethod
    def _check(cls, checker: Checker, table: Mapping[str, Any]) -> Self:
        known = (*settings(Plain), *CHOSEN, *RECORDS, "privacy")
        resolved = resolve(checker, table, known, guard="off")
        checker.raise_problems()
        return cls(**resolved | construct_parts(resolved), loaded_code=tuple(checker.code.items()))

    def to_dict(self) -> Table:
        """Return the configuration as a TOML file holds it; :meth:`from_dict` reads it back."""
        plain = {key: getattr(self, key) for key in (*settings(Plain), *CHOSEN)}
        records = {key: schema.describe_fields(getattr(self, key)) for key in RECORDS}
        if self.privacy is not None:
            told = schema.describe_fields(self.privacy)
            records["privacy"] = {key: value for key, value in told.items() if key in PRIVACY}
        return {key: value for key, value in plain.items() if value is not None} | records

    def to_toml(self) -> str:
        """Return the text of a configuration file."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())


def resolve(checker: Checker, table: Mapping[str, Any], known: Sequence[str], guard: str) -> Table:
    """Check the ``known`` settings and tables of a configuration, and fill in their defaults."""
    for key in table:
        if key not in known:
            checker.problem(key, unknown("setting or table", key, known))
    plain = {key: setting for key, setting in settings(Plain).items() if key in known}
    resolved = checker.table(plain, {k: table[k] for k in plain if k in table}, "")
    given = table.get("guard", guard)  # a word alone is its mode
    table = {**table, "guard": {"mode": given} if isinstance(given, str) else given}
    for key in CHOSEN:
        if key in known:
            resolved[key] = _chosen(checker, key, table.get(key, {}))
    for key, record in RECORDS.items():
        if key in known:
            resolved[key] = checker.table(settings(record), table.get(key, {}), key)
    evaluate = resolved["evaluate"]
    if "privacy" in known and "privacy" in table:  # to ask training rows has a price
        resolved["privacy"] = checker.table(PRIVACY, table["privacy"], "privacy")
        asked = table.get("evaluate", {})
        splits = asked.get("splits", ["test"]) if isinstance(asked, Mapping) else ["test"]
        evaluate["splits"] = splits
        if isinstance(splits, list | tuple) and {*map(str, splits)} - {"test"}:
            why = "under privacy only test rows can be evaluated without cost; use test"
            checker.problem("evaluate.splits", why)
        if "with_alone" not in table:
            resolved["with_alone"] = False
    if isinstance(wanted := evaluate.get("metrics", ()), list | tuple):
        evaluate["metrics"] = [
            checker.locate("metrics", name, f"evaluate.metrics[{i}]")
            for i, name in enumerate(wanted)
        ]
    return resolved


def read_table(path: Path) -> Table:
    """Read a TOML file."""
    with schema.blame(
        f"{path} is not a TOML file: ", (tomllib.TOMLDecodeError, UnicodeDecodeError)
    ):
        return tomllib.loads(path.read_text(encoding="utf-8"))


# -- version 0.2 ------------------------------------------------------------------------------

# What it wrote for SCAFF-PD when it ran the second-order method
SCAFF_PD_WORK = {"lr": 1.0, "steps": 8, "proximal": 0.0, "correction": 1.0}
AUTOMATIC = {"name": "auto", "horizon": 4.0, "coupling": 0.7, "probe": 32}
# Settings that had this value where they were not given, and are gone
USUAL: Table = {
    "adult": {"seed": 0}, "dirichlet": {"equal_sizes": False}, "penguins": {"standardised": True},
    "shakespeare": {"edition": "moby"},
}  # fmt: skip
GONE = {"snapshot", "average", "mean_gradient", "multiplier", "hinge", "remember_on"}


def in_words_of_today(table: Any) -> Any:
    """Return the settings of a run of version 0.2 as this version has them; others as they are."""
    if not isinstance(table, Mapping):
        return table
    new = {k: in_words_of_today(v) for k, v in table.items() if k not in GONE}
    usual = USUAL.get(str(new.get("name")), {})
    new = {k: v for k, v in new.items() if k not in usual or v != usual[k]}
    if new.get("name") == "remembering" and "largest" in new:  # is not that of today
        return new["algorithm"]
    if "metric" in new and str(new.get("name")).startswith("scaff-pd"):
        metric, chosen = new.pop("metric"), {"name", "objective", "patience"}
        plain = new.get("local") == SCAFF_PD_WORK and new.get("steps") == AUTOMATIC
        if metric != "none" and plain and new.get("participation") == 1.0:
            kept = {k: v for k, v in new.items() if k in chosen}
            new = {**kept, "name": "fair-newton", "metric": metric}
    return {**new, "init": "given"} if new.get("init") == "own" else new


# -- parts ------------------------------------------------------------------------------------


def read_data(name: str, overrides: Iterable[str] = ()) -> Table:
    """Return the resolved ``[data]`` table of a data set with overrides of its settings."""
    table: Table = {"name": name}
    for override in overrides:
        apply_override(table, override.removeprefix("data."))
    return schema.resolve_choice("data", table, "data", settings(DataSettings))


def _chosen(checker: Checker, key: str, value: Any) -> Table:
    section, shared = CHOSEN[key]
    if key == "engine" and isinstance(value, Mapping):
        value = {"name": "auto", **value}
    table = checker.choice(section, value, key, settings(shared) if shared else None)
    if key == "model" and table.get("loss", schema.AUTO) != schema.AUTO:
        table["loss"] = checker.locate("losses", table["loss"], "model.loss")
    return table


def construct_parts(resolved: Table) -> Table:
    """Construct what needs no data, so that what it refuses is known before anything is loaded."""
    made, problems = dict[str, Any](), list[str]()

    def attempt(key: str, make: Callable[..., Any], *given: Any, **more: Any) -> None:
        try:
            made[key] = make(*given, **more)
        except ConfigError as error:
            problems.extend(error.problems)

    shared = {key: record for key, (_, record) in CHOSEN.items() if record is not None}
    for key, record in {"": Plain, **RECORDS, **shared}.items():
        attempt(key, schema.construct, record, resolved.get(key, resolved), key)
    attempt("algorithm", build_algorithm, resolved["algorithm"])
    if {"algorithm", "guard"} <= made.keys():  # whether its weights can be bounded
        bound = schema.blame("guard: ")(guard_algorithm)
        attempt("guarded", bound, made["algorithm"], made["guard"])
    if "privacy" in resolved and "" in made:
        given, rounds = (Privacy, resolved["privacy"], "privacy"), made[""].rounds
        attempt("privacy", schema.construct, *given, rounds=rounds)
    if problems:
        raise ConfigError(problems)
    return {**vars(made[""]), **{key: made[key] for key in made if key in (*RECORDS, "privacy")}}


def build_algorithm(table: Table, sizes: Sequence[int] | None = None) -> AnyAlgorithm:
    """Return the algorithm of a resolved table; ``sizes`` are the clients' training samples."""
    text = json.dumps(table)
    needed = None if sizes is None or f'"{schema.BY_SIZE}"' not in text else tuple(sizes)
    return _algorithm(text, needed)


@functools.lru_cache(maxsize=16)  # algorithms are values: the same one may serve again
def _algorithm(text: str, sizes: tuple[int, ...] | None) -> AnyAlgorithm:
    algorithm: AnyAlgorithm = schema.choose("algorithms", json.loads(text), "algorithm", sizes)
    return algorithm


# -- overrides --------------------------------------------------------------------------------


def apply_override(table: Table, override: str) -> str:
    """Put the value of ``key.path=value`` into a table; the value is TOML, or a bare word.

    >>> table = {"algorithm": {"name": "scaff-pd"}}
    >>> apply_override(table, "algorithm.objective.rho=0.2"), table["algorithm"]["objective"]
    ('algorithm.objective.rho', {'rho': 0.2})
    """
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError([f"--set takes key.path=value, got {override!r}"])
    for i, key in enumerate(keys[:-1]):
        inner = table.setdefault(key, {})
        if isinstance(inner, str):  # a name alone stands for a table with a name
            inner = table[key] = {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigError([f"--set {override}: {'.'.join(keys[: i + 1])} is not a table"])
        table = inner
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": text} if BARE.fullmatch(text) else {}
    if set(parsed) != {"value"}:
        raise ConfigError([f"--set {override}: {text!r} is not a TOML value; put text in quotes"])
    table[keys[-1]] = parsed["value"]
    return ".".join(keys)
