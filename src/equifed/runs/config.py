"""Configuration files: TOML in, a checked and complete :class:`RunConfig` out.

Every section is a table; :mod:`equifed.runs.settings` checks it against the constructor it names.

* A name is one of the catalogue (``equifed list``), or ``package.module:Name`` for an algorithm,
  objective, schedule, model, loss or data set of your own: looked for beside the file first, then
  among the installed modules (:mod:`equifed.runs.entries`).
* A table that is given in part is completed from the default of what it belongs to: ``local = { lr
  = 0.1 }`` changes the step size of the algorithm's own local work and nothing else. ``epochs``
  takes the place of ``steps`` and the other way round; ``"none"`` takes a default away
  (``batch_size = "none"``: all samples).

A resolved configuration has every default filled in, and the path of every file; it is written
beside the results, and can be run again as it is.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from equifed.algorithms.guard import Guard
from equifed.algorithms.guarded import guard_algorithm
from equifed.contract.algorithm import AnyAlgorithm
from equifed.data.split import Holdout
from equifed.runs.automatic_lr import open_step
from equifed.runs.catalogue import SECTIONS, unknown
from equifed.runs.settings import AUTO, BY_SIZE, Checker, ConfigError, Table, choose, construct
from equifed.runs.signatures import describe_fields, settings
from equifed.runs.tables import CHOSEN, RECORDS, Evaluate, Plain
from equifed.training.given_out import GiveOut
from equifed.training.missing import MissingPolicy
from equifed.training.stopping import StopWhen

__all__ = ["ConfigError", "Evaluate", "Holdout", "RunConfig"]


@dataclass(frozen=True)
class RunConfig:
    """A run: which data, model, algorithm and engine, how many rounds, from which seed.

    ``data``, ``model``, ``algorithm`` and ``engine`` are resolved tables with a ``name`` and every
    setting of what it names. ``threads`` is how many processor threads torch uses; sums are added
    up in an order that depends on it, so the number a run began with stays with it. ``give_out`` is
    as for :func:`equifed.train`, ``with_alone`` as for :func:`equifed.run`, ``guard`` (``guard =
    "on"``, or a table with its limits) as for :class:`equifed.Guarded`, ``loaded_code`` lists the
    code of one's own that it names, as (address, file). Make one with :meth:`read` or
    :meth:`from_dict`, which check it.

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

    rounds: int
    data: Table
    model: Table
    algorithm: Table
    engine: Table
    seed: int = 0
    threads: int | None = None
    give_out: GiveOut = "auto"
    with_alone: Literal["auto"] | bool = "auto"
    evaluate: Evaluate = field(default_factory=Evaluate)
    stop: StopWhen = field(default_factory=StopWhen)
    missing: MissingPolicy = field(default_factory=MissingPolicy)
    guard: Guard = Guard("watch")  # noqa: RUF009 - a frozen value
    loaded_code: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a TOML file, apply overrides of the form ``key.path=value``, and check the result.

        Relative paths of data are taken from the folder of the file, and code of one's own is
        looked for there first.
        """
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError([f"{path} is not a TOML file: {error}"]) from error
        for override in overrides:
            apply_override(table, override)
        return cls.from_dict(table, base=path.parent)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], base: Path | None = None) -> Self:
        """Check a table as a TOML file in ``base`` would hold it, and fill in the defaults."""
        checker, plain = Checker(base, {"algorithm": open_step}), settings(Plain)
        known = (*plain, *CHOSEN, *RECORDS)
        for key in table:
            if key not in known:
                checker.problem(key, unknown("setting or table", key, known))
        resolved = checker.table(plain, {k: table[k] for k in plain if k in table}, "")
        table = {**table, "guard": complete_guard(table.get("guard", {}), "watch")}
        for key in CHOSEN:
            resolved[key] = _chosen(checker, key, table.get(key, {}))
        for key, record in RECORDS.items():
            resolved[key] = checker.table(settings(record), table.get(key, {}), key)
        find_metrics(checker, resolved["evaluate"])
        checker.raise_problems()
        if base is not None:
            resolved["data"] = _absolute(resolved["data"], base)
            resolved["model"] = _absolute_features(resolved["model"], base)
        code = tuple(checker.code.items())
        return cls(**{**resolved, **_constructed(resolved)}, loaded_code=code)

    def to_dict(self) -> Table:
        """Return the configuration as a TOML file holds it; :meth:`from_dict` reads it back."""
        tables = {key: getattr(self, key) for key in CHOSEN}
        records = {key: describe_fields(getattr(self, key)) for key in RECORDS}
        plain = {key: getattr(self, key) for key in settings(Plain)}
        plain = {key: value for key, value in plain.items() if value is not None}
        return {**plain, **tables, **records}

    def to_toml(self) -> str:
        """Return the text of a configuration file."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())


def read_data(name: str, overrides: Iterable[str] = ()) -> Table:
    """Return the resolved ``[data]`` table of a data set with overrides of its settings."""
    table: Table = {"name": name}
    for override in overrides:
        apply_override(table, override.removeprefix("data."))
    checker = Checker()
    resolved = _chosen(checker, "data", table)
    checker.raise_problems()
    return resolved


