"""Privacy as users ask for it."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: F401 - of inherited settings
from dataclasses import dataclass
from typing import Any, Literal  # noqa: F401

from equifed.data.federation import Federation
from equifed.privacy.budget import Bounds
from equifed.privacy.clients import PrivateClients
from equifed.privacy.ledger import Unit  # noqa: F401


@dataclass(frozen=True)
class Privacy(Bounds):
    r"""Differential privacy of every row of a client: bounds that are declared, and a budget.

    Whatever a client says of its rows is clipped row by row and gets Gaussian noise before it
    leaves, so neither the server nor another client is trusted. A ledger
    (``equifed.privacy.ledger.Ledger``) counts the answers; one that would exceed the budget is
    refused.

    An answer with sensitivity D and noise of deviation sigma costs :math:`(D/\sigma)^2` of
    :math:`\mu^2`, which follows from epsilon and delta. A kind of answer with the share s of it,
    asked n times, has :math:`\sigma = D \sqrt{n/s} / \mu`. By default the moments' and the losses'
    shares are a third of those of gradients and of local steps, and a tenth of the losses' where
    losses decide nothing; kinds that are not asked have none.

    Parameters
    ----------
    epsilon, delta : float
        The budget: what may be published. Delta should be far below one over the rows of a client.
    rows : float
        Longer rows of inputs are scaled down to this length. Where one linear layer is trained,
        rows are what it is applied to.
    loss : float
        Losses of single rows are clipped to [0, loss]. The targets of a squared loss are clipped
        to a length of at most its root.
    rounds : int
        Rounds over which the budget is split; runs may have fewer.
    unit : {"record", "person"}
        Whose rows are protected: one row, or up to ``most_rows`` of one person.
    gradient : float, optional
        Longer gradients of single rows are scaled down to this length. Linear models with
        cross-entropy, logistic or squared losses need none; others do.
    shares : mapping of str to float, optional
        Shares of mu^2 by kind: "moments", "losses", "gradients", "steps". Other kinds are refused.
    most_rows : int
        Rows that one person has at most; ``keep_together`` tells persons.
    preparation : {"refused", "public"}
        Scales, fill-ins and categories of a table are read off its rows, which nobody pays for:
        such data are refused unless you declare what they were prepared with to be public.

    Examples
    --------
    >>> import equifed as ef
    >>> privacy = ef.Privacy(epsilon=3.0, rows=8.0, loss=3.0, rounds=10)
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", privacy=privacy)
    >>> history = ef.train(ef.Scaffold(), clients, rounds=10)
    >>> [event["reason"] for event in history.events if event["event"] == "privacy"]
    ['publish epsilon 3 at delta 1e-05 for every record; ... lists what was spent']
    """

    def make_clients(self, data: Federation, *given: Any, **named: Any) -> PrivateClients:
        """Return simulated clients that answer under these bounds."""
        return PrivateClients(data, *given, privacy=self, **named)
