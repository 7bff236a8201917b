"""One run of a network table: what it is, how it is carried out, and the file that it leaves."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equifed import Federation, LocalSGD
from equifed.contract import MissingClients, Stream
from equifed.runs import RunConfig, build_run, merge_tables
from equifed.training import TrainingError
from experiments.harness.experiment import Settings

Array = NDArray[np.float64]
BEGUN = "begun.csv"
ALONE = "alone"
"""The method that trains every client by itself."""
HALVINGS = 3
"""How often a client that trains alone and diverges takes half its step size."""
OWN_KINDS = {"bias": "own bias after training", "shares": "own shares",
             "offsets": "own shares and offsets", "all": "fine-tuned"}  # fmt: skip
"""What becomes each client's own after training, in words."""
MEASURED = ("shares", "offsets", "all")
"""Of these the kinds that are fitted to training samples alone."""
MAJORITY = "test, majority class"
FOLDS = 5
BASE, MOMENTUM, FAIR, OURS = "FedAvg", "FedAvg, server momentum", "tuned SCAFF-PD", "ours"
PRINTED = "SCAFF-PD as printed"
BESIDE = (PRINTED, *(f"{m}, server momentum" for m in ("AFL", "q-FFL", "DRFA")))
"""What stands beside our form of SCAFF-PD: the paper's, and rivals with its server momentum."""
MEAN, FAIR_MEAN = f"{MOMENTUM}, averaged", f"{FAIR}, averaged"
PLAIN_OURS = f"{OURS} with FedAvg"
"""All of ours but the fair objective and the correction for drift."""
COPIES = "copies"
"""What follows the name of a method that also sees distorted copies of training images."""
ROLES = {MEAN: PLAIN_OURS, FAIR_MEAN: OURS}
ROLES |= {f"{method}, {COPIES}": f"{role}, {COPIES}" for method, role in ROLES.items()}
"""What methods are called with the kind of own part that validation samples prefer."""
Tuned = Mapping[str, Mapping[str, Any]]
"""What validation samples chose, by kind of own part: local steps, own shares, trust in offsets."""


