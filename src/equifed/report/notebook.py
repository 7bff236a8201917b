"""A run as a notebook shows it."""

from __future__ import annotations

from markupsafe import Markup, escape

from equifed.report.clients import client_rows, ordered
from equifed.report.methods import as_methods
from equifed.report.scales import DASH, Scale, plural
from equifed.training.history import History

MOST_ROWS = 20


def history_table(history: History) -> str:
    """Return a table of the clients, the worst served first."""
    rounds = plural(len(history.rounds), "round")
    head = f"{plural(len(history.names), 'client')}, {rounds}"
    chosen = history.main_metric()
    if chosen is None:
        return str(Markup("<p>{}; not evaluated.</p>").format(head))
    scale, method = Scale(*chosen), as_methods(history)[0]
    rows = client_rows(method, scale)
    order = ordered(rows, scale)
    lines = [
        Markup("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>").format(
            history.names[i],
            scale.text(float(rows.value[i])),
            scale.span(rows.lower[i], rows.upper[i]) if rows.lower[i] >= 0 else DASH,
            int(rows.sizes[i]),
        )
        for i in order[:MOST_ROWS]
    ]
    rest = len(order) - MOST_ROWS
    more = f", the worst served {MOST_ROWS} of them shown" if rest > 0 else ", worst served first"
    columns = Markup("").join(
        Markup("<th>{}</th>").format(c) for c in ("client", scale.label, "95 % interval", "samples")
    )
    return str(
        Markup(
            "<table><caption>{}</caption><thead><tr>{}</tr></thead><tbody>{}</tbody></table>"
        ).format(escape(head + more), columns, Markup("").join(lines))
    )
