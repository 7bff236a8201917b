"""The site: ``make docs``. What follows from the code is written by ``scripts/reference.py``."""

import html
import re
import sys
from importlib.metadata import version as find_version
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from sphinx.util import logging

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from scripts import mathml, reference  # noqa: E402 - the repository is on the path now

project, author = "equifed", "The equifed developers"
copyright = "The equifed developers, Apache-2.0"
version = release = find_version("equifed")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_*", "made/*.ipynb"]
templates_path = ["_templates"]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!equifed\b).*"),  # types of others, and words of docstrings
    (r"py:(data|mod)", r"equifed\..*"),  # types and modules without a page
]
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_show_tb = True

autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "equifed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "github_url": "https://github.com/equifed/equifed",
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": []}


# -- formulas as MathML: no script, and nothing is fetched from elsewhere -------------------------


def write_formula(tex, block):
    """Return a formula as MathML; one that cannot be read is a warning."""
    try:
        return mathml.convert(tex, block=block)
    except (MathError, ValueError) as error:
        logging.getLogger(__name__).warning("formula cannot be read: %s: %s", error, tex)
        return html.escape(tex)


def visit_math(self, node):
    """Write a formula inside a line."""
    self.body.append(write_formula(node.astext(), block=False))
    raise nodes.SkipNode


def visit_displaymath(self, node):
    """Write a formula on a line of its own."""
    self.body.append(f'<div class="formula">{write_formula(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def keep_bars(app, what, name, obj, options, lines):
    """Let |x| in a docstring be an absolute value, and no name of a substitution."""
    formula = None  # the indentation of a formula that these lines belong to
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if formula is not None and line.strip() and indent <= formula:
            formula = None
        if line.lstrip().startswith(".. math::"):
            formula = indent
        if formula is None and not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(:math:`[^`]*`|``[^`]*``)", line)
            parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
            lines[number] = "".join(parts)


def skip_member(app, what, name, obj, skip, options):
    """Leave out what scikit-learn adds to its estimators."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def write_pages(app, config):
    """Write what follows from the code before sources are looked for."""
    reference.write_pages()


def redirect_links(app, docname, source):
    """Let links that leave the site lead to the repository."""
    folder = (DOCS / docname).parent
    if not docname.startswith("made/"):
        source[0] = reference.redirect_links(source[0], folder, folder)


def setup(app):
    """Connect."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displaymath, None))
    app.connect("config-inited", write_pages)
    app.connect("source-read", redirect_links)
    app.connect("autodoc-process-docstring", keep_bars)
    app.connect("autodoc-skip-member", skip_member)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