@dataclass(frozen=True)
class Task:
    """One run: its method, settings in words, configuration and file.

    With ``personalise`` its file also has the accuracies with these kinds of own parts, fitted
    after training, and those of saying what is most frequent among a client's training samples. A
    try's file has them on validation samples: those of own biases on samples that they were not
    fitted to, those of fine-tuning with the steps that these samples chose; the chosen runs take
    these steps. ``fit`` names a function of the experiment's own that fits the measured kinds, and
    its settings; fine-tuning needs none.
    """

    method: str
    words: str
    table: Settings
    seed: int
    path: Path
    personalise: tuple[str, ...] = ()
    tuned: Tuned | None = None
    fit: Settings | None = None

    def __str__(self) -> str:
        return f"{self.method}, {self.words}, seed {self.seed}, {self.table['rounds']} rounds"

    @property
    def id(self) -> str:
        """Which run it is; the machine that it runs on is no part of that."""
        table = {
            key: value for key, value in self.table.items() if key not in ("engine", "threads")
        }
        table["model"] = {k: v for k, v in self.table.get("model", {}).items() if k != "patches"}
        # A loss scale of 1 is what runs had before strengths were relative to one.
        text = json.dumps([_without_unit_scale(table), self.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def complete(self) -> bool:
        """Whether its file is there; a file of another run with the same name is refused."""
        if not self.path.exists():
            return False
        if json.loads(self.path.read_text(encoding="utf-8"))["id"] != self.id:
            raise ValueError(
                f"{self.path} holds a run with other settings; choose another folder, or remove it."
            )
        return True


def _without_unit_scale(table: dict) -> dict:
    return {
        key: _without_unit_scale(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if (key, value) != ("scale", 1.0)
    }


@dataclass(frozen=True)
class Result:
    """What a run left: accuracies and numbers of samples of all clients, by split."""

    names: list[str]
    accuracy: dict[str, Array]
    sizes: dict[str, Array]
    seconds: float
    failed: str = ""
    tuned: Tuned | None = None


def own_row(method: str, kind: str, preferred: Mapping[str, str]) -> str:
    """Return what a method is called with an own part of some kind."""
    if preferred.get(method) == kind and method in ROLES:
        return ROLES[method]
    return f"{method}, {OWN_KINDS[kind]}"


def add_own_rows(
    results: Mapping[str, Mapping[int, Result]], preferred: Mapping[str, str]
) -> dict[str, dict[int, Result]]:
    """Return the results and, beside them, those with own parts fitted after training.

    ``preferred`` is the kind that validation samples prefer, by method.
    """
    out = {method: dict(runs) for method, runs in results.items()}
    for method, runs in results.items():
        for kind, words in OWN_KINDS.items():
            split = f"test, {words}"
            fitted = {s: replace(r, accuracy={"test": r.accuracy[split]},
                                 sizes={"test": r.sizes[split]})
                      for s, r in runs.items() if split in r.accuracy}  # fmt: skip
            if fitted:
                out[own_row(method, kind, preferred)] = fitted
    return out


def with_samples(one: Result, split: str = "test") -> Result:
    """Return a result's test accuracies (or a split's as such), of the clients that have any."""
    sizes = one.sizes[split]
    names = [name for name, size in zip(one.names, sizes, strict=True) if size > 0]
    values = {"test": one.accuracy[split][sizes > 0]}
    return Result(names, values, {"test": sizes[sizes > 0]}, one.seconds)


def carry_out(task: Task) -> None:
    """Train, and write the file; one without any accuracy if training failed."""
    task.path.parent.mkdir(parents=True, exist_ok=True)
    with (task.path.parent / BEGUN).open("a", encoding="utf-8") as begun:
        begun.write(f"{task.method}\t{task.path.stem}\n")
    torch.compiler.reset()  # it compiles a function eight times in a process, then no more
    started, failed = time.perf_counter(), ""
    told: dict[str, Any] = {}
    tuned: Tuned | None = None
    table = merge_tables(task.table, {"evaluate": {"every": task.table["rounds"]}})
    built = build_run(RunConfig.from_dict(table))
    try:
        if task.method == ALONE:
            told = _train_alone(built, task)
        else:
            told, tuned = _train(built, task)
    except (TrainingError, MissingClients) as error:  # the latter of clients that train alone
        failed = str(error)
    seconds = time.perf_counter() - started
    write_result(task, list(built.federation.names), told, seconds, failed, tuned)


def _train(built: Any, task: Task) -> tuple[dict[str, Any], Tuned | None]:
    history, data = built.train(), built.federation
    records = [history.last("accuracy", split) for split in built.config.evaluate.splits]
    told = {r.split: _told(r.values, r.sizes) for r in records if r is not None}
    where = task.table.get("engine", {}).get("device", "cpu")
    chosen = "test" in told
    if "bias" in task.personalise:
        fitted = history.personalise(data) if chosen else None
        found = (fitted.after, fitted.sizes) if fitted else _held_out(history, data)
        told[f"{'test' if chosen else 'validation'}, {OWN_KINDS['bias']}"] = _told(*found)
    trained = copy.copy(history)
    trained.provenance = {}  # a try's validation samples stand in the place of test samples
    if built.config.data.get("copies"):  # own parts are fitted to images, and count them once
        plain = merge_tables(built.config.to_dict(), {"data": {"copies": 0}})
        data = build_run(RunConfig.from_dict(plain)).federation
    shown = data if chosen else replace(data, test=data.validation)
    choices: dict[str, Mapping[str, Any]] = dict(task.tuned or {})
    for kind in (k for k in MEASURED if k in task.personalise):
        how = choices.get(kind) if chosen else None
        choices[kind], values, sizes = _fit(task, trained, shown, kind, how, where)
        told[f"{'test' if chosen else 'validation'}, {OWN_KINDS[kind]}"] = _told(values, sizes)
    if task.personalise and chosen:
        sizes = data.splits()["test"].sizes
        told[MAJORITY] = _told(_say_the_most_frequent(data), sizes)
    return told, choices or None


def _fit(
    task: Task, history: Any, data: Federation, kind: str, how: Mapping[str, Any] | None, where: str
) -> tuple[Mapping[str, Any], Array, NDArray[Any]]:
    """Return what was chosen, or ``how``, and accuracies and numbers of test samples with it."""
    if task.fit is not None:
        module, _, name = task.fit["name"].partition(":")
        given = {key: value for key, value in task.fit.items() if key != "name"}
        fit = getattr(importlib.import_module(module), name)
        return fit(history, data, kind, how, where, **given)  # type: ignore[no-any-return]
    found = history.personalise(data, own="all", device=where, **(how or {}))
    return dict(found.choices["train"].settings), found.after, found.sizes


def _held_out(history: Any, data: Federation) -> tuple[Array, NDArray[Any]]:
    """Return accuracies on validation samples with own biases fitted to the other ones."""
    held = data.splits()["validation"]
    parts = [Stream(0).at("parts", name).generator().permutation(size) % FOLDS
             for name, size in zip(data.names, held.sizes, strict=True)]  # fmt: skip
    correct, trained = np.zeros(len(data.names)), copy.copy(history)
    trained.provenance = {}  # of the same training samples, the others dealt anew
    for k in range(FOLDS):
        fitted, tested = (held.take([np.flatnonzero((part == k) == same) for part in parts])
                          for same in (False, True))  # fmt: skip
        found = trained.personalise(replace(data, validation=fitted, test=tested))
        correct += np.nan_to_num(found.after) * found.sizes
    sizes = np.asarray(held.sizes)
    return np.divide(correct, sizes, out=np.full(len(sizes), np.nan), where=sizes > 0), sizes


def _say_the_most_frequent(data: Federation) -> Array:
    train, test = data.train, data.splits()["test"]
    said = [np.bincount(train.client(i)[1]).argmax() for i in range(len(data.names))]
    held = [test.client(i)[1] for i in range(len(data.names))]
    return np.array([np.mean(y == k) if len(y) else math.nan
                     for y, k in zip(held, said, strict=True)])  # fmt: skip


def _train_alone(built: Any, task: Task) -> dict[str, Any]:
    """Let every client take the local steps of the algorithm from one start, without a server.

    A client whose network diverges, which it sees itself, takes half the step size; a try fails.
    """
    clients, work = built.clients, LocalSGD(**task.table["algorithm"]["local"])
    x, stream = clients.initial(Stream(task.seed).at(ALONE)), Stream(task.seed).at(ALONE, "local")
    (split,) = task.table.get("evaluate", {}).get("splits", ["test"])
    halvings = 0 if split == "validation" else HALVINGS
    values = []
    for i in range(len(clients.names)):
        client = clients.subset(np.array([i]))
        for k in range(halvings + 1):
            try:
                moved = client.local_steps(x, replace(work, lr=work.lr / 2**k), stream)
                break
            except MissingClients:
                if k == halvings:
                    raise
        (found,) = clients.evaluate(x - moved.displacement.weighted_sum(np.ones(1)), (split,))
        values.append(found.metrics["accuracy"][i])
    return {split: _told(np.array(values), found.sizes)}


def _told(values: Array, sizes: NDArray[Any]) -> dict[str, Any]:
    known = [None if math.isnan(v) else v for v in values.tolist()]
    return {"accuracy": known, "sizes": sizes.tolist()}


def write_result(
    task: Task,
    names: list[str],
    told: Mapping[str, Any],
    seconds: float,
    failed: str = "",
    tuned: Tuned | None = None,
) -> None:
    """Write the file of a run, whole or not at all."""
    record = {"method": task.method, "settings": task.words, "seed": task.seed, "id": task.id,
              "rounds": task.table.get("rounds"), "seconds": round(seconds, 2), "failed": failed,
              "names": names, "splits": told}  # fmt: skip
    if tuned is not None:
        record["tuned"] = tuned
    draft = task.path.with_suffix(f".{os.getpid()}.part")
    draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
    draft.replace(task.path)


def read_result(path: Path) -> Result:
    """Return what a run left."""
    record = json.loads(path.read_text(encoding="utf-8"))
    splits = record["splits"]
    accuracy = {k: np.array(v["accuracy"], dtype=np.float64) for k, v in splits.items()}
    sizes = {k: np.array(v["sizes"], dtype=np.float64) for k, v in splits.items()}
    return Result(record["names"], accuracy, sizes, record["seconds"], record["failed"],
                  record.get("tuned"))  # fmt: skip
