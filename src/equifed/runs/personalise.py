"""Own parts after training: fitted to a finished model at its shared parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.arrays import Index, Losses
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.split import Split
from equifed.metrics import Interval, count_pairs, mean_interval, newcombe_interval
from equifed.runs.build import load_data
from equifed.runs.config import RunConfig
from equifed.runs.fine_tune import Tuned, fine_tune
from equifed.runs.trained import PERSONAL_PARTS, PERSONALISED, load_predictor
from equifed.training.files import digest, read_json, seal, write_file
from equifed.training.history import History
from equifed.training.tables import CONFIG, MODEL, RUN

if TYPE_CHECKING:
    from torch import Tensor

    from equifed.models.predictor import Predictor

TEMPERATURES = (1.0, 2.0, 4.0)
"""Training outputs of a network are too sure of themselves: they are divided by this in the fit."""
PENALTIES = (0.1, 1.0, 10.0, 100.0)
"""Strengths tried: (penalty / 2) |v - shared|^2 beside the sum of the losses."""
ENOUGH = 20
"""Validation samples from which on a client's own part is fitted to them."""
FOLDS = 5


@dataclass(frozen=True)
class Choice:
    """How own parts are fitted: temperature and penalty; an infinite penalty changes nothing."""

    temperature: float
    penalty: float

    def __str__(self) -> str:
        if math.isinf(self.penalty):
            return "no change: nothing tried was better on held-out samples"
        return f"temperature {self.temperature:g}, penalty {self.penalty:g}"

    def to_dict(self) -> dict[str, float | None]:
        """Return it as plain values."""
        return {"temperature": self.temperature, "penalty": _number(self.penalty)}


