"""One client's rows, which answer through Gaussian mechanisms alone.

Every answer is clipped row by row, so that replacing one unit's rows moves it by at most a declared
length; it is entered in the ledger, and gets its noise.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import grad, vmap

from equifed.contract.arrays import show_text
from equifed.models.checks import find_reason
from equifed.models.curvature import find_places, read_design, trained_rows
from equifed.models.flat import FlatModel
from equifed.models.layers import write_out
from equifed.models.losses import DERIVATIVES, FittedLoss, Weighted, as_outputs, fitted_loss
from equifed.privacy.ledger import Bounds, Entry, Ledger, Planned
from equifed.privacy.noise import Noise
from equifed.training.files import digest, read_sealed, seal, write_file

CHUNK = 256  # rows whose gradients are taken at once
ROUNDING = 1e-6  # by which clipped rows stay below their bound in single precision
OWN_FLOOR = 8.0  # least curvature of an own bias, in its gradient's noise: steps of an eighth
# Length of a loss's derivative in the outputs, at most
LARGEST_SLOPE: dict[str | None, float] = {"cross_entropy": math.sqrt(2.0), "binary_logistic": 1.0}
Answer: TypeAlias = Callable[[Tensor], Tensor]


class Unanswered(ValueError):
    """A question about rows that no mechanism answers."""


def refuse(reasons: Mapping[str, Any]) -> None:
    """Refuse for the first reason that holds."""
    if why := find_reason(reasons):
        raise Unanswered(why)


class PrivateSite:
    """The rows of one client, and what they may still tell: what is ``planned``.

    ``own_l2`` is the penalty of this client's own parameters, else the model's.
    """

    def __init__(
        self, privacy: Bounds, ledger: Ledger, model: FlatModel, inputs: Tensor, targets: Tensor,
        noise: Noise, planned: Planned, own_l2: float | None = None,
    ) -> None:  # fmt: skip
        self.check(privacy, model)
        if len(targets) == 0:
            raise ValueError(f"Client {show_text(ledger.name)} has no rows to train on.")
        self.privacy, self.ledger, self.noise, self.planned = privacy, ledger, noise, planned
        self.own_l2 = model.own_l2 if own_l2 is None else own_l2
        self.linear, self._targets, self.size = linear_loss(model), targets, len(targets)
        # Whether own parameters take a step with every gradient, not with local steps alone
        self.settles = bool(self.linear and model.own_size and planned.moments)
        bias = self.linear is not None and any(name.endswith("bias") for name in model.all_shapes)
        if self.linear is None:  # gradients of single rows are batched
            self.model = model.twin()
            self.model.channels_last = False
            write_out(self.model.module)
            self._inputs = shorten(inputs.to(model.device), privacy.rows)
        else:
            self.model, self._places = copy.copy(model), find_places(model)
            design = read_design(model, inputs).double()  # sums round below what one row does
            if model.own_size:
                own = model.size + torch.arange(model.own_size, device=design.device)
                self._places = torch.cat([self._places, own[:, None]], dim=1)
                design = torch.cat([design, design.new_ones(self.size, 1)], dim=1)
            features, ones = design.tensor_split([design.shape[1] - bias], dim=1)
            self._inputs = torch.cat([shorten(features, privacy.rows), ones], dim=1)
        self.bend = math.nan if self.linear is None else DERIVATIVES[self.linear].steepest
        slope = LARGEST_SLOPE.get(self.linear, math.nan)
        self._reach = privacy.reach(slope, bias, self.linear == "squared")
        self.longest: float = self._reach["gradients"] / 2  # C, of gradients of single rows
        # Moments are told once; deviations of the noise of every kind; where moments are kept
        self._told, self._sigmas = list[Tensor](), dict[str, float]()
        self._file: tuple[Path, dict[str, Any]] | None = None

    @staticmethod
    def check(privacy: Bounds, model: FlatModel) -> None:
        """Refuse models and units whose answers have no mechanism."""
        whole = privacy.unit == "client"
        unbounded = privacy.gradient is None and linear_loss(model) is None
        reasons = {
            "unit='client' protects whole clients, not the rows at one of them.": whole,
            "Weights of classes change what a row counts, for which no bound is declared; leave "
            "class_weights out.": isinstance(model.loss, Weighted),
            "Gradients of single rows have no dropout here; set its rate to 0.": model.dropouts,
            "The gradients of this model have no known bound; give Privacy(gradient=...), the "
            "length to which those of single rows are clipped.": unbounded,
        }
        refuse(reasons)

    def price(self, kind: str, count: int | None = None, steps: int = 1) -> Entry:
        """Return what answers about all rows, or about so many, put into the ledger."""
        planned = self.planned.counts()
        if kind not in planned:
            raise Unanswered(
                f"Client {show_text(self.ledger.name)}: {kind} are not in the plan, which has a "
                f"share of the budget for {', '.join(planned) or 'nothing'}. Use an algorithm that "
                "does not ask for them."
            )
        about = kind, self.planned, self._reach[kind], self.size, count
        return self.privacy.price(*about, steps, self.noise.slack)

    def count(self, kind: str) -> int:
        """Return how many answers of a kind the ledger has."""
        return sum(entry.steps for entry in self.ledger.entries if entry.kind == kind)

    def enter(self, kind: str, steps: int = 1, count: int | None = None) -> Answer:
        """Enter answers in the ledger, or refuse them, and return what adds their noise, once."""
        entry, first = self.price(kind, count, steps), self.count(kind)
        self.ledger.spend(entry)
        self._sigmas[kind] = entry.sigma
        given = entry.sensitivity / self.noise.slack, entry.sigma, kind
        turns = iter(range(first, first + steps))  # and no more than was entered
        return lambda value: self.noise.add(value, *given, next(turns))

    def losses(self, x: Tensor) -> float:
        """Return the mean of the rows' losses, clipped to [0, b], with the penalty."""
        known = self.linear == "squared"
        value = self._quadratic(x)[0] if known else self.enter("losses")(self.mean_loss(x))
        return float(value + self.model.penalty(self.uncentre(x), self.own_l2))

    def gradient(self, x: Tensor) -> Tensor:
        """Return the mean of the rows' gradients, clipped to C, with that of the penalty."""
        return self.step_gradients(1, None, "gradients")(x)

    def step_gradients(self, steps: int, batch_size: int | None, kind: str = "steps") -> Answer:
        """Return what gives noised gradients, entered beforehand, each of rows drawn anew."""
        if self.linear == "squared":
            return lambda u: self._with_pull(self._quadratic(u)[1], u)
        count = min(batch_size or self.size, self.size)
        persons = count < self.size and self.privacy.unit == "person"
        told = "samples of rows are not samples of persons; take all rows (batch_size=None)"
        refuse({f"batch_size={batch_size}: {told} with unit='person'.": persons})
        turns = itertools.count(self.count(kind))
        add_noise = self.enter(kind, steps, count)

        def answer(u: Tensor) -> Tensor:
            turn, rows = next(turns), None
            if count < self.size:
                rows = torch.as_tensor(self.noise.draw(count, self.size, turn))
            return self._with_pull(self.tidy(add_noise(self.mean_gradient(u, rows))).to(u), u)

        return answer

    def moments(self) -> Tensor:
        """Return :meth:`mean_moments` with symmetric noise; it is told once and then kept."""
        if not self._told:
            add_noise, whole = self.enter("moments"), self.mean_moments()
            self._told.append(unflatten_symmetric(add_noise(flatten_symmetric(whole)), len(whole)))
            if self._file is not None:
                told = {"sigma": self._sigmas["moments"], "moments": self._told[0].tolist()}
                write_file(self._file[0], seal({**self._file[1], **told}))
        return self._told[0]

    def keep_moments(self, path: Path, run: str) -> None:
        """Keep moments in a file; those of the same rows that a run has paid for cost nothing."""
        if self.linear is None:
            return
        bounds, targets = self.privacy, [self._targets] if self.linear == "squared" else []
        same = [self.linear, bounds.rows, bounds.loss, bounds.unit, bounds.most_rows]
        parts = [part.cpu().numpy().tobytes() for part in (self._inputs, *targets)]
        about = {"run": run, "rows": digest(repr(same).encode() + b"".join(parts))}
        self._file, told = (path, about), read_sealed(path) if path.exists() else {}
        paid = [entry.sigma for entry in self.ledger.entries if entry.kind == "moments"]
        if told.get("rows") == about["rows"] and told["sigma"] in paid:
            self._sigmas["moments"] = told["sigma"]
            self._told.append(self._inputs.new_tensor(told["moments"]))
            moments = self.planned.moments if told["run"] == run else 0
            self.planned = replace(self.planned, moments=moments)

    def hessian(self) -> Tensor:
        """Return one block of a bound on the Hessian, with noise and without the penalty."""
        q = self._places.shape[1] - self.settles
        block = self.moments()[:q, :q]
        if self.settles:
            centre = self.centre()
            block = block - centre[:, None] * centre
        return self.bend * block

    def hessian_noise(self) -> float:
        """Return the deviation of that block's noise beside the diagonal: no secret."""
        self.moments()
        return self.bend * self._sigmas["moments"] / math.sqrt(2.0)

    # -- an own bias: kept as that of rows minus their noised mean, by which it moves alone --------

    def centre(self) -> Tensor:
        """Return the noised mean row, drawn to zero by what is noise (James and Stein 1961)."""
        q = self._places.shape[1] - 1
        mean = self.moments()[q, :q]
        noise = q * self._sigmas["moments"] ** 2 / 2  # beside the diagonal
        kept = max(0.0, 1 - noise / max(float(mean.square().sum()), 1e-300))
        return shorten(kept * mean[None], self.privacy.rows)[0]

    def uncentre(self, x: Tensor) -> Tensor:
        """Return the same model with the bias of rows as they are."""
        if self.settles:
            x, places = x.clone(), self._places
            x[places[:, -1]] -= (x[places[:, :-1]].double() @ self.centre()).to(x)
        return x

    def _centre_gradient(self, gradient: Tensor) -> Tensor:
        """Return what a gradient by weight and bias is by weight and the bias that is kept."""
        if self.settles:
            gradient, places = gradient.clone(), self._places
            moved = gradient[places[:, -1:]].double() * self.centre()
            gradient[places[:, :-1]] -= moved.to(gradient)
        return gradient

    def move_own(self, own: Tensor, pull: Tensor, kind: str, lr: float = 1.0) -> Tensor:
        """Return own parameters after a step along their noised gradient: Newton's for a bias."""
        if self.linear is None:
            return own - lr * pull
        bend, q = self.bend, self._places.shape[1] - 1
        if self.linear == "squared":
            bend *= float(self._positive()[q, q])
        else:
            bend = max(bend, OWN_FLOOR * self._sigmas[kind])
        return own - pull / (bend + self.own_l2)

    # -- exact, clipped: none of this leaves without noise ----------------------------------------

    def mean_loss(self, x: Tensor) -> Tensor:
        """Return the mean of clipped losses; what is not a number counts as the bound."""
        b = self.privacy.loss
        with torch.no_grad():
            each = self.model.loss(self._outputs(x, self._inputs), self._targets)
        return torch.nan_to_num(each.double(), nan=b, posinf=b).clamp(0, b).sum() / self.size

    def _outputs(self, x: Tensor, rows: Tensor) -> Tensor:
        if self.linear is None:
            return self.model.outputs(x, rows, training=True)
        return rows @ self.uncentre(x)[self._places].T.double()

    def mean_gradient(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the mean of clipped gradients, of all rows or of some; NaN counts as zero."""
        inputs, targets = self._inputs, self._targets
        if rows is not None:
            inputs, targets = inputs[rows], targets[rows]
        if self.linear is not None:
            return self._linear_gradient(x, inputs, targets)

        def loss(x: Tensor, row: Tensor, target: Tensor) -> Tensor:
            return self.model.sample_losses(x, row[None], target[None])[0]

        # What single precision rounds may be more than a row of many moves
        total = torch.zeros_like(x, dtype=torch.float64)
        each = vmap(grad(loss), in_dims=(None, 0, 0))
        for some in zip(torch.split(inputs, CHUNK), torch.split(targets, CHUNK), strict=True):
            total += shorten(each(x, *some), self.longest).sum(dim=0)
        return total / len(inputs)

    def _linear_gradient(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        assert self.linear is not None
        with torch.no_grad():
            slopes = DERIVATIVES[self.linear].first(self._outputs(x, inputs), targets)
            slopes = torch.nan_to_num(slopes, nan=0.0, posinf=0.0, neginf=0.0)
            if self.settles:
                inputs = torch.cat([inputs[:, :-1] - self.centre(), inputs[:, -1:]], dim=1)
            lengths = slopes.norm(dim=1) * inputs.norm(dim=1)
            shrink = (self.longest / lengths).clamp(max=1.0)
            found = torch.zeros_like(x, dtype=torch.float64)
            found[self._places] = (slopes * shrink[:, None]).T @ inputs / len(inputs)
        return found

    def mean_moments(self) -> Tensor:
        """Return second moments of the rows with a bias's ones, and targets of a squared loss."""
        rows = self._inputs.double()
        if self.linear == "squared":
            like = rows.new_zeros(1, len(self._places))
            wanted = as_outputs(self._targets, like).double()
            rows = torch.cat([rows, shorten(wanted, math.sqrt(self.privacy.loss))], dim=1)
        return rows.T @ rows / self.size

    def tidy(self, gradient: Tensor) -> Tensor:
        """Return a new gradient with what is known of all: those of softmax sum to zero."""
        gradient = gradient.clone()
        if self.linear == "cross_entropy":
            gradient[self._places] -= gradient[self._places].mean(dim=0)
        return gradient

    def _with_pull(self, gradient: Tensor, x: Tensor) -> Tensor:
        pull = self.model.add_pull(torch.zeros_like(x), self.uncentre(x), self.own_l2)
        return gradient + self._centre_gradient(pull)

    def _positive(self) -> Tensor:
        moments = self.moments()
        if len(self._told) == 1:
            values, axes = torch.linalg.eigh(moments)
            self._told.append((axes * values.clamp(min=0.0)) @ axes.T)
        return self._told[1]

    def _quadratic(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a squared loss and its gradient from the noised moments."""
        whole, places = self._positive(), self._places
        q, w = places.shape[1], self.uncentre(x)[places].double().T  # (q, k)
        gram, cross, own = whole[:q, :q], whole[:q, q:], whole[q:, q:]
        bent, found = gram @ w, torch.zeros_like(x)
        found[places] = (2 * (bent - cross)).T.to(x)
        return ((w * (bent - 2 * cross)).sum() + own.trace()).to(x), self._centre_gradient(found)


def linear_loss(model: FlatModel) -> FittedLoss | None:
    """Return the loss of a linear model whose derivatives are known; None for other models."""
    own = [name.rpartition(".")[2] for name in model.own_shapes]
    linear = own in ([], ["bias"]) and trained_rows(model) is not None
    return fitted_loss(model.loss) if linear else None


def shorten(rows: Tensor, length: float) -> Tensor:
    """Return rows scaled down to a length, where they are longer; what is not a number is zero."""
    if not rows.is_floating_point():
        return rows  # tokens
    rows = torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    lengths = rows.flatten(1).norm(dim=1)
    shrink = (length * (1 - ROUNDING) / lengths).clamp(max=1.0)
    shorter: Tensor = rows * shrink.reshape(-1, *[1] * (rows.dim() - 1))
    return shorter


def flatten_symmetric(matrix: Tensor) -> Tensor:
    """Return the upper triangle as a vector of the same length (off the diagonal, root two)."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns] * torch.where(rows == columns, 1.0, math.sqrt(2.0)).to(matrix)


def unflatten_symmetric(flat: Tensor, size: int) -> Tensor:
    """Return the matrix of which this is the upper triangle."""
    rows, columns = torch.triu_indices(size, size)
    matrix = flat.new_zeros(size, size)
    part = flat / torch.where(rows == columns, 1.0, math.sqrt(2.0)).to(flat)
    matrix[rows, columns] = matrix[columns, rows] = part
    return matrix
