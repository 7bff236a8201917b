r"""Formulas of the site as MathML, by docutils, which reads arguments without braces differently.

TeX takes the next *token* as an argument: ``\tfrac12`` is one half and ``x^12`` is x to the one,
followed by a 2. docutils takes the number 12. So braces are set first.
"""

from __future__ import annotations

import re

from docutils.utils.math.latex2mathml import tex2mathml

ACCENTS = ("bar", "tilde", "hat", "overline")
ARGUMENTS = {"frac": 2, "tfrac": 2, "dfrac": 2, "mathbf": 1, "mathrm": 1, "text": 1, "sqrt": 1}
ARGUMENTS |= dict.fromkeys(ACCENTS, 1)
"""Commands, and how many arguments they take."""

TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|[^\\\s]", flags=re.DOTALL)


def convert(tex: str, *, block: bool) -> str:
    """Return a formula as MathML; lines of an aligned one stand below each other."""
    tex = tex.replace(r"\textstyle", "").replace(r"\dots", r"\ldots").strip()
    tex = re.sub(r"\\rm (\w+)", r"\\mathrm{\1}", re.sub(r"\\[Bb]ig(?![lr])", "", tex))
    if r"\\" in tex and r"\begin" not in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    made = str(tex2mathml(set_braces(tex), as_block=block))
    made = made.replace('<mo stretchy="false">|', '<mo stretchy="false" lspace="0" rspace="0">|')
    if r"\left" in tex:
        return made
    # Without \left, TeX leaves braces as small as they are.
    return re.sub(r'<mo( class="\w+")?>([{}⟨⟩|])</mo>', r'<mo\1 stretchy="false">\2</mo>', made)


def set_braces(tex: str) -> str:
    r"""Return a formula in which every argument has braces.

    >>> set_braces(r"\tfrac12 |x|^2 + \frac\tau2 y_12")
    '\\tfrac{1}{2} |x|^{2} + \\frac{\\tau}{2} y_{1}2'
    >>> set_braces(r"\bar p_i + l_\text{prev}")
    '{{}\\bar{p}}_{i} + l_{\\text{prev}}'
    """
    out, at = [], 0
    while at < len(tex):
        found = re.match(r"\\([A-Za-z]+)|[\^_]", tex[at:])
        if found is None:
            step = 2 if tex[at] == "\\" else 1  # an escaped sign is no command
            out.append(tex[at : at + step])
            at += step
            continue
        at += found.end()
        count = 1 if found[1] is None else ARGUMENTS.get(found[1], 0)
        written = found[0]
        for _ in range(count):
            inner, at = _take_argument(tex, at)
            inner = inner.replace(r"\_", "_") if found[1] == "text" else set_braces(inner)
            written += "{" + inner + "}"
        # Not alone in its braces, or docutils puts a subscript of it below it.
        out.append("{{}" + written + "}" if found[1] in ACCENTS else written)
    return "".join(out)


def _take_argument(tex: str, at: int) -> tuple[str, int]:
    """Return the argument that begins here, without its braces, and where it ends."""
    while at < len(tex) and tex[at].isspace():
        at += 1
    if tex[at : at + 1] != "{":
        found = TOKEN.match(tex, at)
        if found is None:
            raise ValueError(f"an argument is missing at the end of {tex!r}")
        end = found.end()
        for _ in range(ARGUMENTS.get(found[0][1:], 0)):  # as in l_\text{prev}
            end = _take_argument(tex, end)[1]
        return tex[at:end], end
    depth, begin = 0, at
    while True:
        if at >= len(tex):
            raise ValueError(f"a brace is not closed in {tex!r}")
        if tex[at] == "\\":
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(tex[at], 0)
        at += 1
        if depth == 0:
            return tex[begin + 1 : at - 1], at
