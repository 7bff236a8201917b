"""FedAvg with differential privacy of whole clients: clipped updates, noise at the server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from equifed.algorithms.guard import GuardedClients
from equifed.contract import Clients, Federated, Info, LocalSGD, Stream, Vector
from equifed.contract.absence import scatter
from equifed.contract.local import DEFAULT_WORK
from equifed.privacy.ledger import Entry, Ledger, OverBudget, check_delta, find_factor
from equifed.privacy.noise import SecretNoise, make_noise
from equifed.privacy.site import ROUNDING


@dataclass(frozen=True)
class State:
    """The model, and the rounds that were answered."""

    x: Vector
    rounds: int = 0


@dataclass(frozen=True)
class PrivateFedAvg(Federated):
    r"""FedAvg with differential privacy of whole clients (McMahan et al. 2018).

    .. math::

       x \leftarrow x - \text{server\_lr} \Bigl( \frac{1}{m} \sum_{i \in S}
           \min\bigl(1, \tfrac{C}{|d_i|}\bigr)\, d_i + \sigma z \Bigr), \qquad d_i = x - u_i,
       \quad z \sim N(0, I)

    S is a uniform sample of m of the N clients. Replacing all rows of one client by as many others
    moves the sum by at most :math:`D = 2 C / m`, and :math:`\sigma` is the least for which
    ``rounds`` answers, each about m of N clients, cost epsilon at delta. Clients count alike; one
    that gives no answer leaves its weight empty.

    All models are (epsilon, delta)-private together, not the run folder: publish the model alone.
    The server is trusted with the updates, and with noise and samples, which follow from the seed:
    a simulation. With ``secret=True`` they come from the operating system; do not resume such a
    run, which may tell a round twice. Fair weights would follow the noise here, which is as large
    as a client's loss: with many rows per client take :class:`equifed.Privacy`, of records.

    Parameters
    ----------
    epsilon, delta : float
        The budget, which is what may be published; delta far below one over the clients.
    rounds : int
        Rounds over which it is spent; further ones are refused.
    clip : float
        C. Longer updates are scaled down to this length.
    local, participation, server_lr
        As in :class:`equifed.FedAvg`.
    secret : bool
        Whether noise and samples come from the operating system.

    Examples
    --------
    >>> private = PrivateFedAvg(epsilon=8.0, rounds=50, clip=0.5)
    >>> private.price(1000).sensitivity
    0.001

    References
    ----------
    McMahan, Ramage, Talwar, Zhang. "Learning differentially private recurrent language models."
    ICLR 2018, Algorithm 1 (with replacement of clients, samples of a fixed size).
    """

    epsilon: float
    rounds: int
    clip: float
    local: LocalSGD = DEFAULT_WORK
    participation: float = 1.0
    server_lr: float = 1.0
    delta: float = 1e-5
    secret: bool = False

    allowed: ClassVar = {"epsilon": "(0, inf)", "rounds": "[1, inf)", "clip": "(0, inf)"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_delta(self.delta)

    def price(self, n: int, steps: int = 1) -> Entry:
        """Return what so many rounds of n clients put into a ledger."""
        m, slack = math.ceil(self.participation * n), SecretNoise.slack if self.secret else 1.0
        found = []
        for r in {1.0, m / n}:  # what an accountant says of samples is a bound: all may be less
            raw = r * math.sqrt(self.rounds)
            factor = find_factor(self.epsilon, self.delta, ((raw, r, self.rounds),))
            found.append((factor * raw, r))
        (multiplier, rate), sensitivity = min(found), 2 * self.clip / m * slack
        return Entry("updates", sensitivity, multiplier * sensitivity, rate, steps)

    def account(self, state: State, clients: Clients) -> list[dict[str, Any]]:
        """Return the ledger of all rounds so far, as an event of the run holds it."""
        ledger = Ledger(self.epsilon, self.delta, unit="client", name="the server")
        if state.rounds:
            ledger.spend(self.price(len(clients.names), state.rounds))
        return [ledger.to_dict()]

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        if clients.hides_sums:
            raise ValueError(
                "PrivateFedAvg clips the clients' updates at the server, and here their sums are "
                "hidden from it; open the sums, or use privacy of records, with noise at the sites."
            )
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        if state.rounds >= self.rounds:
            raise OverBudget(
                f"PrivateFedAvg has spent epsilon = {self.epsilon:g} over its {self.rounds} rounds;"
                " plan more rounds, which costs more noise in each, or take a larger epsilon."
            )
        if isinstance(clients, GuardedClients) and clients.watch.acts:
            raise ValueError(
                "A guard that acts shortens updates by the lengths of others, which costs privacy "
                "that is not counted. PrivateFedAvg bounds every update by clip; set guard = 'off'."
            )
        n = len(clients.names)
        entry, m = self.price(n), math.ceil(self.participation * n)
        noise = make_noise(stream, self.secret)
        drawn = noise.draw(m, n, "clients") if m < n else np.arange(n)
        here = np.intersect1d(drawn, clients.index)
        weights = np.full(len(here), 1 / m)
        total = torch.zeros_like(state.x)
        if len(here):  # who was drawn and is missing counts as zero
            chosen = clients.subset(here)
            moved = chosen.local_steps(state.x, self.local, stream.at("local")).displacement
            lengths = np.sqrt(moved.squared_norms())
            shorter = self.clip * (1 - ROUNDING) / np.maximum(lengths, 1e-300)
            total = moved.weighted_sum(weights * np.minimum(1.0, shorter))
        total = noise.add(total, entry.sensitivity / noise.slack, entry.sigma, "sum")
        x = state.x - self.server_lr * total
        budget = f"epsilon {self.epsilon:g}, delta {self.delta:g} after {self.rounds} rounds"
        told = f"noise of deviation {entry.sigma:.3g} on each number of their sum"
        note = f"privacy of clients: {budget}; updates clipped to {self.clip:g}, {told}"
        info = Info(scatter(weights, here, n), index=here, notes=(note,))
        return State(x, state.rounds + 1), info
