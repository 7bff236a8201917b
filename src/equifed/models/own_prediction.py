"""Predictions of a model in which every client has parameters of its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from equifed.contract.arrays import Index
from equifed.data.columns import group_rows
from equifed.data.split import DataError

OwnParameters = Mapping[str, Tensor]
"""Own parameters by name, clients first: (N, ...)."""


def check_own(module: nn.Module, own: OwnParameters, clients: Sequence[str]) -> None:
    """Refuse own parameters that are not those of the module and of the clients."""
    held = dict(module.named_parameters(remove_duplicate=False))
    for name, rows in own.items():
        if name not in held:
            raise ValueError(
                f"own: the module has no parameter {name!r}; it has {', '.join(held)}."
            )
        wanted = (len(clients), *held[name].shape)
        if tuple(rows.shape) != wanted:
            raise ValueError(
                f"own: {name} has the shape {tuple(rows.shape)}, expected {wanted}: one row for "
                f"each of {len(clients)} clients; take both from the same run."
            )


def module_of(
    module: nn.Module, own: OwnParameters, clients: Sequence[str], client: str
) -> nn.Module:
    """Return the module with the own part of a client."""
    if client not in clients:
        raise DataError(f"There is no client {client!r}; there are {', '.join(clients[:12])}.")
    found, place = copy.deepcopy(module), clients.index(client)
    with torch.no_grad():
        for name, rows in own.items():  # not by load_state_dict: tied parameters are there twice
            found.get_parameter(name).copy_(rows[place])
    return found


def group_by_module(
    module: nn.Module, own: OwnParameters, clients: Sequence[str], owners: Sequence[str] | None,
    count: int,
) -> Iterator[tuple[nn.Module, Index]]:  # fmt: skip
    """Yield modules and the rows that each answers; strangers get the shared one."""
    if owners is None:
        say_shared(own, "and nobody says whose rows these are (client=NAME)")
        yield module, np.arange(count)
        return
    groups = group_rows(owners) if owners else {}
    warn_of_strangers(own, [name for name in groups if name not in clients])
    for name, mine in groups.items():
        yield module_of(module, own, clients, name) if name in clients else module, mine


def warn_of_strangers(own: OwnParameters, strangers: Sequence[str]) -> None:
    """Say who has no own part; nothing if nobody does."""
    if strangers:
        more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        names = ", ".join(map(repr, strangers[:5]))
        say_shared(own, f"but {names}{more} took no part in training")


def say_shared(own: OwnParameters, why: str) -> None:
    """Warn that nobody's own part is used; Python shows the same words once."""
    warnings.warn(
        f"Clients have own parts ({', '.join(own)}), {why}: the shared model is used, with the "
        "mean of own parts that were trained.",
        UserWarning,
        stacklevel=2,
    )
