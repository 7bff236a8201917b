"""The only loop over rounds."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from equifed.contract.algorithm import AnyAlgorithm, GivesWeights, Info, Wrappable
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients
from equifed.contract.evaluation import Evaluator
from equifed.contract.streams import Stream
from equifed.metrics.metric import Metric, as_metrics
from equifed.training.describing import describe_end
from equifed.training.events import (
    check_finite,
    describe_directions,
    find_warnings,
    lacks_losses,
    tell_choice,
    tell_touches,
)
from equifed.training.folder import RunFolder, format_preparation
from equifed.training.given_out import Choice, GiveOut, Giver, Kept
from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.missing import MissingPolicy, Played, TrainingError, play_round
from equifed.training.own_part import (
    bind_own,
    give_own,
    keep_own,
    measure_shared,
    own_of,
    tell_own,
)
from equifed.training.tables import describe_run
from equifed.training.trackers import Callback, follow_by_default

if TYPE_CHECKING:
    from torch import nn

CHECKPOINT_SECONDS = 2.0
"""Least time between two checkpoints; a kill costs at most this and one round."""


StopRule = Callable[[History], str | None]
"""Looks at the history after a round and returns why to stop, or None.

One that looks at the certificate has an attribute ``proof`` that is true: the model that is then
given out must be the one that the certificate is about.
"""


class StopsWhen(Protocol):
    """Something that has rules, as :class:`equifed.StopWhen`."""

    def rules(self) -> tuple[StopRule, ...]:
        """Return them."""
        ...


def as_rules(given: Any) -> tuple[StopRule, ...]:
    """Return rules that were asked for: none, one, several, or those of a ``StopWhen``."""
    if hasattr(given, "rules") and not isinstance(given, type):
        given = given.rules()
    found = () if given is None else tuple(given) if isinstance(given, Iterable) else (given,)
    if any(isinstance(rule, type) or not callable(rule) for rule in found):
        raise ValueError(
            f"stop must be a rule, a sequence of rules or None, got {given!r}; say "
            "ef.StopWhen(at_gap=1e-3), or give a function of the history that returns why to stop, "
            "or None."
        )
    return found


def train(
    algorithm: AnyAlgorithm,
    clients: Clients,
    *,
    rounds: int,
    seed: int = 0,
    x: Vector | Mapping[str, Any] | nn.Module | None = None,
    evaluate: Sequence[str] | Evaluator = (),
    every: int = 1,
    metrics: Sequence[str | Metric | Callable[[Any, Any], float]] = (),
    stop: StopRule | Sequence[StopRule] | StopsWhen | None = (),
    give_out: GiveOut = "auto",
    callbacks: Sequence[Callback] = (),
    missing: MissingPolicy = MissingPolicy(),  # noqa: B008 - a frozen value
    progress: bool | None = None,
    folder: RunFolder | None = None,
    resume: bool = False,
) -> History:
    """Run an algorithm on clients and record what happens.

    Parameters
    ----------
    algorithm : Algorithm
        What to run; :class:`equifed.Guarded` around it guards it against clients that lie.
    clients : Clients
        On whom, as an engine presents them.
    rounds : int
        How many rounds at most.
    seed : int
        Seed of every draw: the model's start, who takes part, the minibatches.
    x : Vector, module or state dict, optional
        Model to start from; the engine's initial one if not given.
    evaluate : sequence of str, or callable
        Splits on which the clients measure the model before the first round and after every
        ``every``-th and the last one; or whatever else measures a model. After the last round the
        model that is given out is measured.
    every : int
        Rounds from one evaluation to the next.
    metrics : sequence of str, Metric or callable
        What to measure beside loss and accuracy (or MSE), by name (``equifed.metrics.METRICS``) or
        as a function ``f(y, prediction)`` of one client's samples; see
        :func:`equifed.metrics.as_metric`.
    stop : StopWhen, callable or sequence of callables, optional
        Reasons to stop early.
    give_out : {"auto", "last", "certified", "average", "validation", "validation-tail", ...}
        Which model: that of the last round, the one with the smallest certified gap, the mean of
        the models, or the best on the validation split: by its worst client, its worst fifth of
        the clients (``-tail``), ``-average``, or the sum of these two (``-mix``). ``"auto"`` is
        explained in :class:`equifed.training.given_out.Giver`; ``history.given_out`` says what it
        came to.
    callbacks : sequence of Callback
        Who wants to be told.
    missing : MissingPolicy
        What to do about clients that give no usable answer.
    progress : bool, optional
        Show a bar while training; by default in terminals and notebooks.
    folder : RunFolder, optional
        Where to write tables and checkpoints; must have been created, or hold a run to resume.
    resume : bool
        Go on from the folder's newest checkpoint.

    Returns
    -------
    History
        With the model that is given out in ``parameters``.
    """
    if isinstance(evaluate, str):
        evaluate = (evaluate,)
    given = algorithm
    if isinstance(algorithm, Wrappable):
        algorithm = algorithm.wrapped()
    for name, count in (("rounds", rounds), ("every", every)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}.")
    asked, rules = as_metrics(metrics), as_rules(stop)
    if asked and (callable(evaluate) or not evaluate):
        raise ValueError(
            "metrics are measured on splits: name them in evaluate, as evaluate=['test']."
        )
    bar = follow_by_default(callbacks, progress)
    callbacks = callbacks if bar is None else [*callbacks, bar]
    giver = Giver(give_out, any(getattr(rule, "proof", False) for rule in rules))
    settings = {"rounds": rounds, "every": every, "give_out": give_out}
    start = {} if x is None else {"start": "given"}
    made_of = describe_run(given, clients, seed, {**settings, **start})
    told = asked, rules, giver, callbacks, missing, folder, made_of
    algorithm = keep_own(algorithm, clients)
    training = _Training(algorithm, clients, rounds, Stream(seed), evaluate, every, *told)
    with bar or nullcontext():
        return training.run(None if x is None else clients.flatten(x), resume)


@dataclass
class _Training:
    algorithm: AnyAlgorithm
    clients: Clients
    rounds: int
    stream: Stream
    evaluate: Sequence[str] | Evaluator
    every: int
    metrics: Sequence[Metric]
    stop: Sequence[StopRule]
    giver: Giver
    callbacks: Sequence[Callback]
    missing: MissingPolicy
    folder: RunFolder | None
    made_of: dict[str, Any]

    def __post_init__(self) -> None:
        self.history, self.group = History(tuple(self.clients.names)), self.clients.group()
        self.kept = Kept()
        self.proved: Any = None  # the objective that certificates are about

    def run(self, x: Vector | None, resume: bool) -> History:
        x = self.clients.initial(self.stream.at("initial")) if x is None else x
        self.start = x
        state, done = self.algorithm.init(self.clients, x), 0
        if resume:
            state, done = self._resume(state)
        for callback in self.callbacks:
            callback.start(self.history, self.rounds)
        if done == 0 and not resume:
            for event in (*tell_choice(self.clients), *tell_own(self.clients)):
                self._event(event)
            self._evaluate(0, state, None)
            self._record(0)
            self._save(0, state)
        reason = self.kept.stopped  # it may have been killed while stopping
        for r in range(done + 1, self.rounds + 1):
            if reason is not None:
                break
            state, info = self._round(r, state)
            if r % self.every == 0:
                self._evaluate(r, state, info.weights)
            reason = self._reason_to_stop()
            last = reason is not None or r == self.rounds
            if last and r % self.every != 0:
                self._evaluate(r, state, info.weights)
            if last:
                self._settle(r, state, reason)
            if last or r % self.every == 0:
                self._record(r)
            elif r == 1 and info.weights is not None:
                self._record_weights(r, info.weights)  # few rounds may be all there are
            if last or (self.folder is not None and self.folder.due(CHECKPOINT_SECONDS)):
                self._save(r, state)
        return self._end(state, reason)

    def _check_end(self, last: int, x: Vector, own: Vector | None) -> None:
        """Refuse a model that is not finite, record what else is wrong and what samples say."""
        wrong = check_finite(self.history.parameters or {})
        if wrong is not None:
            self._event({"event": "stopped", "round": last, "reason": wrong})
            raise TrainingError(f"After round {last} {wrong}")
        self._describe(x, own)
        scales, losses = self.clients.feature_scales(), None
        here = not isinstance(scales, str)  # elsewhere another evaluation would cost an exchange
        if here and own is None and lacks_losses(self.history):
            losses = self._train_losses(self.start), self._train_losses(x)
        known = None if isinstance(scales, str) else scales
        for sentence in find_warnings(self.history, known, losses):
            self._event({"event": "warning", "round": last, "reason": sentence})

    def _train_losses(self, x: Vector) -> Losses:
        return self.clients.evaluate(x, ("train",))[0].metrics["loss"]

    def _reason_to_stop(self) -> str | None:
        reason = next(filter(None, (rule(self.history) for rule in self.stop)), None)
        if self.stop and self.group is not None:  # clocks differ: all stop when the first one does
            reason = self.group.from_first(reason or "") or None
        return reason

    def _evaluate(self, r: int, state: Any, weights: Weights | None) -> None:
        """Measure what the algorithm would give out after round r, which may be worth keeping."""
        x, own = self.algorithm.model(state), own_of(state)
        records = self._measure(r, x, own, weights)
        self.kept = self.giver.after_evaluation(self.kept, r, x, weights, records, own)

    def _measure(self, r: int, x: Vector, own: Any, weights: Weights | None) -> list[MetricRecord]:
        if weights is not None:
            self.history.weights[r] = weights
        if not self.evaluate:
            return []
        given = self.evaluate
        if callable(given):
            found = given(x)
        else:
            asked = (self.metrics,) if self.metrics else ()
            found = bind_own(self.clients, own).evaluate(x, given, *asked)
        return self.history.add_evaluation(r, found)

    def _settle(self, r: int, state: Any, reason: str | None) -> None:
        """Make the numbers of the last round those of the model that is given out."""
        self.kept, choice = replace(self.kept, stopped=reason), self._choose(r, state)
        if choice.given.kind != "last":
            self.history.forget_evaluation(r)
            self._measure(r, choice.x, choice.own, choice.weights)
        elif choice.weights is not None:
            self.history.weights[r] = choice.weights

    def _choose(self, r: int, state: Any) -> Choice:
        model, iterate = self.algorithm.model(state), state.x
        own = model is not iterate and not bool((model == iterate).all())
        choice = self.giver.choose(self.kept, r, model, own)
        if choice.given.kind == "last" and own and isinstance(self.algorithm, GivesWeights):
            choice = replace(choice, weights=self.algorithm.weights(state))
        return choice if choice.own is not None else replace(choice, own=own_of(state))

    def _describe(self, x: Vector, own: Vector | None) -> None:
        """Ask what single samples say about the model that is given out."""
        clients = bind_own(self.clients, own)
        if callable(self.evaluate):
            return
        for note in describe_directions(self.metrics):
            self._event({"event": "note", "round": 0, "reason": note})
        self.history.details = describe_end(clients, self.history, self.metrics, x)
        self.history.without_own = measure_shared(clients, self.history, x)
        if self.folder is not None:
            self.folder.details(self.history.details)
            self.folder.without_own(self.history.without_own)

    def _record(self, r: int) -> None:
        """Write down and tell what was measured after round r."""
        records = self.history.evaluation(r)
        if r in self.history.weights:
            self._record_weights(r, self.history.weights[r])
        if self.folder is not None:
            self.folder.evaluation(records)
        for callback in self.callbacks if records else ():
            callback.evaluation(r, records)

    def _record_weights(self, r: int, weights: Weights) -> None:
        self.history.weights[r] = weights
        if self.folder is not None:
            self.folder.weights(r, weights)

    def _round(self, r: int, state: Any) -> tuple[Any, Info]:
        started, before = time.perf_counter(), self.clients.traffic.totals()
        rules = self.missing, self.kept.memory, self._event
        try:
            played = play_round(self.algorithm, state, self.clients, self.stream, r, *rules)
        except TrainingError as error:
            self._event({"event": "stopped", "round": r, "reason": str(error)})
            self._save(r - 1, state)
            raise
        after = self.clients.traffic.totals()
        exchanges, up, down = (b - a for a, b in zip(before, after, strict=True))
        cost = (exchanges, up, down, time.perf_counter() - started)
        new, info = played.state, self._certified(played)
        record = RoundRecord(r, info.objective, *cost, info.numbers, self._participants(info))
        self.history.rounds.append(record)
        if self.folder is not None:
            self.folder.round(record)
        for callback in self.callbacks:
            callback.round(record, info)
        self._notes(r, info)
        self.kept = replace(self.kept, memory=played.memory)
        self.kept = tell_touches(self.kept, self.history, r, info, self._event)
        self.kept = self.giver.after_round(self.kept, record, state.x, new.x, info, played.lost)
        return new, info

    def _certified(self, played: Played) -> Info:
        """Return what a round tells, with its certificate or why there is none."""
        info, proof = played.info, played.info.proof
        if isinstance(proof, str):
            return replace(info, notes=(*info.notes, f"no certificate: {proof}"))
        if proof is None or not proof.final:
            return info
        if self.proved not in (None, proof.objective):  # what is known is about another problem
            self.kept = replace(self.kept, proved=None, mean=None, lower=None)
        self.proved = proof.objective
        found, lower = played.witness.certify(proof, info.index, self.kept.lower)
        self.kept = replace(self.kept, lower=lower)
        if isinstance(found, str):
            return replace(info, notes=(*info.notes, f"no certificate: {found}"))
        return replace(info, numbers=info.numbers | found.numbers())

    def _notes(self, r: int, info: Info) -> None:
        """Record what the algorithm has to say, each thing once in a run."""
        said = {event["reason"] for event in self.history.events if event["event"] == "note"}
        for note in info.notes:
            if note not in said:
                self._event({"event": "note", "round": r, "reason": note})

    def _participants(self, info: Info) -> tuple[int, ...] | None:
        """Return who took part in a round; None when all did, which need not be written down."""
        if info.index is None or len(info.index) == len(self.clients.names):
            return None
        return tuple(int(i) for i in info.index)

    def _event(self, event: dict[str, Any]) -> None:
        self.history.events.append(event)
        if self.folder is not None:
            self.folder.event(event)
        for callback in self.callbacks:
            callback.event(event)

    def _save(self, r: int, state: Any) -> None:
        if self.folder is not None:
            self.folder.hits(self.history.hits)
            self.folder.save(r, state, self.kept, self.history.hits)

    def _resume(self, template: Any) -> tuple[Any, int]:
        if self.folder is None:
            raise ValueError("resume needs a run folder.")
        done, state, self.kept, hits = self.folder.restore(template)
        self.history = History.read_tables(self.folder.path)
        self.history.hits = hits
        self.folder.wait()  # nothing is written before all have read
        self._event({"event": "resume", "round": done})
        self._save(done, state)
        return state, done

    def _end(self, state: Any, reason: str | None) -> History:
        last = self.history.rounds[-1].round
        choice = self._choose(last, state)
        clients, history = bind_own(self.clients, choice.own), self.history
        history.parameters, history.own = clients.parameters(choice.x), give_own(clients, choice.x)
        told = clients.predictor(choice.x)
        history.trained = None if isinstance(told, str) else told
        self._check_end(last, choice.x, choice.own)
        if reason is not None:
            self._event({"event": "stopped", "round": last, "reason": reason})
        told = {"round": last, "reason": str(choice.given), "given_out": asdict(choice.given)}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._event({"event": "given out", **told, "time": now})
        history.provenance = self.made_of
        if self.folder is not None:
            prepared = format_preparation(history.trained, self.folder.path)
            self.folder.describe(self.made_of, prepared)
            self.folder.finish(history.summary(), history.parameters, history.own)
        for callback in self.callbacks:
            callback.end(self.history)
        return self.history
