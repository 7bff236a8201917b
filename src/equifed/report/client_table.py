"""The table of clients: what the page's script shows, and the same as CSV."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from equifed.contract.arrays import Losses
from equifed.report.document import Report
from equifed.report.figures import csv_text
from equifed.report.more import Column
from equifed.report.scales import DASH, Scale
from equifed.report.tables import COLUMNS, to_json_number


def pack_clients(report: Report) -> dict[str, Any]:
    """Return what the page's script needs for the table of clients and for the names on hover."""
    data: dict[str, Any] = {"clients": list(report.methods[0].clients), "methods": []}
    data["lead"], data["baseline"] = report.lead, report.baseline
    if report.scale is None:
        return data
    scale = report.scale
    data |= {"limits": shows_limits(report), "higher": scale.higher_is_better}
    data["label"] = scale.label
    data["n"] = [int(n) for n in report.rows[0].sizes]
    heads = list_heads(report)
    data["more"] = [key for key, _ in heads]
    data["loss"] = shows_loss(report)
    base = report.rows[report.baseline]
    for m, (method, rows) in enumerate(zip(report.methods, report.rows, strict=True)):
        columns = {
            "value": rows.value, "lower": rows.lower, "upper": rows.upper, "loss": rows.loss,
            "weight": rows.weight, "participation": rows.participation,
            "change": _subtract(rows.value, base.value),
        }  # fmt: skip
        packed: dict[str, Any] = {
            k: [to_json_number(v) for v in column] for k, column in columns.items()
        }
        packed["quarantines"] = [int(q) for q in rows.quarantines]
        packed["text"] = _write_columns(columns, scale)
        packed["more"] = _pack_more(report.columns[m], [key for key, _ in heads], len(rows.value))
        data["methods"].append({"name": method.name, **packed})
    return data


def list_heads(report: Report) -> list[tuple[str, str]]:
    """Return key and label of every further column that some method has."""
    return list({c.key: c.label for columns in report.columns for c in columns}.items())


def shows_loss(report: Report) -> bool:
    """Tell whether the loss is another number than the main metric."""
    return report.scale is not None and report.scale.metric not in ("loss", "mse")


def shows_limits(report: Report) -> bool:
    """Tell whether some client's main metric has limits."""
    return any(bool(np.isfinite(rows.lower).any()) for rows in report.rows)


def _pack_more(columns: list[Column], keys: list[str], n: int) -> dict[str, dict[str, Any]]:
    known = {column.key: column for column in columns}
    nothing = {"value": [None] * n, "text": [DASH] * n, "limits": [""] * n}
    return {
        key: nothing if key not in known else {
            "value": [to_json_number(v) for v in known[key].values],
            "text": list(known[key].texts),
            "limits": list(known[key].limits),
        }
        for key in keys
    }  # fmt: skip


def _subtract(values: Losses, baseline: Losses) -> Losses:
    out: Losses = np.full(values.shape, np.nan)
    both = np.isfinite(values) & np.isfinite(baseline)
    np.subtract(values, baseline, out=out, where=both)
    return out


def _write_columns(columns: dict[str, Losses], scale: Scale) -> dict[str, list[str]]:
    """Write the table's numbers here, as everywhere else: two ways to round would show two."""
    limits = zip(columns["lower"], columns["upper"], strict=True)
    loss = Scale("loss", "")
    return {
        "value": [scale.text(v) for v in columns["value"]],
        "limits": [scale.span(a, b) if math.isfinite(a) else DASH for a, b in limits],
        "change": [scale.signed(v) for v in columns["change"]],
        "loss": [loss.text(v) for v in columns["loss"]],
        "weight": [f"{v:.4f}" if math.isfinite(v) else DASH for v in columns["weight"]],
        "participation": [
            f"{100 * v:.0f} %" if math.isfinite(v) else DASH for v in columns["participation"]
        ],
    }


def write_clients_csv(report: Report) -> str:
    """Return the table of clients as CSV."""
    shown = "value" if report.scale is None else report.scale.metric
    columns = ["method", "client", shown, "lower_95", "upper_95", "loss", "n", *COLUMNS[5:]]
    heads = [key for key, _ in list_heads(report)]
    more = [{c.key: c.values for c in found} for found in report.columns]
    rows = (
        [
            method.name,
            client,
            *(_plain(getattr(found, name)[i]) for name in COLUMNS),
            *(float(more[m][key][i]) if key in more[m] else math.nan for key in heads),
        ]
        for m, (method, found) in enumerate(zip(report.methods, report.rows, strict=False))
        for i, client in enumerate(method.clients)
    )
    return csv_text([*columns, *heads], rows)


def _plain(value: Any) -> object:
    return int(value) if isinstance(value, np.integer) else float(value)
