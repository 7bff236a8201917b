"""The site: it builds without a warning, its code runs, its pictures and settings are complete."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import mathml, pictures, reference
from typer.testing import CliRunner

import equifed as ef
from equifed.cli.main import app
from equifed.runs.catalogue import SECTIONS
from equifed.training.tables import FILES, TABLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = sorted(path for path in (DOCS / "guides").glob("*.md") if path.name != "index.md")
PAGES = [*GUIDES, *sorted((DOCS / "start").glob("*.md")), DOCS / "reference" / "run-folder.md"]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
names = pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Notebooks are executed in it, every link inside leads somewhere."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E"]
    command += ["-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "site" / "index.html").exists()
    assert "<math" in (tmp_path / "site" / "mathematics.html").read_text(encoding="utf-8")
    for notebook in (DOCS / "notebooks").glob("[!i]*.md"):
        page = (tmp_path / "site" / "notebooks" / f"{notebook.stem}.html").read_text("utf-8")
        assert ("cell_output" in page and "image/png" in page) or ".png" in page


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Column:UserWarning")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_code_of_a_page_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    known: dict[str, object] = {}
    for language, body in blocks:
        if language == "python":
            exec(compile(body, str(path), "exec"), known)
            continue
        for line in body.splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            assert words[0] == "equifed", line
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{line}: {done.stderr}"
    assert blocks or path.stem == "index"


@names
def test_a_guide_has_code_a_picture_and_when_not(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert BLOCK.search(text) and IMAGE.search(text)
    assert "\n## When not\n" in text


WITHOUT_RESULT = {
    "equifed.training.trackers.MLflow": "sends to a server",
    "equifed.testing.check_algorithm": "is silent if all is well",
    "equifed.testing.check_engine": "is silent if all is well",
    "equifed.testing.check_objective": "is silent if all is well",
}


def test_public_names_have_an_example_with_a_result() -> None:
    """A result is more than what the constructor was given: it has to be asked for."""
    lacking, parser = {}, doctest.DocTestParser()
    for name in (name for names in reference.list_names().values() for name in names):
        found = parser.get_examples(inspect.cleandoc(pydoc.locate(name).__doc__ or ""))
        if not any(one.want for one in found):
            lacking[name] = "nothing comes out" if found else "no example"
    assert lacking.keys() == WITHOUT_RESULT.keys(), lacking
    assert "no example" not in lacking.values(), lacking


WHOLE = {"mathematics", "pseudo-code", "reproductions", "step-sizes"}
"""Pages that stay in one piece: formulas, all experiments."""


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.stem)
def test_a_page_is_read_at_once(path: Path) -> None:
    """At most 900 words beside code and tables, or it is two pages."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    words = [word for line in text.splitlines() if line[:1] != "|" for word in line.split()]
    made = path.is_relative_to(reference.MADE)
    assert len(words) <= 900 or path.stem in WHOLE or made, f"{path.name}: {len(words)} words"


def test_pictures_are_there_and_have_words() -> None:
    used = set()
    for path in DOCS.rglob("*.md"):
        for words, target in IMAGE.findall(path.read_text(encoding="utf-8")):
            assert len(words.split()) >= 6, f"{path.name}: {target} needs a text for who cannot see"
            assert (path.parent / target).exists(), f"{path.name}: {target}"
            used.add(Path(target).stem)
    there = {path.stem for path in (DOCS / "pictures").glob("*.svg")}
    assert there == set(pictures.PICTURES)
    assert used == there


@pytest.mark.long
def test_a_picture_is_the_same_twice(tmp_path: Path) -> None:
    (path,) = pictures.draw(["masks"], tmp_path)
    first = path.read_bytes()
    pictures.draw(["masks"], tmp_path)
    assert path.read_bytes() == first
    with pytest.raises(SystemExit, match="no picture 'nothing'"):
        pictures.draw(["nothing"], tmp_path)


# -- what follows from the code --------------------------------------------------------------------


def test_the_api_names_all_that_is_public() -> None:
    text = reference.write_api()
    for name in set(ef.__all__) - {*ef._FOLDERS, "__version__"}:
        assert f"   equifed.{name}\n" in text
    listed = [name for group in reference.list_names().values() for name in group]
    assert len(listed) == len(set(listed))


def test_the_configuration_names_every_setting() -> None:
    text = reference.write_configuration()
    for section, entries in SECTIONS.items():
        for name in entries.entries():
            part = text[text.index(f"## {section.capitalize()}") :]
            assert f"\n### `{name}`\n" in part
    for key in ("rounds", "seed", "at_relative_gap", "quorum", "splits", "objective.rho"):
        assert (
            f"`{key}`" in text
            or f".{key.split('.')[-1]}`" in text
            or f"`{key.split('.')[-1]}`" in text
        )


def test_the_commands_name_every_option() -> None:
    text = reference.write_commands()
    for words, command in reference.walk_commands():
        part = text[text.index(f"## `equifed {' '.join(words)}`\n") :]
        part = part[: part.find("\n## ", 3)] if "\n## " in part[3:] else part
        for parameter in command.params:
            if parameter.name != "help":
                name = parameter.opts[0] if parameter.param_type_name == "option" else None
                assert f"`{name or parameter.name.upper()}`" in part


def test_the_page_of_the_run_folder_names_every_file_and_column() -> None:
    text = (DOCS / "reference" / "run-folder.md").read_text(encoding="utf-8")
    for name in (*FILES, "summary.json", "checksums.json"):
        assert f"`{name}`" in text
    for table, columns in TABLES.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{table}` |")]
        assert all(f"`{column}`" in line for column in columns)


def test_arguments_of_formulas_are_those_that_tex_takes() -> None:
    half = mathml.convert(r"\tfrac12 |x|^2", block=False)
    assert "<mn>1</mn><mn>2</mn></mfrac>" in re.sub(r"\s", "", half)
    for tex, wanted in {
        r"\frac1n\sum_i": r"\frac{1}{n}\sum_{i}",
        r"\tfrac\tau2 x^12": r"\tfrac{\tau}{2} x^{1}2",
        r"\{a\}_\varphi": r"\{a\}_{\varphi}",
        r"\text{server\_lr} x": r"\text{server_lr} x",
        r"e^{x_1}": r"e^{x_{1}}",
    }.items():
        assert mathml.set_braces(tex) == wanted
        assert mathml.set_braces(wanted) == wanted  # nothing more to do
    with pytest.raises(ValueError, match="brace is not closed"):
        mathml.set_braces(r"\frac{1")


def test_links_that_leave_the_site_lead_to_the_repository() -> None:
    text = "[a](../SECURITY.md) [b](../examples/hospitals.csv) [c](report.md#the-report) [d](x.md)"
    found = reference.redirect_links(text, DOCS, DOCS)
    assert "[a](made/security.md)" in found and "[c](report.md#the-report)" in found
    assert f"[b]({reference.SOURCE}examples/hospitals.csv)" in found
    assert "[d](x.md)" in found  # broken, which the build says
