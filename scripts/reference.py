"""Write the pages of the site that follow from the code: names, settings, commands.

    python -m scripts.reference          # into docs/made, which git ignores

The site's build calls :func:`write_pages`; nothing here is kept, so nothing can be stale.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import typer
from myst_nb.core.read import read_myst_markdown_notebook
from typer.main import get_command

import equifed
from equifed.cli.data import list_settings, walk_settings
from equifed.cli.main import app
from equifed.cli.terminal import EXIT_CODES
from equifed.privacy.clients import Privacy
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import CHOSEN, PRIVACY, RECORDS, Plain
from equifed.runs.init import write_toml
from equifed.runs.schema import settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = DOCS / "made"
SOURCE = "https://github.com/equifed/equifed/blob/main/"
COPIED = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md", "security": "SECURITY.md"}
"""Pages of the repository that are part of the site, too."""

MODULES = {
    "Objectives": "equifed.objectives",
    "Generalisation bounds": "equifed.objectives.generalisation",
    "Step sizes": "equifed.steps",
    "Data": "equifed.data",
    "Numbers about clients": "equifed.metrics",
    "scikit-learn": "equifed.sklearn",
    "Checks for code of your own": "equifed.testing",
    "The contract": "equifed.contract",
}
"""Public modules beside equifed itself, and their titles."""

FURTHER = {
    "More names that pages and docstrings speak of": (
        "equifed.models.losses.weigh_classes",
        "equifed.objectives.capped.with_cap",
        "equifed.steps.certificate.certificate",
        "equifed.steps.automatic.measured_smoothness",
        "equifed.steps.phi.choose_phi",
        "equifed.models.predictor.Predictor",
        "equifed.runs.comparison.Comparison",
        "equifed.runs.config.RunConfig",
        "equifed.training.final_model.Giver",
        "equifed.training.trackers.MLflow",
        "equifed.training.trackers.TensorBoard",
    ),
}


def write_pages(folder: Path = MADE) -> list[Path]:
    """Write all pages, and return them; a page that has not changed keeps its time."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "api.rst": write_api(),
        "configuration.md": write_configuration(),
        "commands.md": write_commands(),
        "gallery.md": write_gallery(folder),
    }
    for name, file in COPIED.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        pages[f"{name}.md"] = redirect_links(text, ROOT, folder)
    for source in sorted((DOCS / "notebooks").glob("[!i]*.md")):
        notebook = read_myst_markdown_notebook(source.read_text(encoding="utf-8"))
        for number, cell in enumerate(notebook.cells):
            cell.id = f"cell-{number}"  # drawn at random, it would differ in every build
        pages[f"{source.stem}.ipynb"] = nbformat.writes(notebook)
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    wanted = {name for names in list_names().values() for name in names}
    for path in (folder / "api").glob("*.rst"):  # of names that are gone
        if path.stem not in wanted:
            path.unlink()
    return [folder / name for name in pages]


def write_gallery(folder: Path) -> str:
    """Return a page with every picture of the site, and the page that explains it."""
    shown: dict[str, str] = {}
    for page in [*sorted(DOCS.glob("*/*.md")), *sorted(DOCS.glob("*.md"))]:
        if page.is_relative_to(MADE):
            continue
        text = page.read_text(encoding="utf-8")
        title = text.partition("# ")[2].partition("\n")[0]
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", text):
            path = relative((page.parent / target).resolve(), folder)
            lines = f"![{words}]({path})", f"{words} [{title}]({relative(page, folder)})"
            shown.setdefault(path, "\n\n".join(lines))
    return "# Gallery\n\n" + "\n\n".join(shown.values()) + "\n"


# -- names ----------------------------------------------------------------------------------------


def list_names() -> dict[str, list[str]]:
    """Return the public classes and functions by title, each under one name."""
    algorithms = equifed._algorithms()
    own = [n for n in equifed.__all__ if n not in {*algorithms, *equifed._FOLDERS, "__version__"}]
    groups = {
        "Data, training, runs": [f"equifed.{name}" for name in own],
        "Algorithms": [f"equifed.{name}" for name in sorted(algorithms)],
    }
    for title, module in MODULES.items():
        found = importlib.import_module(module)
        here = [name for name, thing in vars(found).items() if _is_from(thing, module, name)]
        groups[title] = [
            f"{module}.{name}"
            for name in getattr(found, "__all__", here)
            if name not in equifed.__all__ and _has_page(getattr(found, name))
        ]
    return {**groups, **{title: list(names) for title, names in FURTHER.items()}}


def _is_from(thing: Any, module: str, name: str) -> bool:
    return getattr(thing, "__module__", None) == module and not name.startswith("_")


def _has_page(thing: Any) -> bool:
    return inspect.isclass(thing) or inspect.isroutine(thing)


def write_api() -> str:
    """Return the page of all public names; autosummary writes a page for each."""
    lines = ["API", "===", "", "``import equifed as ef``; every name below has a page.", ""]
    for title, names in list_names().items():
        lines += [title, "-" * len(title), ""]
        if title in MODULES:
            about = inspect.getdoc(importlib.import_module(MODULES[title])) or ""
            lines += [f"``{MODULES[title]}``: {about.splitlines()[0]}", ""]
        lines += [
            ".. autosummary::",
            "   :toctree: api",
            "   :nosignatures:",
            "",
            *(f"   {n}" for n in names),
            "",
        ]
    return "\n".join(lines)