@dataclass(frozen=True, eq=False)
class Personalised:
    """A finished model with an own part for every client, and what that changed.

    Parameters
    ----------
    predictor : Predictor
        Predicts with every client's own part.
    names : tuple of str
        The own parameters.
    choices : mapping of {"validation", "train"} to Choice or Tuned
        What held-out samples chose for own parts fitted to these samples.
    fitted_on : tuple of str
        Of each client: "validation", "train", or "nothing" where it has no samples.
    metric, split : str
        What is compared: accuracy, or mse of a regression; "" if there is no test split.
    sizes : array of int
        Test samples of each client.
    before, after : array
        The metric per client; NaN without test samples.
    differences : tuple of Interval or None
        After minus before on the same samples, with 95 % limits.
    average : Interval, optional
        The same of the average over these clients.
    """

    predictor: Predictor
    names: tuple[str, ...]
    choices: Mapping[str, Choice | Tuned]
    fitted_on: tuple[str, ...]
    metric: str
    split: str
    sizes: Index
    before: Losses
    after: Losses
    differences: tuple[Interval | None, ...]
    average: Interval | None

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per client."""
        columns = zip(self.predictor.clients, self.fitted_on, self.sizes, self.before, self.after,
                      self.differences, strict=True)  # fmt: skip
        return [
            {"client": name, "fitted_on": source, "test": int(m), "before": _number(b),
             "after": _number(a), "change": None if d is None else d.estimate,
             "lower": None if d is None else d.lower, "upper": None if d is None else d.upper}
            for name, source, m, b, a, d in columns
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return what came of it as plain values."""
        chosen = {k: c.to_dict() for k, c in self.choices.items()}
        limits = self.average
        told = None if limits is None else [limits.estimate, limits.lower, limits.upper]
        return {"own": list(self.names), "chosen": chosen, "metric": self.metric,
                "split": self.split, "average_change": told, "clients": self.rows()}  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write it beside the model of a run, for ``equifed predict --personalised``."""
        from safetensors.torch import save

        path = Path(folder)
        parts = save({name: part.contiguous() for name, part in self.predictor.own.items()})
        held = {"parts": digest(parts), "model": digest((path / MODEL).read_bytes())}
        write_file(path / PERSONAL_PARTS, parts)
        write_file(path / PERSONALISED, seal({**self.to_dict(), **held}))
        return path / PERSONALISED


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def personalise(
    run: str | Path | History,
    data: Federation | None = None,
    own: str | Sequence[str] = "bias",
    *,
    temperature: float | None = None,
    penalty: float | None = None,
    lr: float | None = None,
    steps: int | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> Personalised:
    """Fit an own part to every client at the shared parameters of a finished model.

    The own part is the bias of the last layer, or weight and bias (``own="head"``, up to 2,000
    numbers): a convex problem, solved by Newton's method. A client with at least 20 validation
    samples is fitted to these, whose outputs the model was not trained on; others to their training
    samples. Temperature and penalty are chosen for both kinds by the loss on validation samples,
    averaged over clients (by five folds where the fit uses them, too); to change nothing is among
    the choices. Test samples are used to compare before and after, and for nothing else.

    With ``own="all"`` every client fine-tunes the whole model: local steps from the shared
    parameters, by minibatches of its training samples. Step size and number of steps are one choice
    for all clients, by the loss on validation samples, "no change" among them. An own bias repairs
    other shares of classes; fine-tuning also other looks of them, and needs more samples.

    Parameters
    ----------
    run : path or History
        Folder of a complete run, or what training returned.
    data : Federation, optional
        The data of the run; a folder's configuration loads them.
    own : {"bias", "head", "all"} or sequence of str
        What becomes the clients' own.
    temperature, penalty : float, optional
        Use these; both are needed where the data have no validation split.
    lr, steps : float and int, optional
        Of fine-tuning: use these; both are needed where the data have no validation split.
    device : str
        Where fine-tuning computes.
    trust : bool
        Load the code that the folder names; see :func:`equifed.load_predictor`.

    Examples
    --------
    >>> import equifed as ef
    >>> data = ef.load("heart-disease", validation=0.2)
    >>> clients = ef.simulate(data, "logistic", l2=0.01)
    >>> history = ef.train(ef.ScaffPD(ef.objectives.Average()), clients, rounds=5)
    >>> found = ef.personalise(history, data)
    >>> found.names, found.fitted_on[0]
    (('1.bias',), 'validation')
    """
    from equifed.models.own_part import choose_own

    history, predictor = _open(run, trust)
    data = _load(run, history, data)
    if predictor.clients != data.names:
        raise ValueError(
            f"The run's clients are {', '.join(predictor.clients[:5])}, the data's "
            f"{', '.join(data.names[:5])}; give the data that it was trained on."
        )
    if own == "all":
        if (temperature, penalty) != (None, None):
            raise ValueError(
                "temperature and penalty are of own biases; own='all' has lr and steps."
            )
        choice, told = fine_tune(predictor, data, lr, steps, device)
        sources = tuple("train" if size else "nothing" for size in data.train.sizes)
        return _compare(predictor, told, data, tuple(told.own), {"train": choice}, sources)
    if (lr, steps) != (None, None):
        raise ValueError(f"lr and steps are of fine-tuning, own='all', got own={own!r}.")
    fit = _Fit(predictor, data, choose_own(predictor.module, own))
    choices = _choose(fit, temperature, penalty)
    parts, fitted_on = [], []
    for i in range(len(data.names)):
        source = fit.source(i)
        parts.append(fit.of(i, source, choices.get(source)))
        fitted_on.append(source)
    told = replace(predictor, own=_stack(predictor, fit.names, parts))
    return _compare(predictor, told, data, fit.names, choices, tuple(fitted_on))


def _open(run: str | Path | History, trust: bool) -> tuple[History, Predictor]:
    if isinstance(run, History):
        return run, run.predictor(trust=trust)
    return History.load(run, model=False), load_predictor(run, trust=trust)


def _load(run: Any, history: History, data: Federation | None) -> Federation:
    """Return the run's data, or refuse others."""
    folder = history.folder if isinstance(run, History) else Path(run)
    if data is None:
        if folder is None or not (folder / CONFIG).exists():
            raise ValueError("The run does not say how its data are loaded; give data=.")
        data = load_data(RunConfig.read(folder / CONFIG).data)
    known = history.provenance.get("data", {})
    if folder is not None and (folder / RUN).exists():
        known = read_json(folder / RUN).get("data", known)
    wanted = known.get("sha256") if isinstance(known, Mapping) else None
    if wanted is not None and wanted != data.checksum():
        raise ValueError("These are other data than the run was trained on; give the same.")
    return data


