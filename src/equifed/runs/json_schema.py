"""The JSON schema of configuration files, for editors that complete and check TOML."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from equifed.runs.catalogue import KINDS, SECTIONS
from equifed.runs.config import CHOSEN, RECORDS, Plain
from equifed.runs.private import PRIVACY
from equifed.runs.schema import AUTO, BY_SIZE, NONE, Setting, Table, settings

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
OWN_CODE = {"type": "string", "pattern": ":"}


def make_schema() -> Table:
    """Return the schema of the files of ``equifed run`` and ``equifed compare``.

    It knows every name and setting; ranges, and what fits together, are checked when a file is
    read.
    """
    plain: Table = {key: _value(setting) for key, setting in settings(Plain).items()}
    chosen: Table = {key: {"$ref": f"#/$defs/{section}"} for key, (section, _) in CHOSEN.items()}
    records = {key: _record(record) for key, record in RECORDS.items()}
    records["privacy"] = _table(PRIVACY)
    records["guard"] = {"anyOf": [{"type": "string"}, records["guard"]]}
    chosen["engine"] = {"anyOf": [chosen["engine"], _table(settings(_load("engines", "auto")))]}
    tables = plain | chosen | records
    variants = {"type": "object", "additionalProperties": {"type": "object", "properties": tables}}
    used = dict.fromkeys([*(section for section, _ in CHOSEN.values()), *KINDS.values()])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "equifed: a run, or a comparison",
        "type": "object",
        "properties": tables | {"variants": variants},
        "additionalProperties": False,
        "$defs": {section: _section(section) for section in used},
    }


def _load(section: str, name: str) -> Any:
    return SECTIONS[section][name].load()


def _table(wanted: Mapping[str, Setting], *names: str) -> Table:
    """Return the schema of a table with these settings and no others."""
    held: Table = {name: {} for name in names} | {key: _value(s) for key, s in wanted.items()}
    return {"type": "object", "properties": held, "additionalProperties": False}


def _record(record: Any) -> Table:
    return _table(settings(record))


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
            usual = _load(setting.section, setting.default["name"])  # a table without its name
            found.append(_table(settings(usual, SECTIONS[setting.section].given)))
    elif setting.record is not None:
        found = [_record(setting.record)]
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