# -- settings -------------------------------------------------------------------------------------


def write_configuration() -> str:
    """Return the page of all settings of a configuration file."""
    lines = [
        "# Configuration",
        "",
        "A run is one TOML file: `equifed run FILE.toml`. What has a default may be left out; the "
        "run folder's `config.toml` has everything filled in. `--set KEY=VALUE` changes a setting "
        'for one run. Wherever a name of this page stands, `"module:Name"` of your own code can.',
        "",
        *_tabulate("Outside the tables", list_record(Plain)),
    ]
    for key, record in RECORDS.items():
        about = (inspect.getdoc(record) or "").splitlines()[0]
        lines += [*_tabulate(f"`[{key}]`", list_record(record), about)]
    rows = list(walk_settings(PRIVACY, Privacy, {}))
    lines += _tabulate("`[privacy]`", rows, (inspect.getdoc(Privacy) or "").splitlines()[0])
    tables = {section: f"[{key}]" for key, (section, _) in CHOSEN.items()}
    for section, entries in SECTIONS.items():
        where = tables.get(section, "")
        lines += [f"## {section.capitalize()}" + (f": `{where}`" if where else ""), ""]
        for name, entry in entries.entries().items():
            source = f" ({entry.paper})" if entry.paper else ""
            about = f"{entry.summary}{source}"
            lines += _tabulate(f"`{name}`", list_settings(section, name), about, depth=3)
    return "\n".join(lines)


def list_record(record: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return the settings of a table without a name, as ``list_settings`` does."""
    return list(walk_settings(settings(record), record, {}))


def _tabulate(
    title: str, rows: list[dict[str, Any]], about: str = "", depth: int = 2
) -> Iterator[str]:
    yield from (f"{'#' * depth} {title}", "")
    if about:
        yield from (_escape(about).rstrip(".") + ".", "")
    if not rows:
        return
    yield from ("| setting | type | default | meaning |", "|---|---|---|---|")
    for row in rows:
        default = (
            "required" if row["required"] else f"`{' '.join(write_toml(row['default']).split())}`"
        )
        default = "" if default == "``" else default
        cells = f"`{row['setting']}`", f"`{row['type']}`", default, _escape(row["meaning"])
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
    yield ""


def _escape(text: str) -> str:
    """Return text whose signs Markdown leaves alone."""
    return re.sub(r"([\\*_\[\]<>$])", r"\\\1", text)


# -- commands -------------------------------------------------------------------------------------


def walk_commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return every command with the words that call it."""
    yield from _walk(get_command(app), ())


def _walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _walk(inner, (*words, name))
    else:
        yield words, command


def write_commands() -> str:
    """Return the page of all commands, their arguments and options."""
    lines = ["# Command line", "", _escape(EXIT_CODES), ""]
    for words, command in walk_commands():
        context = typer.Context(command, info_name=" ".join(("equifed", *words)))
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## `equifed {' '.join(words)}`", "", _escape(inspect.cleandoc(command.help))]
        lines += ["", "```console", f"$ equifed {' '.join(words)} {usage}", "```", ""]
        rows = [_describe(parameter) for parameter in command.params]
        rows = [row for row in rows if row[0] != "`--help`"]
        if rows:
            lines += ["| | default | |", "|---|---|---|"]
            lines += ["| " + " | ".join(c.replace("|", r"\|") for c in row) + " |" for row in rows]
            lines.append("")
    return "\n".join(lines)


def _describe(parameter: Any) -> tuple[str, str, str]:
    option = parameter.param_type_name == "option"
    names = [*parameter.opts] if option else [(parameter.name or "").upper()]
    default = parameter.default
    shown = "" if default is None or default is False or callable(default) else f"`{default}`"
    if parameter.required:
        shown = "required"
    words = _escape(getattr(parameter, "help", None) or "")
    return ", ".join(f"`{name}`" for name in names), shown, words


# -- links ----------------------------------------------------------------------------------------


def redirect_links(text: str, folder: Path, to: Path) -> str:
    """Return a page of ``folder`` for the site's folder ``to``: links inside the site, or absolute.

    A link to a file that is no page of the site leads to the repository.
    """
    pages = {(ROOT / file).resolve(): MADE / f"{name}.md" for name, file in COPIED.items()}

    def redirect(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        file = (folder / target).resolve()
        if not file.exists():
            return found[0]  # the build says that it is broken
        page = pages.get(file, file)
        if page.is_relative_to(DOCS) and page.suffix in (".md", ".rst", ".svg", ".png"):
            return f"]({relative(page, to)}{anchor})"
        return f"]({SOURCE}{file.relative_to(ROOT)}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", redirect, text)


def relative(page: Path, folder: Path) -> str:
    """Return the path from a folder to a page."""
    return Path(os.path.relpath(page, folder)).as_posix()


def main() -> None:
    """Write all pages."""
    for path in write_pages():
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
