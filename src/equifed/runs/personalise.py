"""A client's own part, or its own model, after training: before and after on test samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from equifed.contract.arrays import Index, Losses
from equifed.data.federation import Federation
from equifed.metrics import Interval, mean_interval
from equifed.metrics.paired import count_pairs, newcombe_interval
from equifed.models.own_part import choose_own
from equifed.models.predictor import Predictor
from equifed.runs.build import load_data
from equifed.runs.config import RunConfig
from equifed.runs.fine_tune import Choice, fine_tune, fit_last_layer
from equifed.runs.load import PERSONAL_PARTS, PERSONALISED, load_predictor
from equifed.training.files import digest, read_json, seal, write_file
from equifed.training.history import History
from equifed.training.tables import CONFIG, MODEL, RUN


@dataclass(frozen=True, eq=False)
class Personalised:
    """A finished model with an own part for every client, and what that changed."""

    predictor: Predictor
    names: tuple[str, ...]
    choices: Mapping[str, Choice]  # for own parts fitted to validation or to train samples
    fitted_on: tuple[str, ...]  # of each client: "validation", "train" or "nothing"
    metric: str  # "" without a test split
    split: str
    sizes: Index  # test samples of each client
    before: Losses
    after: Losses
    differences: tuple[Interval | None, ...]  # after minus before on the same samples
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
        path = Path(folder)
        parts = save({name: part.contiguous() for name, part in self.predictor.own.items()})
        held = {"parts": digest(parts), "model": digest((path / MODEL).read_bytes())}
        write_file(path / PERSONAL_PARTS, parts)
        write_file(path / PERSONALISED, seal({**self.to_dict(), **held}))
        return path / PERSONALISED


def describe(found: Personalised) -> str:
    """Return in words what was fitted and how it was chosen."""
    chosen = "; ".join(f"on {k} samples: {c}" for k, c in found.choices.items())
    if any("steps" in one.settings for one in found.choices.values()):
        return f"all parameters fine-tuned after training ({chosen})"
    return f"own part {', '.join(found.names)} fitted after training ({chosen})"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
    predictor, data = _open(run, data, trust)
    if own == "all":
        if (temperature, penalty) != (None, None):
            raise ValueError(
                "temperature and penalty are of own biases; own='all' has lr and steps."
            )
        found = fine_tune(predictor, data, lr, steps, device)
        return _compare(predictor, data, tuple(found[0].own), *found)
    if (lr, steps) != (None, None):
        raise ValueError(f"lr and steps are of fine-tuning, own='all', got own={own!r}.")
    names = choose_own(predictor.module, own)
    found = fit_last_layer(predictor, data, names, temperature, penalty)
    return _compare(predictor, data, names, *found)


def _open(
    run: str | Path | History, data: Federation | None, trust: bool
) -> tuple[Predictor, Federation]:
    """Return what predicts, and the run's data; refuse others."""
    if isinstance(run, History):
        history, folder, predictor = run, run.folder, run.predictor(trust=trust)
    else:
        folder, predictor = Path(run), load_predictor(run, trust=trust)
        history = History.load(run, model=False)
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
    if predictor.clients != data.names:
        raise ValueError(
            f"The run's clients are {', '.join(predictor.clients[:5])}, the data's "
            f"{', '.join(data.names[:5])}; give the data that it was trained on."
        )
    return predictor, data


# -- before and after -------------------------------------------------------------------------


def _compare(
    before: Predictor, data: Federation, names: tuple[str, ...], after: Predictor,
    choices: Mapping[str, Choice], fitted_on: tuple[str, ...],
) -> Personalised:  # fmt: skip
    """Measure both on the same test samples."""
    n, classes, split = len(data.names), data.classes is not None, data.test
    values, told = np.full((2, n), np.nan), list[Interval | None]([None] * n)
    sizes = np.zeros(n, dtype=np.int64) if split is None else np.asarray(split.sizes)
    for i in map(int, np.flatnonzero(sizes)):
        assert split is not None
        inputs, targets = split.client(i)
        old, new = (_score_rows(p, p.module_for(data.names[i]), inputs, targets)
                    for p in (before, after))  # fmt: skip
        values[:, i] = old.mean(), new.mean()
        if classes:
            joint = count_pairs(new > 0, old > 0, [len(old)])
            told[i] = Interval(*(float(v[0]) for v in newcombe_interval(joint)))
        else:
            told[i] = mean_interval(new - old)
    metric = "" if split is None else "accuracy" if classes else "mse"
    return Personalised(
        after, names, dict(choices), fitted_on, metric, "" if split is None else "test", sizes,
        values[0], values[1], tuple(told), _average([d for d in told if d is not None]),
    )  # fmt: skip


def _score_rows(predictor: Predictor, module: Any, inputs: Any, targets: Any) -> Losses:
    """Return 1 for every correct answer of a module, or squared errors."""
    outputs = predictor.run_module(module, inputs)
    if predictor.classes is None:
        found: Losses = ((outputs - np.asarray(targets).reshape(outputs.shape)) ** 2).mean(1)
        return found
    chosen = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return np.asarray(chosen == np.asarray(targets), dtype=np.float64)


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
