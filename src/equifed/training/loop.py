"""The only loop over rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from equifed.contract.algorithm import AnyAlgorithm, Info, Wrappable
from equifed.contract.arrays import Vector
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.evaluation import Evaluator, KnowsFeatures
from equifed.contract.streams import Stream
from equifed.training.folder import RunFolder
from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.warnings import check_finite, find_warnings

CHECKPOINT_SECONDS = 2.0
"""Least time between two checkpoints; a kill costs at most this and one round."""


class TrainingError(RuntimeError):
    """Training cannot go on; the last good state is saved."""


class Callback:
    """Told what happens; the progress bar and trackers are such. Every method may be left out."""

    def start(self, history: History, rounds: int) -> None:
        """Hear that training begins, or begins again with a history."""

    def round(self, record: RoundRecord, info: Info) -> None:
        """Hear that a round ended."""

    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        """Hear that the model was evaluated after a round."""

    def event(self, event: dict[str, Any]) -> None:
        """Hear that a client was quarantined, a run resumed or stopped."""

    def end(self, history: History) -> None:
        """Hear that training ended."""


StopRule = Callable[[History], str | None]
"""Looks at the history after a round and returns why to stop, or None."""


@dataclass(frozen=True)
class MissingPolicy:
    """What to do about clients that give no usable answer.

    ``"continue"`` goes on with the others in that round as long as ``quorum`` of all clients are
    left; ``"fail"`` stops.
    """

    policy: Literal["continue", "fail"] = "continue"
    quorum: float = 0.0


def train(
    algorithm: AnyAlgorithm,
    clients: Clients,
    *,
    rounds: int,
    seed: int = 0,
    x: Vector | None = None,
    evaluate: Sequence[str] | Evaluator = (),
    every: int = 1,
    stop: Sequence[StopRule] = (),
    callbacks: Sequence[Callback] = (),
    missing: MissingPolicy = MissingPolicy(),  # noqa: B008 - a frozen value
    folder: RunFolder | None = None,
    resume: bool = False,
) -> History:
    """Run an algorithm on clients and record what happens.

    Parameters
    ----------
    algorithm : Algorithm
        What to run.
    clients : Clients
        On whom, as an engine presents them.
    rounds : int
        How many rounds at most.
    seed : int
        Seed of every draw: the model's start, who takes part, the minibatches.
    x : Vector, optional
        Model to start from; freshly initialised if not given.
    evaluate : sequence of str, or callable
        Splits on which the clients measure the model before the first round and after every
        ``every``-th and the last one; or whatever else measures a model.
    every : int
        Rounds from one evaluation to the next.
    stop : sequence of callables
        Reasons to stop early.
    callbacks : sequence of Callback
        Who wants to be told.
    missing : MissingPolicy
        What to do about clients that give no usable answer.
    folder : RunFolder, optional
        Where to write tables and checkpoints; must have been created, or hold a run to resume.
    resume : bool
        Go on from the folder's newest checkpoint.

    Returns
    -------
    History
        With the final model in ``parameters``.
    """
    if isinstance(evaluate, str):
        evaluate = (evaluate,)
    if isinstance(algorithm, Wrappable):
        algorithm = algorithm.wrapped()
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}.")
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}.")
    return _Training(
        algorithm, clients, rounds, Stream(seed), evaluate, every, stop, callbacks, missing, folder
    ).run(x, resume)


@dataclass
class _Training:
    algorithm: AnyAlgorithm
    clients: Clients
    rounds: int
    stream: Stream
    evaluate: Sequence[str] | Evaluator
    every: int
    stop: Sequence[StopRule]
    callbacks: Sequence[Callback]
    missing: MissingPolicy
    folder: RunFolder | None

    def __post_init__(self) -> None:
        self.history, self.group = History(tuple(self.clients.names)), self.clients.group()

    def run(self, x: Vector | None, resume: bool) -> History:
        x = self.clients.initial(self.stream.at("initial")) if x is None else x
        state, done = self.algorithm.init(self.clients, x), 0
        if resume:
            state, done = self._resume(state)
        for callback in self.callbacks:
            callback.start(self.history, self.rounds)
        if done == 0 and not resume:
            self._evaluate(0, state)
            self._save(0, state)
        reason = self._reason_to_stop() if done else None  # it may have been killed while stopping
        for r in range(done + 1, self.rounds + 1):
            if reason is not None:
                break
            state, info = self._round(r, state)
            if r % self.every == 0:
                self._measure(r, state, info)
            reason = self._reason_to_stop()
            last = reason is not None or r == self.rounds
            if last and r % self.every != 0:
                self._measure(r, state, info)
            if last or (self.folder is not None and self.folder.due(CHECKPOINT_SECONDS)):
                self._save(r, state)
        return self._end(state, reason)

    def _check_end(self, last: int) -> None:
        """Refuse a model that is not finite, and record what else is wrong with the run."""
        wrong = check_finite(self.history.parameters or {})
        if wrong is not None:
            self._event({"event": "stopped", "round": last, "reason": wrong})
            raise TrainingError(f"After round {last} {wrong}")
        told = self.clients if isinstance(self.clients, KnowsFeatures) else None
        scales = None if told is None else told.feature_scales()
        for sentence in find_warnings(self.history, scales):
            self._event({"event": "warning", "round": last, "reason": sentence})

    def _reason_to_stop(self) -> str | None:
        reason = next(filter(None, (rule(self.history) for rule in self.stop)), None)
        if self.stop and self.group is not None:  # clocks differ: all stop when the first one does
            reason = self.group.from_first(reason or "") or None
        return reason

    def _measure(self, r: int, state: Any, info: Info) -> None:
        self.history.weights[r] = info.weights
        if self.folder is not None:
            self.folder.weights(r, info.weights)
        self._evaluate(r, state)

    def _round(self, r: int, state: Any) -> tuple[Any, Info]:
        started, before = time.perf_counter(), self.clients.traffic.totals()
        try:
            new, info = self._with_those_left(r, state)
        except TrainingError as error:
            self._event({"event": "stopped", "round": r, "reason": str(error)})
            self._save(r - 1, state)
            raise
        after = self.clients.traffic.totals()
        exchanges, up, down = (b - a for a, b in zip(before, after, strict=True))
        cost = (exchanges, up, down, time.perf_counter() - started)
        record = RoundRecord(r, info.objective, *cost, info.numbers, self._participants(info))
        self.history.rounds.append(record)
        if self.folder is not None:
            self.folder.round(record)
        for callback in self.callbacks:
            callback.round(record, info)
        self._notes(r, info)
        return new, info

    def _notes(self, r: int, info: Info) -> None:
        """Record what the algorithm has to say, each thing once in a run."""
        said = {event["reason"] for event in self.history.events if event["event"] == "note"}
        for note in info.notes:
            if note not in said:
                self._event({"event": "note", "round": r, "reason": note})

    def _with_those_left(self, r: int, state: Any) -> tuple[Any, Info]:
        """Repeat the round without those who give no usable answer, until the others all do."""
        left = self.clients.index
        while True:
            everybody = len(left) == len(self.clients.index)
            present = self.clients if everybody else self.clients.subset(left)
            try:
                new, info = self.algorithm.round(state, present, self.stream.at("round", r))
                return new, info if info.index is not None else replace(info, index=present.index)
            except MissingClients as lost:
                for i, reason in lost.reasons.items():
                    told = {"round": r, "client": self.clients.names[i], "reason": reason}
                    self._event({"event": "quarantine", **told})
                left = np.setdiff1d(left, np.fromiter(lost.reasons, dtype=np.int64))
                self._check_quorum(r, len(left), lost)

    def _participants(self, info: Info) -> tuple[int, ...] | None:
        """Return who took part in a round; None when all did, which need not be written down."""
        if info.index is None or len(info.index) == len(self.clients.names):
            return None
        return tuple(int(i) for i in info.index)

    def _check_quorum(self, r: int, left: int, lost: MissingClients) -> None:
        everybody = len(self.clients.names)
        if self.missing.policy == "fail":
            raise TrainingError(
                f"Round {r}: {lost}. The policy for missing clients is 'fail'."
            ) from lost
        if left == 0:
            raise TrainingError(
                f"Round {r}: no client gave a usable answer ({lost}). If training diverged, use "
                "smaller step sizes; the model of the round before is saved."
            ) from lost
        if left < self.missing.quorum * everybody:
            raise TrainingError(
                f"Round {r}: {left} of {everybody} clients are left, fewer than the quorum of "
                f"{self.missing.quorum:.0%} ({lost})."
            ) from lost

    def _evaluate(self, r: int, state: Any) -> None:
        if not self.evaluate:
            return
        x = self.algorithm.model(state)
        given = self.evaluate
        found = given(x) if callable(given) else self.clients.evaluate(x, given)
        records = self.history.add_evaluation(r, found)
        if self.folder is not None:
            self.folder.evaluation(records)
        for callback in self.callbacks:
            callback.evaluation(r, records)

    def _event(self, event: dict[str, Any]) -> None:
        self.history.events.append(event)
        if self.folder is not None:
            self.folder.event(event)
        for callback in self.callbacks:
            callback.event(event)

    def _save(self, r: int, state: Any) -> None:
        if self.folder is not None:
            self.folder.hits(self.history.hits)
            self.folder.save(r, state)

    def _resume(self, template: Any) -> tuple[Any, int]:
        if self.folder is None:
            raise ValueError("resume needs a run folder.")
        done, state, self.history = self.folder.restore(template)
        self._event({"event": "resume", "round": done})
        self._save(done, state)
        return state, done

    def _end(self, state: Any, reason: str | None) -> History:
        last = self.history.rounds[-1].round
        self.history.parameters = self.clients.parameters(self.algorithm.model(state))
        self._check_end(last)
        if reason is not None:
            self._event({"event": "stopped", "round": last, "reason": reason})
        if self.folder is not None:
            self.folder.finish(self.history.summary(), self.history.parameters)
        for callback in self.callbacks:
            callback.end(self.history)
        return self.history
