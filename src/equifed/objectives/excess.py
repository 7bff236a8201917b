"""Any objective of how much worse clients are served than they could serve themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import Adapted, FreeSum, SaddleObjective, check_length, check_vector
from equifed.objectives.cvar import WorstCase


@dataclass(frozen=True)
class ExcessRisk(Adapted):
    r"""A saddle objective of the losses minus what each client reaches alone.

    .. math:: \Phi(\ell) = \Phi_0(\ell - b) = \max_{w \in W}\ \langle w, \ell\rangle
        - \big(\psi_0(w) + \langle w, b\rangle\big), \qquad
        \mathrm{prox}(z, s) = \mathrm{prox}_0(z - s b, s)

    With the worst case it is the largest regret of a client for sharing one model. The penalty is
    the base's plus a linear term: the dual step stays exact and certificates hold.

    Parameters
    ----------
    baselines
        b, one number per client: the loss of its own model, as ``equifed.alone(...).losses`` has
        it. They do not change in training.
    base
        Phi_0; the worst case unless another is given. Not one that needs losses >= 0 (q-fair,
        proportional), since a shared model may serve a client better than its own.

    Examples
    --------
    >>> import numpy as np
    >>> regret = ExcessRisk(baselines=(0.5, 2.0))
    >>> regret.value(np.array([1.0, 2.25])), regret.weights(np.array([1.0, 2.25]))
    (0.5, array([1., 0.]))

    References
    ----------
    Agarwal and Zhang 2022, Minimax regret optimization for robust machine learning under
    distribution shift.
    """

    baselines: tuple[float, ...]
    base: SaddleObjective = field(default_factory=WorstCase)

    def __post_init__(self) -> None:
        numbers = check_vector(list(self.baselines), "ExcessRisk baselines")
        object.__setattr__(self, "baselines", tuple(numbers.tolist()))
        if isinstance(self.base, FreeSum):
            raise ValueError(
                f"ExcessRisk cannot wrap {self.base!r}, which needs losses >= 0: excess losses may "
                "be negative; use worst-case, cvar, chi-square, kl or average."
            )

    @override
    def value(self, losses: Losses) -> float:
        return self.base.value(self._excess(losses))

    @override
    def weights(self, losses: Losses) -> Weights:
        return self.base.weights(self._excess(losses))

    @override
    def penalty(self, weights: Weights) -> float:
        return self.base.penalty(weights) + float(weights @ self._shift(len(weights)))

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        return self.base.penalty_gradient(weights) + self._shift(len(weights))

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return self.base.prox(point - step * self._shift(point.size), step)

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        return self.base.mirror(weights, self._excess(losses), step)

    def _excess(self, losses: Losses) -> Losses:
        return losses - self._shift(losses.size)

    def _shift(self, n: int) -> Losses:
        return check_length(self.baselines, n, "ExcessRisk baselines")
