"""The local steps of many clients at once: the formula of ``LocalSGD``, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from equifed.local import LocalSGD


class Walk:
    """The iterates of c clients, from a shared model x.

    Parameters
    ----------
    x : Tensor (d,)
        The server's model.
    work : LocalSGD
        What to do.
    steps : int64 (c,)
        Steps of each client; those with fewer rest while the others go on.
    correction : Tensor (c, d), optional
        target - control, added to every gradient.
    slope : Tensor (c,), optional
        Factor of the hinge.
    """

    def __init__(
        self,
        x: Tensor,
        work: LocalSGD,
        steps: Tensor,
        correction: Tensor | None,
        slope: Tensor | None,
    ) -> None:
        self._x, self._work, self._steps = x, work, steps
        self._correction, self._slope = correction, slope
        self._shortest = int(steps.min())
        self.u = x.expand(len(steps), -1).clone()
        self.snapshot: Tensor | None = None
        self._iterates = torch.zeros_like(self.u) if work.average else None
        self._gradients = torch.zeros_like(self.u) if work.mean_gradient else None
        self.threshold: Tensor | None = None
        if work.hinge is not None:
            self.threshold = x.new_full((len(steps),), work.hinge.threshold)

    def advance(self, step: int, gradient: Tensor, value: Tensor) -> None:
        """Take one step (counted from zero) with the clients' gradients and losses."""
        work, live = self._work, None if step < self._shortest else step < self._steps
        if work.hinge is not None and self.threshold is not None and self._slope is not None:
            s = self._slope * torch.sigmoid((value - self.threshold) / work.hinge.smoothing)
            gradient = s.unsqueeze(1) * gradient
            self.threshold = _where(live, self.threshold - work.lr * (1 - s), self.threshold)
        direction = gradient
        if work.proximal:
            direction = direction + work.proximal * (self.u - self._x)
        if self._correction is not None:
            direction = direction + self._correction
        u = self.u - work.lr * direction
        if work.radius is not None:
            norm = torch.linalg.vector_norm(u, dim=1, keepdim=True)
            u = u * torch.clamp(work.radius / norm, max=1.0)
        self.u = _where(live, u, self.u)
        self._note(step, live, gradient)

    def _note(self, step: int, live: Tensor | None, gradient: Tensor) -> None:
        if self._iterates is not None:
            self._iterates += _where(live, self.u, torch.zeros_like(self.u))
        if self._gradients is not None:
            self._gradients += _where(live, gradient, torch.zeros_like(gradient))
        if self._work.snapshot is not None:
            due = self._steps.clamp(max=self._work.snapshot) == step + 1
            before = self.u if self.snapshot is None else self.snapshot
            self.snapshot = torch.where(due.unsqueeze(1), self.u, before)

    @property
    def displacement(self) -> Tensor:
        """Return x - u for every client."""
        return self._x - self.u

    @property
    def average(self) -> Tensor:
        """Return the mean of each client's iterates."""
        assert self._iterates is not None
        return self._iterates / self._steps.unsqueeze(1)

    @property
    def mean_gradient(self) -> Tensor:
        """Return the mean of each client's plain gradients."""
        assert self._gradients is not None
        return self._gradients / self._steps.unsqueeze(1)


def _where(live: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return ``new`` for the rows that are live (None: all), ``old`` for the others."""
    if live is None:
        return new
    return torch.where(live.reshape(-1, *[1] * (new.dim() - 1)), new, old)
