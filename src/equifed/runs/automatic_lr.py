"""``lr = "auto"`` in configurations: local step sizes that are measured on the clients.

A configuration that names no local step size gets this one. It is measured once, before the first
round (:func:`equifed.algorithms.with_measured_step`), and written into the resolved configuration,
so that a run's folder says what was used and a resumed run uses the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from equifed.algorithms.measured_step import with_measured_step
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.runs.settings import AUTO, ConfigError, Setting, Table
from equifed.runs.signatures import complete


def open_step(table: Table, wanted: Mapping[str, Setting]) -> Table:
    """Return an algorithm's table with ``"auto"`` where a local step size could be and is not.

    Algorithms with a schedule of their own (SCAFF-PD) are left as they are.
    """
    if "steps" in wanted:
        return table
    if "local" in wanted:
        local = table.get("local", {})
        open_to_us = "local" in table or isinstance(wanted["local"].default, Mapping)
        if open_to_us and isinstance(local, Mapping) and "lr" not in local:
            return {**table, "local": complete({**local, "lr": AUTO}, wanted["local"].default)}
    elif "lr" in wanted and ":" not in table["name"]:  # one's own lr may be that of anything
        return {"lr": AUTO, **table}
    return table


def measure_step(
    table: Table, algorithm: AnyAlgorithm, clients: Clients, seed: int
) -> tuple[Table, AnyAlgorithm]:
    """Return an algorithm and its table with the local step size measured, if it is automatic."""
    if isinstance(table.get("algorithm"), Mapping):  # a wrapper: it is the one inside that steps
        wrapper: Any = algorithm
        inner, core = measure_step(table["algorithm"], wrapper.algorithm, clients, seed)
        return {**table, "algorithm": inner}, replace(wrapper, algorithm=core)
    holder = table.get("local", table)
    if holder.get("lr") != AUTO:
        return table, algorithm
    if not isinstance(getattr(algorithm, "local", None), LocalSGD):
        raise ConfigError([f"algorithm.lr: {table['name']} has no local work; give a number"])
    stream = Stream(seed)
    x = clients.initial(stream.at("initial"))
    while True:
        try:
            algorithm = with_measured_step(algorithm, clients, x, stream.at("measured lr"))
            break
        except MissingClients as lost:  # measured on the others; training will name them
            left = np.setdiff1d(clients.index, np.fromiter(lost.reasons, dtype=np.int64))
            if len(left) == 0:
                raise ConfigError(
                    [f"algorithm.lr: no step size can be measured ({lost}); give a number"]
                ) from lost
            clients = clients.subset(left)
    chosen = {**holder, "lr": algorithm.local.lr}  # type: ignore[attr-defined]
    return ({**table, "local": chosen} if "local" in table else chosen), algorithm
