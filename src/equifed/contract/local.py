"""What a client does between two messages, as a value of plain numbers for every engine."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.arrays import BlockMatrix, Vector, check_settings


@dataclass(frozen=True)
class SmoothedHinge:
    r"""Outer transform of a client's loss: a smoothed hinge above a shared threshold e.

    The client minimises :math:`\text{slope}_i\, \varphi_\mu(f_i(u) - e) + e` over its model u and
    its copy of e, :math:`\varphi_\mu(t) = \mu \log(1 + e^{t/\mu})` (RC-FL, Algorithm 1).
    """

    threshold: float
    smoothing: float

    def __post_init__(self) -> None:
        check_settings(self, smoothing="(0, inf)")
        if not math.isfinite(self.threshold):
            raise ValueError(f"SmoothedHinge threshold must be finite, got {self.threshold}.")


MOST_STEPS = 10_000_000
"""More local steps in a round than this are a slip of the pen."""


@dataclass(frozen=True)
class LocalSGD:
    r"""Stochastic gradient steps on one client, from the server's model x.

    .. math::
       u \leftarrow \Pi\bigl(u - \text{lr}\,(g_i(u) + \text{proximal}\,(u - x)
                        + \text{correction}\,(c - c_i))\bigr)

    where :math:`g_i` is the gradient of the client's loss on a minibatch (its L2 penalty included),
    :math:`c_i` (control) and :math:`c` (target) are given by the algorithm or absent, and
    :math:`\Pi` projects onto a set W: the ball of ``radius`` around the origin, or any by ``onto``.

    Parameters
    ----------
    lr : float
        Step size.
    steps, epochs : int, optional
        Exactly one is given: the number of steps, the same for every client, or of passes over the
        client's samples (a client with m samples then takes ``epochs * ceil(m / batch_size)``
        steps).
    batch_size : int, optional
        Samples per step, drawn without replacement until all were used (the last batch of a pass
        may be smaller); None means all samples in every step.
    proximal : float
        Weight of the FedProx term ``proximal / 2 |u - x|^2``.
    radius : float, optional
        Radius of the ball the iterates are projected onto.
    onto : callable, optional
        The projection onto any other convex set W: takes a model's flat vector and returns the
        nearest one in W. For clients in this process; a function cannot be sent to others.
    correction : float
        How much of the difference between target and control counts, in [0, 1]: 1 as in the papers,
        less where control variates are noisy (gradients of few samples) or have a memory
        (:class:`equifed.Scaffold`); 0 leaves plain local steps. Less than 1 ends beside the
        solution where clients differ and take several steps, as FedAvg does.

    Examples
    --------
    >>> LocalSGD(lr=0.1, epochs=2, batch_size=50).steps_for([100, 120])
    array([4, 6])
    """

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    proximal: float = 0.0
    radius: float | None = None
    correction: float = 1.0
    onto: Callable[[Vector], Vector] | None = None

    def __post_init__(self) -> None:
        check_settings(self, lr="(0, inf)", proximal="[0, inf)", radius="(0, inf]")
        check_settings(self, "1 is the papers'", correction="[0, 1]")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"LocalSGD needs either steps or epochs, got steps={self.steps} and "
                f"epochs={self.epochs}."
            )
        for name in ("steps", "epochs", "batch_size"):
            _check_count(name, getattr(self, name))
        if (most := max(self.steps or 0, self.epochs or 0)) > MOST_STEPS:
            name = "epochs" if self.steps is None else "steps"
            raise ValueError(
                f"LocalSGD {name} must be at most {MOST_STEPS:,} in one round, got {most}."
            )
        if self.onto is not None and (self.radius is not None or not callable(self.onto)):
            raise ValueError(
                f"LocalSGD onto must be a function of a model, without a radius beside it, got "
                f"{self.onto!r} and radius {self.radius}."
            )

    def work(self, **asked: Any) -> LocalWork:
        """Return the work that a verb sends: these steps, and what else is asked for."""
        if not asked and isinstance(self, LocalWork):
            return self
        return LocalWork(**{**vars(self), **asked})

    def steps_for(self, sizes: NDArray[np.int64] | list[int]) -> NDArray[np.int64]:
        """Return how many steps clients with these numbers of samples take."""
        sizes = np.asarray(sizes, dtype=np.int64)
        if self.steps is not None:
            return np.full(sizes.shape, self.steps, dtype=np.int64)
        assert self.epochs is not None
        return self.epochs * batches_per_pass(sizes, self.batch_size)

    def project(self, models: Vector) -> Vector:
        """Move models (flat vectors, or rows of them) to the nearest points of W, in place.

        >>> import torch
        >>> LocalSGD(lr=0.1, steps=1, radius=1.0).project(torch.tensor([3.0, 4.0])).tolist()
        [0.6000000238418579, 0.800000011920929]
        >>> box = LocalSGD(lr=0.1, steps=1, onto=lambda x: x.clamp(0, 1))
        >>> box.project(torch.tensor([[3.0, -4.0], [0.5, 2.0]])).tolist()
        [[1.0, 0.0], [0.5, 1.0]]
        """
        if self.radius is not None:
            models *= (self.radius / models.norm(dim=-1, keepdim=True)).clamp(max=1.0)
        if self.onto is not None:
            for row in models if models.dim() > 1 else models[None]:
                row.copy_(self.onto(row.clone()))
        return models

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for a message or a file; :meth:`LocalWork.from_dict` reads them."""
        if self.onto is not None:
            raise ValueError(
                "local.onto is a function, which cannot be sent to clients; use radius."
            )
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class LocalWork(LocalSGD):
    """What ``local_steps`` sends: a user's local steps, and what an algorithm wants of them."""

    snapshot: int | None = None  # also return the iterate after so many steps (DRFA)
    average: bool = False  # also return the mean of the iterates after each step (DRFA)
    mean_gradient: bool = False  # also return the mean of the plain gradients g_i (SCAFFOLD, II)
    multiplier: bool = False  # also return c_i - c + proximal (x - u) at the end (FedDyn)
    hinge: SmoothedHinge | None = None  # outer transform of the client's loss (rFedFair)
    scale: BlockMatrix | None = None  # multiplies gradient and correction

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("snapshot", self.snapshot)
        if self.multiplier and self.correction != 1:
            raise ValueError(
                f"FedDyn's multipliers are its whole correction, got correction={self.correction}; "
                "leave it at 1."
            )
        bounded = self.radius is not None or self.onto is not None
        if self.scale is not None and (self.multiplier or bounded):
            what = "FedDyn's multipliers" if self.multiplier else "a radius or a set W"
            raise ValueError(f"Local steps in scaled coordinates cannot have {what}.")
        if self.snapshot is not None and self.steps is not None and self.snapshot > self.steps:
            raise ValueError(f"snapshot={self.snapshot} lies beyond the {self.steps} local steps.")

    @property
    def results(self) -> tuple[str, ...]:
        """The vectors that a client sends back, by their names in :class:`Moved`."""
        optional = "snapshot", "average", "mean_gradient", "multiplier"
        return ("displacement", *(kind for kind in optional if getattr(self, kind)))

    def check(self, control: object, target: object, slopes: object) -> None:
        """Refuse half a correction, a multiplier without one, or a hinge without slopes."""
        if (control is None) != (target is None):
            raise ValueError("local_steps takes control and target together or neither.")
        if self.multiplier and control is None:
            raise ValueError("The multiplier is c_i - c + proximal (x - u): it needs a control.")
        if self.correction != 1 and control is None:
            raise ValueError(
                f"local.correction = {self.correction} damps a correction of local steps, and this "
                "algorithm has none; leave it at 1, or use SCAFFOLD or SCAFF-PD."
            )
        if (self.hinge is None) != (slopes is None):
            raise ValueError(
                "local_steps takes slopes exactly when the local work has a hinge, as rFedFair's "
                "has."
            )

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for a message; a scale travels beside them."""
        return LocalSGD.to_dict(dataclasses.replace(self, scale=None))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LocalWork:
        """Build the value that :meth:`to_dict` described."""
        hinge = values.get("hinge")
        return cls(**{**values, "hinge": SmoothedHinge(**hinge) if hinge else None})


def _check_count(name: str, value: float | None) -> None:
    """Refuse what is no whole number of at least 1."""
    if value is not None and (value != int(value) or value < 1):
        raise ValueError(f"LocalSGD {name} must be a whole number of at least 1, got {value}.")


def batches_per_pass(sizes: NDArray[np.int64], batch_size: int | None) -> NDArray[np.int64]:
    """Return how many minibatches one pass over ``sizes`` samples has."""
    if batch_size is None:
        return np.ones_like(sizes)
    return -(-sizes // batch_size)


def uses_minibatches(algorithm: Any) -> bool:
    """Tell whether an algorithm, or one inside it, asks for minibatches."""
    if not dataclasses.is_dataclass(algorithm):
        return False
    fields = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}
    asked = any(n.endswith("batch_size") and v is not None for n, v in fields.items())
    return asked or any(uses_minibatches(value) for value in fields.values())


OwnSteps = Literal["auto", "profile", "joint", "alternating"]
"""How own parts are found: the best ones for the shared model (profile losses), or by local steps,
together with the shared parameters or before them."""

OwnL2: TypeAlias = float | str
"""Strength of the penalty on own parameters: a number, or ``"3/n"``, which is 3 divided by the
client's number of training samples, and at most 1 (any number may stand for the 3)."""


def own_strength(own_l2: OwnL2, samples: int = 1) -> float:
    """Return the strength of the penalty for a client with so many training samples.

    >>> own_strength(0.01, 200), own_strength("10/n", 200), own_strength("10/n", 3)
    (0.01, 0.05, 1.0)
    """
    found = re.fullmatch(r"(.+)/ *n *", own_l2) if isinstance(own_l2, str) else None
    try:
        value = float(own_l2 if found is None else found[1])
    except (TypeError, ValueError):
        value = math.nan
    if not (value >= 0 and math.isfinite(value)) or (isinstance(own_l2, str) and found is None):
        raise ValueError(
            f'own_l2 must be a number of at least 0, got {own_l2}; "3/n" is 3 divided by the '
            "client's number of training samples."
        )
    return value if found is None else min(1.0, value / max(1, samples))


DEFAULT_WORK = LocalSGD(lr=0.02, steps=10, batch_size=50)
"""Local work where none is given: ten steps on batches of fifty as in DRFA's experiments.

The step size is ours and a guess. Training measures a better one for FedAvg without ``local``, and
a configuration for all (:func:`equifed.algorithms.with_measured_step`).
"""
