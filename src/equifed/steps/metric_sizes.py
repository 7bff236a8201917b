"""Step sizes of rounds in a metric: what they remember, and how a step is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Vector, Weights
from equifed.contract.curvature import Form
from equifed.steps.metric import Metric
from equifed.steps.schedule import StepSizes


@dataclass(frozen=True, eq=False)
class MetricSizes(StepSizes):
    """Step size tau in a metric, and what the rounds in it remember.

    Parameters
    ----------
    metric : Metric, optional
        P; None before it is known.
    form : str or int
        Its form, or its rank.
    weights : Weights, optional
        Those by which the clients' Hessians were summed.
    exact, constant : bool
        Whether P is a sum of Hessians, and whether they are the same at every model.
    sums, age : int
        How often Hessians were summed, and rounds since then.
    origin, pull : Vector, optional
        Where the last step began, and the weighted gradient there; None: nothing to compare with.
    value, gain, faster : float
        The objective there, by how much the step should lower it, and that relative to the gain of
        the step before.
    share : float
        How much of that step was taken in the end.
    shortened : int
        How often a step was shortened.
    """

    metric: Metric | None = None
    form: Form | int = "blocks"
    weights: Weights | None = None
    exact: bool = True
    constant: bool = False
    sums: int = 0
    age: int = 0
    origin: Vector | None = None
    pull: Vector | None = None
    value: float = 0.0
    gain: float = 0.0
    faster: float = 1.0
    share: float = 1.0
    shortened: int = 0

    @override
    def numbers(self) -> dict[str, float]:
        """Return the step size, and how often Hessians were summed and steps shortened."""
        found = {"curvature_sums": float(self.sums), "halvings": float(self.shortened)}
        return {"primal_step": self.primal, **found}

    @override
    def halved(self) -> StepSizes | None:
        """Return None: rounds in a metric judge their steps themselves."""
        return None

    def judged(self, x: Vector, value: float) -> tuple[MetricSizes, bool]:
        """Return the sizes after the last step showed what it was worth, and whether it is kept.

        It should have lowered the objective by ``gain``: with less than a tenth of that it is
        shortened, with most of it the next one may be longer.
        """
        if self.origin is None:
            return self, True
        off = rounding(x, value)
        kept_promise = (self.value - value + off) / max(self.gain * self.share, off)
        if kept_promise < 0.1 and self.share > 1e-6:
            shorter = replace(self, share=self.share / 4, primal=self.primal / 2)
            return replace(shorter, shortened=self.shortened + 1), False
        if kept_promise > 0.7:
            return replace(self, primal=min(1.0, 2 * self.primal)), True
        return self, True

    def is_stale(self, weights: Weights) -> bool:
        """Tell whether Hessians are to be summed: ever more seldom where they are bounds."""
        if self.metric is None or self.weights is None:
            return True
        if not self.exact:
            return self.age + 1 >= self.sums
        turned = float(np.abs(weights - self.weights).sum())
        if self.constant and turned <= 0.01 * float(np.abs(self.weights).sum()):
            return False
        return self.faster > 0.02

    def corrected(self, x: Vector, pull: Vector) -> MetricSizes:
        """Return the sizes with a metric that knows what the last step did to the gradient."""
        if self.metric is None or self.origin is None or self.pull is None:
            return self
        step, least = x - self.origin, math.sqrt(epsilon(x)) / 100 * float(x.norm())
        if not float(step.norm()) > least:  # rounding
            return self
        return replace(self, metric=self.metric.with_secant(step, pull - self.pull))

    @override
    def said(self) -> tuple[str, ...]:
        """Say what the metric is and what it costs, when it is new."""
        if self.metric is None or self.origin is None or self.sums > 1 or self.age > 0:
            return ()
        basis = self.metric.basis
        (b, q), kind, numbers = basis.shape[:2], "low rank", basis.numel()
        if self.metric.values is None:
            kind = "diagonal" if basis.dim() == 2 else "whole"
            numbers = b * q if kind == "diagonal" else b * q * (q + 1) // 2
        cost, what = numbers * self.origin.element_size(), f"{b} block{'s' if b > 1 else ''}"
        size = f"{cost / 1e6:.3g} MB" if cost >= 1e5 else f"{cost / 1e3:.3g} kB"
        return (
            f"steps in the metric of the clients' curvature ({what} of {q} x {q}, {kind}): {size} "
            "more per client whenever it is summed, in place of local steps",
        )


def rounding(x: Vector, value: float) -> float:
    """Return by how much a computed objective may be off."""
    return 8 * epsilon(x) * abs(value) + 1e-300


def epsilon(x: Vector) -> float:
    """Return the distance from 1 to the next number in the model's precision."""
    return float(np.finfo(str(x.dtype).removeprefix("torch.")).eps)
