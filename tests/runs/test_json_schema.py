"""The schema that editors take: what the reader takes passes it, unknown names do not."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.cli.test_cli import equifed

from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.runs.init import make_schema
from equifed.runs.schema import settings

jsonschema = pytest.importorskip("jsonschema")
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
SCHEMA = make_schema()
CHECK = jsonschema.Draft202012Validator(SCHEMA)
USED = [(section, name) for section in SCHEMA["$defs"] for name in SECTIONS[section].entries()]
PLAIN = {"rounds": 2, "data": "heart-disease", "model": "logistic", "algorithm": "fedavg"}

CHI = {"name": "chi-square", "rho": 0.2}


def test_the_command_prints_a_valid_schema():
    printed = json.loads(equifed("schema").stdout)
    assert printed == json.loads(json.dumps(SCHEMA))
    jsonschema.Draft202012Validator.check_schema(printed)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_pass_and_their_misspelt_keys_do_not(path):
    table = tomllib.loads(path.read_text("utf-8"))
    CHECK.validate(table)
    places = [("rounds",), ("model", "l2"), ("evaluate", "every")]
    wrong = 0
    for *inside, key in places:
        changed = copy.deepcopy(table)
        part = changed[inside[0]] if inside and inside[0] in changed else changed
        if key in part and ":" not in part.get("name", ""):
            part[key + "x"] = part.pop(key)
            assert not CHECK.is_valid(changed), key
            wrong += 1
    assert wrong


@pytest.mark.parametrize(("section", "name"), USED, ids="-".join)
def test_defaults_of_every_name_pass_and_an_unknown_setting_does_not(section, name):
    part = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{section}", "$defs": SCHEMA["$defs"]})
    wanted = settings(SECTIONS[section][name].load(), SECTIONS[section].given)
    usual = {key: s.default for key, s in wanted.items() if s.default is not None}
    part.validate(json.loads(json.dumps({"name": name, **usual})))
    assert not part.is_valid({"name": name, **usual, "unknwon": 1})


@pytest.mark.parametrize(
    "more",
    [
        {"algorithm": {"name": "scaff-pd", "objective": CHI, "steps": {}, "local": {"lr": "auto"}}},
        {"algorithm": {"name": "nets:Mine", "anything": 1}},
        {"guard": "on", "engine": {"device": "cpu"}, "threads": 2},
        {"data": {"name": "heart-disease", "holdout": {"validation": 0.2}}},
    ],
)
def test_short_forms_pass(more):
    CHECK.validate(PLAIN | more)


@pytest.mark.parametrize(
    "more",
    [
        {"rounds": "many"},
        {"algorithm": "fedavgg"},
        {"algorithm": {"name": "fedavg", "local": {"lrr": 0.1}}},
        {"model": {"name": "logistic", "dtype": "float16"}},
        {"engine": {"devise": "cpu"}},
        {"variants": {"a": {"rounds": "many"}}},
    ],
)
def test_what_the_reader_refuses_fails(more):
    assert not CHECK.is_valid(PLAIN | more)


ROOT = Path(__file__).parents[2]
APP = jsonschema.Draft202012Validator(make_schema(app=True))
PAGES = [
    (path.name, block)
    for path in (ROOT / "docs" / "deploy-tables.md", ROOT / "docs" / "reference" / "samples.md")
    for block in re.findall(r"^```toml\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)
    if block.startswith("[data]")
]


def test_the_files_of_apps_pass_a_schema_of_their_own():
    template = ROOT / "src" / "equifed" / "flower" / "template" / "equifed.toml.in"
    APP.validate(tomllib.loads(template.read_text("utf-8").replace("{data}", "penguins")))
    assert len(PAGES) == 2
    for name, block in PAGES:
        table = {**PLAIN, **tomllib.loads(block)}
        APP.validate(table)
        assert not CHECK.is_valid(table), name
        (key, *_) = table["data"]
        odd = {**table["data"], key + "x": table["data"][key]}
        assert not APP.is_valid({**table, "data": odd}), name
    wrong = {"arrays": {"a": "int64 3"}}, {"arrays": ["int 0"]}, {"pad": {"a": "x"}}
    assert not any(APP.is_valid({**PLAIN, "data": data}) for data in wrong)
    printed = json.loads(equifed("schema", "--app").stdout)
    assert printed == json.loads(json.dumps(make_schema(app=True)))


def test_a_resolved_configuration_passes():
    config = RunConfig.from_dict({**PLAIN, "algorithm": {"name": "scaff-pd", "objective": CHI}})
    CHECK.validate(json.loads(json.dumps(config.to_dict())))
