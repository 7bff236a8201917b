"""One call: try what may serve the clients, choose on rows held out, say what it gained."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from equifed.contract.local import LocalSGD
from equifed.data import Federation
from equifed.data.curves import bend
from equifed.data.describe import Table
from equifed.data.split import refuse_any
from equifed.models.architectures import MODELS
from equifed.models.losses import outputs_for, resolve_loss
from equifed.models.predictor import Predictor
from equifed.privacy.clients import Privacy
from equifed.runs import network_fit, outcome
from equifed.runs.build import build_module, has_rare_class, load_data
from equifed.runs.candidates import BASE, SHARE, TRIED, Choice, choose, hold_out
from equifed.runs.config import ModelSettings, RunConfig, build_algorithm
from equifed.runs.private_fit import fit_privately
from equifed.runs.schema import AUTO, refuse_settings, settings
from equifed.training import History, files, is_complete, tables
from equifed.training.folder import refuse_existing

CHOICE, REPORT = "choice.json", "report.html"
# Written where nothing was said of local work: its step size is measured
WORK = {"lr": AUTO, "steps": 10, "batch_size": 50, "proximal": 0.0, "correction": 1.0}


@dataclass(frozen=True, eq=False, repr=False)
class Served:
    """What :func:`equifed.fit` found.

    Attributes
    ----------
    gain : str
        What that brought on test rows, for whom, and whether own models would serve all better.
    rows : list of dict
        The table as numbers.
    runs : dict of History
        The best candidate of every kind, solved on all rows but test rows; a network as trained.
    """

    chosen: Choice
    gain: str
    rows: list[dict[str, Any]]
    runs: dict[str, History]
    seed: int

    @property
    def choice(self) -> str:
        """What was chosen, from what, by how much, on which rows."""
        return str(self.chosen)

    @property
    def notes(self) -> tuple[str, ...]:
        """What else should be known: clients of one class, few rows."""
        return self.chosen.notes

    @property
    def history(self) -> History:
        """The run of the chosen model, with its certificate."""
        return self.runs[self.chosen.name]

    @property
    def sites(self) -> list[dict[str, Any]]:
        """Every client's mean prediction beside what was observed, and its own threshold."""
        details = self.history.details
        found = zip(self.history.names, () if details is None else details.clients, strict=False)
        return [{"client": n, "n": c.size, **c.decision} for n, c in found if c and c.decision]

    @property
    def table(self) -> Table:
        """Every kind of candidate on held-out rows (chosen on) and test rows (read once)."""
        return outcome.tabulate(self.rows)

    def __repr__(self) -> str:
        return "\n".join([self.choice, self.gain, *self.notes, "", str(self.table)])

    def predictor(self) -> Predictor:
        """Return what predicts, for each client with its own part or model."""
        return self.history.predictor()

    def report(self, path: str | Path) -> Path:
        """Write the page: the chosen model beside the average, and every candidate."""
        from equifed.report import as_methods, build, write_report

        page = build(as_methods(self.runs), baseline=BASE, chosen=self.chosen.name)
        return write_report(page, path)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a run folder with the model, which ``equifed predict`` takes, and the choice."""
        folder = self.history.save(path, overwrite=overwrite)
        files.write_file(folder / CHOICE, files.seal(self.to_dict()))
        return folder

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        told = self.chosen.to_dict() | {"gain": self.gain, "candidates": self.rows}
        return told | {"seed": self.seed, "certificate": self.history.describe_certificate(),
                       "sites": self.sites}  # fmt: skip


def fit(
    data: Any, *, client: str | None = None, target: str | None = None, test: float = 0.25,
    seed: int = 0, keep_own: bool = False, out: str | Path | None = None, overwrite: bool = False,
    tell: Callable[[str], None] | None = None, privacy: Privacy | None = None,
    model: nn.Module | str | None = None, rounds: int | None = None, local: LocalSGD | None = None,
    curves: bool = False, **columns: Any,
) -> Served:  # fmt: skip
    """Fit a model that serves all clients: solve candidates, choose on held-out rows, test once.

    Tried are one model for the average, fair objectives (chi-square) along a path of strengths, an
    own bias of every client along a path of penalties, and both, each with four penalties. The one
    with the smallest mean loss of the clients on held-out rows is taken. It is solved again on all
    rows but test rows, with a proof; then test rows are read.

    Parameters
    ----------
    data : path, DataFrame, mapping of columns or Federation
        A table, or a federation: of arrays, too, such as the features of a frozen network.
    client, target : str
        Columns of a table: whose row it is, and what is predicted.
    test : float
        Share of every client's rows for the test, where there is no test split.
    seed : int
        Seed of what is held out.
    keep_own : bool
        A client whose own model has at most half the loss of the chosen one, on at least 10
        held-out rows, keeps its own model. Such clients are named in any case.
    out : path, optional
        Folder for the run, its report and what was tried: an interrupted fit that is started again
        with the same folder continues, and ends with the same result.
    overwrite : bool
        Replace what the folder holds.
    tell : callable, optional
        Is told what is being solved.
    privacy : Privacy, optional
        Rows for training and validation answer with noise, from one budget: few shared models are
        tried, for the average and fair, each with ``privacy.rounds`` rounds. They and the losses
        that choose are paid for; the chosen one is not solved again, and has no proof.
    model : torch.nn.Module or str, optional
        A network, as for :func:`equifed.simulate`: it is trained for the average and for two fair
        objectives, and each is tried with own biases fitted after training, too. Linear models are
        solved as without it.
    rounds : int, optional
        Of every training of a network; 100.
    local : LocalSGD, optional
        Work of every client in a round of a network; by default its step size is measured.
    curves : bool
        Try every candidate with bent columns, too: the slope in a number may change at quartiles.
    **columns
        What else :meth:`equifed.Federation.from_table` takes: ``features``, ``keep_together``,
        ``time``, ``categorical``, ``task``, ``validation``, ...

    Examples
    --------
    >>> import equifed as ef
    >>> served = ef.fit(ef.load("heart-disease"), seed=1)
    >>> served.history.names == served.predictor().clients
    True
    """
    federation = read_data(data, client, target, test, seed, columns)
    network = network_fit.is_network(model, federation)
    _check_asked(network, rounds, local, privacy, keep_own, curves)
    if federation.test is not None and not federation.test.offsets[-1]:  # too few rows for any
        federation = replace(federation, test=None)
    folder = None if out is None else Path(out)
    if folder is not None:
        _open(folder, overwrite)
    say, untested = tell or (lambda _: None), replace(federation, test=None)
    finish: Callable[[], outcome.Found]
    if privacy is not None:
        choice, finish = fit_privately(federation, privacy, seed, say, keep_own)
    elif network:
        given = cast(Any, model), rounds, local, seed, folder, say
        choice, runs = network_fit.try_networks(untested, *given)
        more = ["auroc"] if has_rare_class(federation) else []
        finish = partial(outcome.finish_trained, federation, choice, runs, more)
    else:
        apart = any(columns.get(key) for key in ("keep_together", "time", "split"))
        random = not (apart or isinstance(data, Federation))
        choice = choose(untested, seed, folder, say, random, keep_own, curves)
        bent = bend(untested, choice.bent) if choice.point.curves else untested
        cuts = outcome.choose_thresholds(hold_out(bent, seed, random)[0], choice.point)
        finish = partial(outcome.finish, federation, choice, cuts)
    if folder is not None:  # no test row is read before
        files.write_file(folder / CHOICE, files.seal(choice.to_dict()))
    served = Served(choice, *finish(), seed)
    if folder is not None:
        served.save(folder, overwrite=True)
        if federation.divided is not None and privacy is None:
            files.write_file(folder / tables.SPLIT, federation.divided.encode())
        served.report(folder / REPORT)
    return served


def _check_asked(
    network: bool, rounds: int | None, local: Any, privacy: Any, keep_own: bool, curves: bool
) -> None:
    """Refuse what does not go with a network, or with a model that is solved."""
    bends = "curves=True is for linear models without privacy=: a network bends by itself."
    private, given = privacy is not None, rounds is not None or local is not None
    refuse_any(
        (curves and (network or private), bends),
        (given and not network, "rounds and local are of a network (model=); others are solved."),
        (network and private, "fit takes no network under privacy=; train one: equifed.train."),
        (network and keep_own, "keep_own is about linear own models; leave it out with a network."),
    )
    if local is not None and not isinstance(local, LocalSGD):
        raise TypeError(f"local must be ef.LocalSGD(...), got {type(local).__name__}.")


def read_data(
    data: Any, client: str | None, target: str | None, test: float, seed: int,
    columns: dict[str, Any],
) -> Federation:  # fmt: skip
    """Return the federation to fit, with test rows."""
    if not isinstance(data, Federation):
        if client is None or target is None:
            raise ValueError(
                "A table needs client=, the column that says whose row it is, and target=, what is "
                "predicted."
            )
        held = {"test": test, "validation": SHARE * (1 - test), "seed": seed}
        held = {} if columns.get("split") else held
        return Federation.from_table(data, client, target, **{**held, **columns})
    given = {k: v for k, v in {"client": client, "target": target, **columns}.items() if v}
    tokens = data.train.inputs.dtype.kind == "i"
    refuse_any(
        (given, f"A federation has its clients and targets; leave out {', '.join(given)}."),
        (data.layout is not None, f"fit takes samples of one array; these are {data.layout}."),
        (tokens, "fit takes samples of numbers; these are tokens."),
    )
    return data.split(test=test, seed=seed) if data.test is None and test else data


def _open(folder: Path, overwrite: bool) -> None:
    """Make the folder, or refuse one that holds something else."""
    files.refuse_links(folder)  # what was tried, and is read again, may come from somebody else
    ended = not (folder / CHOICE).exists() or is_complete(folder)  # else killed while saving
    refuse_existing(folder, overwrite or not ended)
    if overwrite:
        shutil.rmtree(folder / TRIED, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def fit_config(config: RunConfig, out: Path, **more: Any) -> Served:
    """Choose for the data and the model of a configuration; of its algorithm the work is taken.

    ``more`` is as for :func:`equifed.fit`. A network with settings of the catalogue is in the
    folder with them, for ``equifed predict``.
    """
    shared, usual = settings(ModelSettings), vars(ModelSettings())
    odd = [key for key in shared if config.model.get(key, usual[key]) != usual[key]]
    private = config.privacy is not None
    refuse_settings(
        (odd, f"model.{', '.join(odd)}: fit tries penalties and own parts; leave this out"),
        (private, "privacy: fit takes it from --epsilon and the bounds, for a table"),
    )
    data = load_data(config.data)
    outputs = outputs_for(data, resolve_loss(AUTO, data.classes))
    module = build_module(config, data.input_shape, outputs)
    if not network_fit.is_network(module, data):
        return fit(data, seed=config.seed, out=out, **more)
    local, told = None, config.algorithm.get("local")
    if told not in (None, WORK):
        why = "fit measures it for its usual work; give a number"
        refuse_settings((told["lr"] == AUTO, f"algorithm.local.lr: {why}"))
        algorithm: Any = build_algorithm(config.algorithm, data.train.sizes.tolist())
        local = algorithm.local
    given: dict[str, Any] = {"rounds": config.rounds, "local": local, **more}
    served = fit(data, seed=config.seed, out=out, model=module, **given)
    name = config.model["name"]
    if name in MODELS:
        params = {key: value for key, value in config.model.items() if key not in ("name", *shared)}
        for run in served.runs.values():
            run.provenance |= {"model_name": name, "model_params": params}
            run.provenance["samples"] |= {"outputs": outputs}
        served.save(out, overwrite=True)
    return served
