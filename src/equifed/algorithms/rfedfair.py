"""rFedFair: local steps on a smoothed hinge of the loss above a shared threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from equifed.algorithms.absence import call_roll
from equifed.algorithms.fedavg import Weighting, all_sizes, client_weights
from equifed.contract import Clients, Federated, Info, LocalSGD, Stream, Vector, Weights
from equifed.contract.absence import running_mean
from equifed.contract.local import DEFAULT_WORK, SmoothedHinge
from equifed.objectives.cvar import Average, check_tails


@dataclass(frozen=True)
class State:
    """Model and threshold, rounds so far, and the mean model of all steps (if wanted)."""

    x: Vector
    threshold: float
    rounds: int = 0
    mean_x: Vector | None = None


@dataclass(frozen=True)
class RFedFair(Federated):
    r"""rFedFair (Algorithm 1 of RC-FL) for heterogeneous CVaR in its variational form.

    .. math:: \min_{\omega, \eta} \sum_i p_i \Bigl(\frac{1}{\alpha_i}
              \varphi_\mu(f_i(\omega) - \eta) + \eta\Bigr), \qquad
              \varphi_\mu(t) = \mu \log(1 + e^{t/\mu}) \qquad (5)

    With :math:`s_i = \mathrm{sigmoid}((f_i(\omega_i) - \eta_i)/\mu)` a client repeats

    .. math:: \omega_i \leftarrow \omega_i - \beta \frac{s_i}{\alpha_i} \nabla f_i(\omega_i), \qquad
              \eta_i \leftarrow \eta_i - \beta \Bigl(1 - \frac{s_i}{\alpha_i}\Bigr)

    :math:`\kappa` times; the server averages both, with weights :math:`p_i` over all clients, or
    1/K over K clients drawn with replacement with probabilities :math:`p_i`. ("t does not divide
    kappa" in the listing means that t + 1 is no multiple of kappa.) The output is the mean of the
    models *before* each step, :math:`\frac1T \sum_{t<T} \sum_i p_i \omega_t^i` (of those drawn).

    Parameters
    ----------
    local : LocalSGD
        kappa steps of size beta. The paper takes kappa = 5 and tunes beta; Theorem 1 wants beta
        at most 1/(40 L) with :math:`L = (L_1 + (L_2^2 + 1)/\mu) \max_i 1/\alpha_i`.
    tails : float or tuple of float
        alpha_i in [p_i, 1], one for all or one each. The default is ours and lets a client
        count at most twice its share. A single number below the share of a client is raised to it.
    smoothing : float
        mu, in the unit of the loss. The smoothed objective is too large by at most
        :math:`\mu \sum_i p_i/\alpha_i` (Lemma 2); the default is ours.
    threshold : float
        First eta, open in the paper. From below the losses it climbs while all clients train; from
        above them it keeps everybody waiting until it has fallen.
    weighting : {"size", "uniform"}
        p_i.
    clients_per_round : int, optional
        K; None lets every client take part.
    output : {"average", "last"}
        Which model to give out.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.RFedFair(tails=0.5), clients, rounds=40, evaluate=["test"], every=40)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.4
    """

    local: LocalSGD = DEFAULT_WORK
    tails: float | tuple[float, ...] = 0.5
    smoothing: float = 0.1
    threshold: float = 0.0
    weighting: Weighting = "size"
    clients_per_round: int | None = None
    output: Literal["average", "last"] = "average"

    equal_steps: ClassVar = True

    def __post_init__(self) -> None:
        if not all(0 < tail <= 1 for tail in np.ravel(self.tails)):
            raise ValueError(f"RFedFair tails must lie in (0, 1], got {self.tails}.")
        super().__post_init__()
        SmoothedHinge(0.0, self.smoothing)  # refuses what is not positive

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        self._tails(clients)  # refuses tails that do not fit the clients
        return State(x, self.threshold)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        everyone = call_roll(self, state, clients, Average())
        p = client_weights(self.weighting, all_sizes(clients))
        chosen, p = everyone.draw(p, self.clients_per_round, stream)  # Z
        hinge = SmoothedHinge(state.threshold, self.smoothing)  # phi_mu(. - eta) of (5)
        work = self.local.work(hinge=hinge, average=self.output == "average")
        slopes = 1 / self._tails(clients)
        moved = chosen.local_steps(state.x, work, stream.at("local"), slopes=slopes)  # kappa steps
        assert moved.thresholds is not None
        step = moved.displacement.step(p)  # Average of omega, as a step from the last one
        threshold = float(p @ moved.thresholds)  # Average of eta
        rounds, mean_x = state.rounds + 1, None
        if moved.average is not None:  # Output: the iterates before each step, from those after it
            before = moved.average.weighted_sum(p) + step / int(moved.steps.max())
            mean_x = running_mean(state.mean_x, before, rounds)
        info = Info(p, index=chosen.index, numbers={"threshold": threshold})
        return State(state.x - step, threshold, rounds, mean_x), info

    def _tails(self, clients: Clients) -> Weights:
        """Return alpha_i of all clients of the federation."""
        share = client_weights(self.weighting, all_sizes(clients))
        if not isinstance(self.tails, tuple):
            return np.maximum(self.tails, share)
        return check_tails(self.tails, share, "RFedFair", clients.names)
