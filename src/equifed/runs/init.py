"""Before a run: examples, a first configuration, what a run will take; a schema for editors."""

from __future__ import annotations

import os
import shutil
import sys
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from equifed.contract import Evaluation, Vector
from equifed.data.infer import Guess
from equifed.data.site_table import TableSettings
from equifed.runs.build import build_run
from equifed.runs.candidates import Choice, Point
from equifed.runs.catalogue import KINDS, SECTIONS
from equifed.runs.config import CHOSEN, PRIVACY, RECORDS, Plain, RunConfig
from equifed.runs.schema import AUTO, BY_SIZE, NONE, Setting, Table, settings
from equifed.training.final_model import StopWhen

PACKAGE = Path(__file__).parents[1]


def find_examples() -> Path:
    """Return the folder of the examples: inside an installed package, or of its clone."""
    for folder in (PACKAGE / "examples", PACKAGE.parents[1] / "examples"):
        if (folder / "three-clients.toml").exists():
            return folder
    raise FileNotFoundError(
        "The examples are not part of this installation; they are in the repository, "
        "https://github.com/equifed/equifed, in the folder examples."
    )


def copy_examples(out: Path, overwrite: bool) -> list[Path]:
    """Copy all examples into a folder, and return the new files."""
    source = find_examples()
    originals = [path for path in sorted(source.iterdir()) if path.is_file()]
    files = [out / path.name for path in originals]
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} is where the examples come from; choose another folder.")
    if not overwrite and (there := [path for path in files if path.exists()]):
        raise ValueError(f"{there[0]} already exists; give --overwrite, or another folder.")
    out.mkdir(parents=True, exist_ok=True)
    for original, path in zip(originals, files, strict=True):
        shutil.copyfile(original, path)
    return files


# -- a first configuration -------------------------------------------------------------------------

FIRST = """\
# Made for {table}. Train, look at the report, then change what you know better:
#
#     equifed run {out} --dry-run      what it will take
#     equifed run {out}
#
# Settings that are left out have their defaults; the run folder's config.toml shows them all.

seed = 0           # of every draw: who is held out, the model's start
rounds = 200

[data]
name = "table"
path = {path}
client = {client}     # whose row it is
target = {target}     # what is predicted
task = {task}
features = {features}
{more}
# Rows of every client that are held out, to measure the model on:
[data.holdout]
test = 0.25
validation = 0.0

# How columns become features; fitted on training rows, kept in the run folder.{remarks}
[data.prepare]
scale = "standard"        # mean 0 and deviation 1; or "none"
missing = "indicator"     # gaps: the mean and a 0/1 column; or "mean", "drop", "error"
categorical = {categorical}      # columns of numbers that are codes; text always is
numeric = {numeric}              # columns in which any text is a gap
unknown = "other"         # categories that no training row has; or "error"
min_count = 5             # rarer categories go to other
per_client = false        # true: scale every client by its own numbers

# Model and objective are what `equifed fit` chooses on held-out rows (models that single clients
# keep for themselves apart).{choice}
[model]
{settings}

[algorithm]
name = "fair-newton"      # second-order steps, for linear models; equifed list algorithms

# What is minimised: the average of the clients' losses, or (chi-square) the worst one minus a
# penalty that keeps the weights near equal ones (rho = 0: worst case; large: the average).
#     equifed compare {out} --over algorithm.objective.name=average,worst-case
[algorithm.objective]
{objective}

[evaluate]
every = 1                 # rounds between two evaluations

# Training ends when it is proved to be this near to the smallest objective there is (0.1 %).
[stop]
at_relative_gap = 0.001
"""


def write_first_config(guess: Guess, table: Path, out: Path, choice: Choice | None = None) -> str:
    """Return the text of a configuration file at ``out`` for a table, as it was guessed to be."""
    point = Point(1e-3) if choice is None else choice.point
    own = {"own": "bias", "own_l2": point.own_l2} if point.own_l2 is not None else {}
    fair = {"name": "average"} if point.rho is None else {"name": "chi-square", "rho": point.rho}
    name, loss = ("logistic", "auto") if guess.task == "classification" else ("linear", "squared")
    name, loss = (name, loss) if choice is None else choice.model
    lists = [{"name": name, "loss": loss, "l2": point.l2, **own}, fair]
    model, objective = ("\n".join(f"{k} = {write_toml(v)}" for k, v in d.items()) for d in lists)
    coded = guess.categorical if guess.categorical == "auto" else list(guess.categorical)
    path = table.absolute()
    with suppress(ValueError):  # else it is on another drive
        path = Path(os.path.relpath(path, out.absolute().parent))
    return FIRST.format(
        table=table.name, out=out.name, path=write_toml(path.as_posix()),
        client=write_toml(guess.client), target=write_toml(guess.target),
        task=write_toml(guess.task), features=write_toml(list(guess.features)),
        more="".join(f"{line}\n" for line in _describe_columns(guess)),
        remarks="".join(f"\n{_comment(remark)}" for remark in guess.remarks),
        categorical=write_toml(coded), numeric=write_toml(list(guess.numeric)),
        settings=model, objective=objective,
        choice="" if choice is None else f"\n{_comment(str(choice))}",
    )  # fmt: skip