@dataclass(frozen=True, eq=False)
class _Fit:
    predictor: Predictor
    data: Federation
    names: tuple[str, ...]

    def source(self, i: int) -> str:
        """Return where client i's own part is fitted."""
        held = self.data.validation
        if held is not None and held.sizes[i] >= ENOUGH:
            return "validation"
        return "train" if self.data.train.sizes[i] else "nothing"

    def read(self, i: int, split: Split) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of the own part's design, outputs and targets of a client's samples."""
        import torch

        from equifed.models.own_part import module_of, read_last_layer

        told, name = self.predictor, self.data.names[i]
        module = module_of(told.module, told.own, told.clients, name) if told.own else told.module
        inputs, targets = split.client(i)
        design, outputs = read_last_layer(
            module, self.names, lambda m: torch.as_tensor(told.run_module(m, inputs))
        )
        return design, outputs, torch.as_tensor(targets)

    def change(self, held: tuple[Tensor, Tensor, Tensor], choice: Choice) -> Tensor:
        """Return what the own part differs by from the shared one (q, k)."""
        from equifed.models.own_part import check_fit, fit_linear

        design, outputs, targets = held
        if not len(targets) or math.isinf(choice.penalty):
            return outputs.new_zeros(design.shape[1], outputs.shape[1])
        l2 = choice.penalty / len(targets)
        loss, t = check_fit(self.predictor.loss, l2), choice.temperature
        return fit_linear(design, outputs / t, targets, loss, l2) * t

    def of(self, i: int, source: str, choice: Choice | None) -> dict[str, Tensor]:
        """Return client i's own parameters by name."""
        from equifed.models.own_part import module_of, split_own

        told, name = self.predictor, self.data.names[i]
        module = module_of(told.module, told.own, told.clients, name) if told.own else told.module
        held = {n: module.get_parameter(n).detach().clone() for n in self.names}
        if source == "nothing" or choice is None:
            return held
        split = self.data.splits()[source]
        v = self.change(self.read(i, split), choice)
        moved = split_own(v, self.names, {n: p.shape for n, p in held.items()})
        return {n: held[n] + moved[n].to(held[n]) for n in self.names}