def _chosen(checker: Checker, key: str, value: Any) -> Table:
    section, shared = CHOSEN[key]
    if key == "engine" and isinstance(value, Mapping):
        value = {"name": "auto", **value}
    wanted = settings(shared) if shared else None
    table = checker.choice(SECTIONS[section], value, key, wanted)
    loss = table.get("loss") if key == "model" else None
    if isinstance(loss, str) and loss != AUTO:
        found = checker.find(SECTIONS["losses"], loss, "model.loss")
        table["loss"] = loss if found is None else found[0]
    if key == "model" and isinstance(table.get("features"), dict):
        _find_features(checker, table["features"])
    return table


def _find_features(checker: Checker, features: Table) -> None:
    """Look the module of ``[model.features]`` up, and put the file of own code into its address."""
    of = features.get("of")
    if isinstance(of, str) and is_address(of):
        found = checker.find(SECTIONS["models"], of, "model.features.of")
        features["of"] = of if found is None else found[0]


def is_address(of: str) -> bool:
    """Tell whether a text is ``package.module:Name`` and no path."""
    return ":" in of and not Path(of).exists() and of.rpartition(":")[2].isidentifier()


def find_metrics(checker: Checker, evaluate: Table) -> None:
    """Look the metrics of ``[evaluate]`` up, and put the file of own ones into their address."""
    wanted = evaluate.get("metrics", ())
    for i, name in enumerate(wanted if isinstance(wanted, list | tuple) else ()):
        if isinstance(name, str):
            found = checker.find(SECTIONS["metrics"], name, f"evaluate.metrics[{i}]")
            evaluate["metrics"] = [*evaluate["metrics"]]
            evaluate["metrics"][i] = name if found is None else found[0]


def _constructed(resolved: Table) -> Table:
    """Construct what needs no data, so that what it refuses is known before anything is loaded."""
    checker, records = Checker(), {}
    with checker.collecting():
        construct(Plain, resolved, "")
    for key, record in RECORDS.items():
        with checker.collecting():
            records[key] = construct(record, resolved[key], key)
    for key, (_, shared) in CHOSEN.items():
        with checker.collecting():
            if shared is not None:
                construct(shared, resolved[key], key)
            if key == "algorithm":
                check_guard(build_algorithm(resolved[key]), records.get("guard"))
    checker.raise_problems()
    return records


def complete_guard(given: Any, mode: str) -> Any:
    """Return the table of a guard; a word alone is its mode, and ``mode`` that of none.

    >>> complete_guard("on", "watch"), complete_guard({"cap": 0.3}, "watch")
    ({'mode': 'on'}, {'mode': 'watch', 'cap': 0.3})
    """
    if isinstance(given, str):
        return {"mode": given}
    return {"mode": mode, **given} if isinstance(given, Mapping) else given


def check_guard(algorithm: AnyAlgorithm, guard: Guard | None) -> None:
    """Refuse an algorithm whose weights cannot be bounded as the guard wants it."""
    try:
        guard_algorithm(algorithm, guard or Guard("off"))
    except ValueError as error:
        raise ConfigError([f"guard: {error}"]) from error


def build_algorithm(table: Table, sizes: Sequence[int] | None = None) -> AnyAlgorithm:
    """Return the algorithm of a resolved table; ``sizes`` are the clients' training samples.

    It is constructed when the configuration is checked, and again only if it needs the sizes.
    """
    text = json.dumps(table)
    needed = None if sizes is None or f'"{BY_SIZE}"' not in text else tuple(sizes)
    return _algorithm(text, needed)


@functools.lru_cache(maxsize=16)  # algorithms are values: the same one may serve again
def _algorithm(text: str, sizes: tuple[int, ...] | None) -> AnyAlgorithm:
    algorithm: AnyAlgorithm = choose(SECTIONS["algorithms"], json.loads(text), "algorithm", sizes)
    return algorithm


def _absolute(data: Table, base: Path) -> Table:
    """Return the table with paths that do not depend on where the program is started."""
    wanted = settings(SECTIONS["data"][data["name"]].load())
    paths = [k for k in data if k in wanted and wanted[k].is_path and isinstance(data[k], str)]
    return {**data, **{key: str((base / data[key]).absolute()) for key in paths}}


def _absolute_features(model: Table, base: Path) -> Table:
    features = model.get("features")
    if not isinstance(features, dict) or is_address(features["of"]):
        return model
    return {**model, "features": {**features, "of": str((base / features["of"]).absolute())}}


def apply_override(table: Table, override: str) -> None:
    """Put the value of ``key.path=value`` into a table; the value is TOML, or a bare word.

    >>> table = {"algorithm": {"name": "scaff-pd"}}
    >>> apply_override(table, "algorithm.objective.rho=0.2")
    >>> apply_override(table, "engine.device=cpu")
    >>> table["algorithm"]["objective"], table["engine"]
    ({'rho': 0.2}, {'device': 'cpu'})
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
            raise ConfigError([f"--set {override}: {'.'.join(keys[: i + 1])} is no table"])
        table = inner
    table[keys[-1]] = _toml_value(text.strip(), override)


def _toml_value(text: str, override: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
        if set(parsed) == {"value"}:
            return parsed["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[A-Za-z_./~][^\s\"'\[\]{}=#,]*", text):
            return text
    raise ConfigError([f"--set {override}: {text!r} is not a TOML value; put text in quotes"])