def _describe_columns(guess: Guess) -> Iterator[str]:
    """Return what else there is to say about columns: those left out, groups, dates."""
    if guess.left_out:
        yield "# Left out, because each of them seems to be no feature:"
    for name, reason in guess.left_out.items():
        yield _comment(f"{name}: {reason}")
    for group in guess.groups[:1]:
        yield f"keep_together = {write_toml(group)}    # all rows of one {group} stay in one split"
    for date in [n for n, reason in guess.left_out.items() if reason.startswith("dates")][:1]:
        instead = "; in place of keep_together" if guess.groups else ""
        hint = f"# hold out every client's latest rows, not random ones{instead}"
        yield f"# time = {write_toml(date)}    {hint}"


def _comment(text: str) -> str:
    return "#   " + " ".join(text.split())


def write_toml(value: Any) -> str:
    """Return a value as a configuration has it; a table of a name alone is its name."""
    import tomli_w

    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {write_toml(entry)}" for key, entry in value.items())
        return f"{{ {inner} }}" if set(value) != {"name"} else write_toml(value["name"])
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(write_toml, value))}]"
        if len(text) <= 90:
            return text
    return "" if value is None else tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


# -- what it will take -----------------------------------------------------------------------------

TRIED = 3  # rounds that are run, and thrown away, to measure


def estimate(config: RunConfig) -> dict[str, Any]:
    """Build a run, try its first rounds, and say what all of it takes. Nothing is written."""
    start = time.perf_counter()
    built = build_run(config)
    loaded = time.perf_counter() - start
    tried = min(TRIED, config.rounds)
    often, spent = replace(config.evaluate, every=1), list[float]()

    def watch(x: Vector) -> list[Evaluation]:
        """Evaluate as the run would, and look at the clock."""
        began, given = time.perf_counter(), built.evaluate
        found = given(x) if callable(given) else built.clients.evaluate(x, given)
        spent.append(time.perf_counter() - began)
        return found

    short = replace(built.config, rounds=tried, evaluate=often, stop=StopWhen())
    history = replace(built, config=short, evaluate=watch).train()
    first, *others = history.rounds
    usual = others[-1] if others else first  # the first may have measured step sizes
    left = config.rounds - 1
    seconds = first.seconds + left * min(r.seconds for r in others or [first])
    seconds += min(spent, default=0.0) * (1 + config.rounds // config.evaluate.every)
    memory = None
    with suppress(ImportError):  # not on Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        memory = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return {
        "clients": len(built.federation),
        "samples": {label: len(split) for label, split in built.federation.splits().items()},
        "parameters": sum(p.numel() for p in (history.parameters or {}).values()),
        "rounds": config.rounds, "exchanges": first.exchanges + left * usual.exchanges,
        "bytes_up": first.bytes_up + left * usual.bytes_up,
        "bytes_down": first.bytes_down + left * usual.bytes_down, "memory": memory,
        "seconds_to_build": loaded, "minutes": seconds / 60, "tried": tried,
    }  # fmt: skip


def describe_estimate(found: dict[str, Any]) -> str:
    """Return an estimate in the lines that a person reads."""
    held = ", ".join(f"{label} {count:,}" for label, count in found["samples"].items())
    memory = "not known here" if found["memory"] is None else f"{found['memory'] / 1e6:.0f} MB"
    return f"""\
clients     {found["clients"]}; samples: {held}
model       {found["parameters"]:,} parameters
rounds      {found["rounds"]} at most, {found["exchanges"]:,} exchanges with the clients
traffic     {found["bytes_up"] / 1e6:.3g} MB up, {found["bytes_down"] / 1e6:.3g} MB down, \
all clients and rounds together, in a real federation
memory      {memory} of this process, its largest so far
time        {found["minutes"]:.2g} minutes in one process, measured in {found["tried"]} round(s); \
loading took {found["seconds_to_build"]:.1f} s"""


# -- the JSON schema of configuration files, for editors that complete and check TOML --------------


TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
TEXT: Table = {"type": "string"}
OWN_CODE = {"type": "string", "pattern": ":"}
NUMBER: Table = {"type": "number"}
SAMPLE: Table = {"type": "string", "pattern": "^(bool|int|float)( [1-9][0-9]*( x [1-9][0-9]*)*)?$"}
ARRAYS: Table = {  # [data] of an app whose sites give arrays
    "type": "object",
    "properties": {
        "classes": {"type": "integer"},
        "arrays": {"type": ["object", "array"], "additionalProperties": SAMPLE, "items": SAMPLE},
        "pad": {"type": ["number", "object"], "additionalProperties": NUMBER},
        "mask": {"type": "string"},
    },
    "additionalProperties": False,
}


def make_schema(app: bool = False) -> Table:
    """Return the schema of files of ``equifed run`` and ``equifed compare``, or of a Flower app.

    It knows every name and setting; ranges, and what fits together, are checked when a file is
    read.
    """
    plain: Table = {key: _value(setting) for key, setting in settings(Plain).items()}
    chosen: Table = {key: {"$ref": f"#/$defs/{section}"} for key, (section, _) in CHOSEN.items()}
    records = {key: _table(settings(record)) for key, record in RECORDS.items()}
    records |= {"privacy": _table(PRIVACY), "guard": {"anyOf": [TEXT, records["guard"]]}}
    usual = SECTIONS["engines"]["auto"].load()
    chosen["engine"] = {"anyOf": [chosen["engine"], _table(settings(usual))]}
    if app:  # data of the sites' own have no name
        chosen["data"] = {"anyOf": [chosen["data"], _table(settings(TableSettings)), ARRAYS]}
    tables = plain | chosen | records
    variants = {"type": "object", "additionalProperties": {"type": "object", "properties": tables}}
    used = dict.fromkeys([*(section for section, _ in CHOSEN.values()), *KINDS.values()])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "equifed: a run, or a comparison", "type": "object",
        "properties": tables | {"variants": variants}, "additionalProperties": False,
        "$defs": {section: _section(section) for section in used},
    }  # fmt: skip


def _table(wanted: Mapping[str, Setting], *names: str) -> Table:
    """Return the schema of a table with these settings and no others."""
    held: Table = {name: {} for name in names} | {key: _value(s) for key, s in wanted.items()}
    return {"type": "object", "properties": held, "additionalProperties": False}


def _section(section: str) -> Table:
    """Return the schema of a table with a name: a known one with its settings, or your code."""
    kind = SECTIONS[section]
    shared = next((record for name, record in CHOSEN.values() if name == section), None)
    common = settings(shared) if shared else {}
    rules = []
    for name, entry in kind.entries().items():
        about: Table = {"properties": {"name": {"const": name}}, "required": ["name"]}
        wanted = {**common, **settings(entry.load(), kind.given)}
        rules.append({"if": about, "then": _table(wanted, "name")})
    names: Table = {"anyOf": [{"enum": list(kind.entries())}, *([OWN_CODE] if kind.code else [])]}
    table = {"type": "object", "properties": {"name": names}, "required": ["name"], "allOf": rules}
    return {"anyOf": [names, table]}


def _value(setting: Setting) -> Table:
    """Return the schema of one setting."""
    if setting.section is not None:
        found: list[Table] = [{"$ref": f"#/$defs/{setting.section}"}]
        if isinstance(setting.default, Mapping) and "name" in setting.default:
            kind = SECTIONS[setting.section]
            usual = kind[setting.default["name"]].load()  # a table without its name
            found.append(_table(settings(usual, kind.given)))
    elif setting.record is not None:
        found = [_table(settings(setting.record))]
    else:
        found = [_type(part) for part in setting.parts if part is not NoneType]
    if setting.takes_none:
        found.append({"const": NONE})
    if setting.name == "lr":
        found.append({"const": AUTO})
    if tuple[float, ...] in setting.parts:
        found.append({"const": BY_SIZE})
    return found[0] if len(found) == 1 else {"anyOf": found}


def _type(annotation: Any) -> Table:
    """Return the schema of a plain type; anything else is not checked."""
    if annotation in TYPES:
        return {"type": TYPES[annotation]}
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return {"enum": list(inside)}
    if origin in (UnionType, typing.Union):
        return {"anyOf": [_type(part) for part in inside if part is not NoneType]}
    if origin in (tuple, list, Sequence):
        same = len(inside) == 1 or inside[-1] is Ellipsis
        items: Table = {"items": _type(inside[0])} if same else {
            "prefixItems": [_type(part) for part in inside],
            "minItems": len(inside), "maxItems": len(inside),
        }  # fmt: skip
        return {"type": "array", **items}
    return {"type": "object"} if origin in (dict, Mapping) else {}