def _choose(fit: _Fit, temperature: float | None, penalty: float | None) -> dict[str, Choice]:
    """Return temperature and penalty for both kinds of fit, by the loss on validation samples."""
    for name, value in (("temperature", temperature), ("penalty", penalty)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be a number above 0, got {value}.")
    if temperature is not None and penalty is not None:
        return dict.fromkeys(("validation", "train"), Choice(temperature, penalty))
    if fit.data.validation is None or not len(fit.data.validation.targets):
        raise ValueError(
            "Temperature and penalty are chosen on validation samples, and these data have none: "
            "hold some out ([data.holdout] validation = 0.2), or give temperature= and penalty=."
        )
    values = fit.predictor.loss == "squared"
    warm = (temperature,) if temperature is not None else (1.0,) if values else TEMPERATURES
    tried = [Choice(t, c) for t, c in
             itertools.product(warm, (penalty,) if penalty is not None else PENALTIES)]  # fmt: skip
    tried.append(Choice(1.0, math.inf))
    held = [fit.read(i, fit.data.validation) for i in range(len(fit.data.names))]
    sources = {fit.source(i) for i in range(len(held))} - {"nothing"}
    out = {}
    for source in sorted(sources, reverse=True):
        mine = [i for i in range(len(held)) if fit.source(i) == source and len(held[i][2])]
        # Few or no validation samples of their own: what suits everybody's training samples.
        judged = mine if source == "validation" else [i for i, h in enumerate(held) if len(h[2])]
        scores = [_score(fit, source, judged, held, choice) for choice in tried]
        out[source] = tried[int(np.argmin(scores))]
    return out


def _score(
    fit: _Fit, source: str, clients: Sequence[int], held: Sequence[Any], choice: Choice
) -> float:
    """Return the mean over clients of the loss on validation samples that the fit has not used."""
    from equifed.models.own_part import check_fit, sample_losses

    loss, found = check_fit(fit.predictor.loss, 1.0), []
    for i in clients:
        design, outputs, targets = held[i]
        if source == "train":
            v = fit.change(fit.read(i, fit.data.train), choice)
            found.append(float(sample_losses(outputs + design @ v, targets, loss).mean()))
            continue
        order = Stream(0).at("folds", fit.data.names[i]).generator().permutation(len(targets))
        total = 0.0
        for fold in np.array_split(order, FOLDS):
            rest = np.setdiff1d(order, fold)
            v = fit.change((design[rest], outputs[rest], targets[rest]), choice)
            left = sample_losses(outputs[fold] + design[fold] @ v, targets[fold], loss)
            total += float(left.sum())
        found.append(total / len(targets))
    return float(np.mean(found)) if found else math.inf


def _stack(
    predictor: Predictor, names: Sequence[str], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return all clients' own parameters, those of training that stay among them."""
    import torch

    found = {name: torch.stack([part[name] for part in parts]) for name in names}
    return {**predictor.own, **found}


def _compare(
    before: Predictor, after: Predictor, data: Federation, names: tuple[str, ...],
    choices: Mapping[str, Choice | Tuned], fitted_on: tuple[str, ...],
) -> Personalised:  # fmt: skip
    """Measure both on the same test samples."""
    n, classes = len(data.names), data.classes is not None
    split = data.test
    metric = "" if split is None else "accuracy" if classes else "mse"
    values = np.full((2, n), np.nan)
    told: list[Interval | None] = [None] * n
    sizes = np.zeros(n, dtype=np.int64) if split is None else np.asarray(split.sizes)
    for i in np.flatnonzero(sizes):
        assert split is not None
        inputs, targets = split.client(int(i))
        old, new = (_score_samples(p, data.names[i], inputs, targets, classes)
                    for p in (before, after))  # fmt: skip
        values[:, i] = old.mean(), new.mean()
        if classes:
            joint = count_pairs(new > 0, old > 0, [len(old)])
            estimate, low, high = (float(v[0]) for v in newcombe_interval(joint))
            told[i] = Interval(estimate, low, high)
        else:
            told[i] = mean_interval(new - old)
    return Personalised(
        after, names, dict(choices), fitted_on, metric, "" if split is None else "test", sizes,
        values[0], values[1], tuple(told), _average([d for d in told if d is not None]),
    )  # fmt: skip


def _average(told: Sequence[Interval]) -> Interval | None:
    """Return the mean of independent differences; squares of the distances to limits add up."""
    if not told:
        return None
    low, high = (
        math.sqrt(sum((getattr(d, end) - d.estimate) ** 2 for d in told)) / len(told)
        for end in ("lower", "upper")
    )
    estimate = sum(d.estimate for d in told) / len(told)
    return Interval(estimate, estimate - low, estimate + high)


def _score_samples(
    predictor: Predictor, client: str, inputs: Any, targets: Any, classes: bool
) -> Losses:
    """Return 1 for every correct answer, or squared errors."""
    from equifed.models.own_part import module_of

    module = predictor.module
    if predictor.own:
        module = module_of(module, predictor.own, predictor.clients, client)
    outputs = predictor.run_module(module, inputs)
    if not classes:
        found: Losses = ((outputs - np.asarray(targets).reshape(outputs.shape)) ** 2).mean(1)
        return found
    chosen = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return np.asarray(chosen == np.asarray(targets), dtype=np.float64)


def describe(found: Personalised) -> str:
    """Return in words what was fitted and how it was chosen."""
    chosen = "; ".join(f"on {k} samples: {c}" for k, c in found.choices.items())
    if any(isinstance(one, Tuned) for one in found.choices.values()):
        return f"all parameters fine-tuned after training ({chosen})"
    return f"own part {', '.join(found.names)} fitted after training ({chosen})"


__all__ = ["Choice", "Personalised", "describe", "personalise"]
