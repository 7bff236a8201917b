"""The only loop over rounds."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from equifed.contract import AnyAlgorithm, Clients, Info, Stream, Vector, Weights
from equifed.contract.algorithm import GivesWeights, as_run
from equifed.contract.evaluation import Evaluator
from equifed.metrics.metric import Metric, as_metrics
from equifed.training import events, final_model, play_round
from equifed.training.checkpoint import wait_for_round
from equifed.training.folder import RunFolder
from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.play_round import MissingPolicy, TrainingError
from equifed.training.tables import FORMAT, describe_value, package_versions
from equifed.training.trackers import Callback, follow_by_default
from equifed.training.units import lacks_scale, loss_scale, settle_work, with_scale

if TYPE_CHECKING:
    from torch import nn

# Least time between two checkpoints; a kill costs at most this and one round
CHECKPOINT_SECONDS = 2.0


def train(
    algorithm: AnyAlgorithm,
    clients: Clients,
    *,
    rounds: int = 100,
    seed: int = 0,
    x: Vector | Mapping[str, Any] | nn.Module | None = None,
    evaluate: Sequence[str] | Evaluator = (),
    every: int = 1,
    metrics: Sequence[str | Metric | Callable[[Any, Any], float]] = (),
    stop: final_model.StopRule | Sequence[final_model.StopRule] | final_model.StopWhen | None = (),
    give_out: final_model.GiveOut = "auto",
    callbacks: Sequence[Callback] = (),
    missing: MissingPolicy = MissingPolicy(),  # noqa: B008 - a frozen value
    progress: bool | None = None,
    folder: RunFolder | None = None,
    resume: bool = False,
) -> History:
    """Run an algorithm on clients and record what happens.

    Parameters
    ----------
    algorithm, clients : Algorithm, Clients
        What to run, and on whom; :class:`equifed.Guarded` around an algorithm guards it against
        clients that lie.
    rounds, seed : int
        How many rounds at most; seed of every draw: the model's start, who takes part, minibatches.
    x : Vector, module or state dict, optional
        Model to start from; the engine's initial one if not given.
    evaluate : sequence of str, or callable
        Splits on which the clients measure the model before the first round, after every
        ``every``-th, and at the end the one that is given out; or whatever else measures a model.
    every : int
        Rounds from one evaluation to the next.
    metrics : sequence of str, Metric or callable
        What to measure beside loss and accuracy (or MSE), by name (``equifed.metrics.METRICS``) or
        as ``f(y, prediction)`` of one client's samples; see :func:`equifed.metrics.as_metric`.
    stop : StopWhen, callable or sequence of callables, optional
        Reasons to stop early.
    give_out : {"auto", "last", "certified", "average", "validation"}
        Which model: that of the last round, the one with the smallest certified gap, the mean of
        the models, or the one whose worst client is served best on the validation split; for
        ``"auto"`` see :class:`equifed.training.final_model.Giver`, and ``history.given_out``.
    callbacks, progress : sequence of Callback, bool
        Who is told; whether a bar is shown, by default in terminals and notebooks.
    missing : MissingPolicy
        What to do about clients that give no usable answer.
    folder, resume : RunFolder, bool
        Where to write tables and checkpoints (created, or with a run); whether to go on from there.

    Returns
    -------
    History
        With the model that is given out in ``parameters``.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.FedAvg(), clients, rounds=20, evaluate=["test"], every=20)
    >>> {name: round(accuracy, 1) for name, accuracy in history.per_client().items()}
    {'T-shirt': 0.9, 'pullover': 0.8, 'shirt': 0.3}
    """
    if isinstance(evaluate, str):
        evaluate = (evaluate,)
    for name, count in (("rounds", rounds), ("every", every)):
        if not (count >= 1 and count == int(count)):
            raise ValueError(f"{name} must be a whole number of at least 1, got {count}.")
    asked, ran = as_metrics(metrics), as_run(algorithm, len(clients.names))
    rules = final_model.as_rules(stop)
    if asked and (callable(evaluate) or not evaluate):
        raise ValueError(
            "metrics are measured on splits: name them in evaluate, as evaluate=['test']."
        )
    bar = follow_by_default(callbacks, progress)
    made_of = {
        "format": FORMAT, "versions": package_versions(), "seed": seed,
        "algorithm": describe_value(algorithm), "rounds": rounds, "every": every,
        "give_out": give_out, **({} if x is None else {"start": "given"}), **clients.origin(),
    }  # fmt: skip
    sampled = events.count_asked(ran, len(clients.names)) < len(clients.names)
    means = give_out == "auto" and sampled and not isinstance(clients.curvature(), str)
    giver = final_model.Giver(give_out, any(getattr(rule, "proof", False) for rule in rules), means)
    training = _Training(
        algorithm=ran, clients=clients, rounds=rounds, stream=Stream(seed), evaluate=evaluate,
        every=every, metrics=asked, stop=rules, giver=giver, missing=missing, folder=folder,
        callbacks=callbacks if bar is None else [*callbacks, bar], made_of=made_of,
        first=events.tell_start(algorithm, ran, clients, means),
    )  # fmt: skip
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
    stop: Sequence[final_model.StopRule]
    giver: final_model.Giver
    callbacks: Sequence[Callback]
    missing: MissingPolicy
    folder: RunFolder | None
    made_of: dict[str, Any]
    first: Sequence[tuple[str, str]]

    def __post_init__(self) -> None:
        self.history, self.kept = History(tuple(self.clients.names)), final_model.Kept()
        self.measured: list[MetricRecord] = []  # by the newest evaluation
        self.proved: Any = None  # the objective that certificates are about
        told = [] if self.folder is None else [self.folder]
        self.listeners: list[RunFolder | Callback] = [*told, *self.callbacks]

    def run(self, x: Vector | None, resume: bool) -> History:
        x = self.clients.initial(self.stream.at("initial")) if x is None else x
        scale = self._fix_scale(x, resume)
        self.algorithm, note = settle_work(self.algorithm, self.clients, x, self.stream)
        self.first = [*self.first, *note]
        self.made_of["ran"] = events.show_algorithm(self.algorithm)
        self.start, state, done = x, self.algorithm.init(self.clients, x), 0
        if self.clients.remembers_own():
            self.kept = replace(self.kept, own=self.clients.own_parts(x))
        if resume:
            state, done = self._resume(state)
        costs = self.clients.expect(self.algorithm, self.rounds, self.stream, done)
        for callback in self.callbacks:
            callback.start(self.history, self.rounds)
        if costs is not None:
            self._event("note", done, costs)
        if not resume:
            for kind, reason in self.first:
                self._event(kind, 0, reason)
            if scale is not None:
                self._event("scale", 0, events.describe_scale(scale), scale=scale)
            self._evaluate(0, state, None)
            self._record(0)
            self._save(0, state)
        with wait_for_round() as asked:
            while self.kept.stopped is None and done < self.rounds:
                done += 1
                state = self._step(done, state)
                if asked():
                    self._save(done, state)
                    raise KeyboardInterrupt
        return self._end(state)

    def _fix_scale(self, x: Vector, resume: bool) -> float | None:
        """Give strengths without a scale the federation's, measured once in the life of a run."""
        if not lacks_scale(self.algorithm):
            return None
        known = History.read_tables(self.folder.open()) if resume and self.folder else self.history
        kept = [event["scale"] for event in known.list_events("scale")]
        scale = kept[0] if kept else loss_scale(self.clients, x, self.stream.at("scale"))
        self.algorithm = with_scale(self.algorithm, scale)
        return float(scale)

    def _step(self, r: int, state: Any) -> Any:
        """Play round r, measure and record what is due, and return the new state."""
        state, info = self._round(r, state)
        due = r % self.every == 0
        if due:
            self._evaluate(r, state, info.weights)
        reason = next(filter(None, (rule(self.history) for rule in self.stop)), None)
        group = self.clients.group()
        if self.stop and group is not None:  # clocks differ: all stop when the first one does
            reason = group.from_first(reason or "") or None
        last = reason is not None or r == self.rounds
        if last and not due:
            self._evaluate(r, state, info.weights)
        if last:
            self._settle(r, state, reason)
        if r == 1:  # few rounds may be all there are
            self.history.weights.setdefault(r, info.weights)
        self._record(r)
        if last or (self.folder is not None and self.folder.due(CHECKPOINT_SECONDS)):
            self._save(r, state)
        return state

    def _round(self, r: int, state: Any) -> tuple[Any, Info]:
        started, before = time.perf_counter(), self.clients.traffic.totals()
        rules = self.missing, self.kept, self._event
        try:
            played = play_round.play_round(
                self.algorithm, state, self.clients, self.stream, r, *rules
            )
        except TrainingError as error:
            self._event("stopped", r, str(error))
            self._save(r - 1, state)
            raise
        info, self.kept, self.proved = play_round.certify_round(played, self.proved)
        after = self.clients.traffic.totals()
        exchanges, up, down = (b - a for a, b in zip(before, after, strict=True))
        cost = (exchanges, up, down, time.perf_counter() - started)
        there = () if info.index is None else tuple(info.index.tolist())
        some = 0 < len(there) < len(self.clients.names)
        record = RoundRecord(r, info.objective, *cost, info.numbers, there if some else None)
        self.history.rounds.append(record)
        for listener in self.listeners:
            listener.round(record, info)
        said = {event["reason"] for event in self.history.list_events("note")}
        for note in info.notes:
            if note not in said:
                self._event("note", r, note)
        kept = events.tell_touches(self.kept, self.history, r, info, self._event)
        self.kept = self.giver.after_round(kept, record, state.x, played.state.x, info, played.lost)
        return played.state, info

    def _evaluate(self, r: int, state: Any, weights: Weights | None) -> None:
        """Measure what the algorithm would give out after round r, which may be worth keeping."""
        x = self.algorithm.model(state)
        self._measure(r, x, self.kept.own, weights)
        self.kept = self.giver.after_evaluation(self.kept, r, x, weights, self.measured)

    def _measure(self, r: int, x: Vector, own: Any, weights: Weights | None) -> None:
        if weights is not None:
            self.history.weights[r] = weights
        found = self.evaluate(x) if callable(self.evaluate) else []
        if self.evaluate and not callable(self.evaluate):
            asked = (self.metrics,) if self.metrics else ()
            found = play_round.bind_own(self.clients, own).evaluate(x, self.evaluate, *asked)
        self.measured = self.history.add_evaluation(r, found)

    def _settle(self, r: int, state: Any, reason: str | None) -> None:
        """Make the numbers of the last round those of the model that is given out."""
        self.kept, final = replace(self.kept, stopped=reason), self._choose(r, state)
        if final.given.kind != "last":
            kept = len(self.history.metrics) - len(self.measured)
            del self.history.metrics[kept:]  # another model takes the place of this one
            self._measure(r, final.x, final.own, final.weights)
        elif final.weights is not None:
            self.history.weights[r] = final.weights

    def _choose(self, r: int, state: Any) -> final_model.FinalModel:
        model, iterate = self.algorithm.model(state), state.x
        own = model is not iterate and not bool((model == iterate).all())
        final = self.giver.choose(self.kept, r, model, own)
        if final.given.kind == "last" and own and isinstance(self.algorithm, GivesWeights):
            final = replace(final, weights=self.algorithm.weights(state))
        return final if final.own is not None else replace(final, own=self.kept.own)

    def _record(self, r: int) -> None:
        """Write down and tell what was measured after round r."""
        if self.folder is not None and r in self.history.weights:
            self.folder.weights(r, self.history.weights[r])
        new = [record for record in self.measured if record.round == r]
        for listener in self.listeners if new else ():
            listener.evaluation(r, new)

    def _event(self, kind: str, r: int, reason: str = "", **more: Any) -> None:
        event = {"event": kind, "round": r, **more} | ({"reason": reason} if reason else {})
        self.history.events.append(event)
        for listener in self.listeners:
            listener.event(event)

    def _save(self, r: int, state: Any) -> None:
        if self.folder is not None:
            self.folder.save(r, state, self.kept, self.history.hits)

    def _resume(self, template: Any) -> tuple[Any, int]:
        if self.folder is None:
            raise ValueError("resume needs a run folder.")
        done, state, self.kept, hits = self.folder.restore(template)
        self.history = History.read_tables(self.folder.open())
        self.history.hits = hits
        self.folder.wait()  # nothing is written before all have read
        self._event("resume", done)
        self._save(done, state)
        return state, done

    def _end(self, state: Any) -> History:
        last, history = self.history.rounds[-1].round, self.history
        final = self._choose(last, state)
        clients = play_round.bind_own(self.clients, final.own)
        own, predictor = clients.own_parts(final.x), clients.predictor(final.x)
        history.parameters = clients.parameters(final.x)
        history.own = None if own is None else clients.own_parameters(own)
        history.trained = None if isinstance(predictor, str) else predictor
        if ledgers := events.find_ledgers(self.algorithm, state, self.clients):
            self._event(events.PRIVACY, last, events.tell_privacy(ledgers), ledgers=ledgers)
        self._check_end(last, clients, final)
        if self.kept.stopped is not None:
            self._event("stopped", last, self.kept.stopped)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._event("given out", last, str(final.given), given_out=asdict(final.given), time=now)
        history.provenance = self.made_of
        if self.folder is not None:
            self.folder.describe(self.made_of, history.trained)
            self.folder.finish(history)
        for callback in self.callbacks:
            callback.end(history)
        return history

    def _check_end(self, last: int, clients: Clients, final: final_model.FinalModel) -> None:
        """Refuse a model that is not finite, record what samples say and what else is wrong."""
        wrong = events.check_finite(self.history.parameters or {})
        if wrong is not None:
            self._event("stopped", last, wrong)
            raise TrainingError(f"After round {last} {wrong}")
        if not callable(self.evaluate):
            for note in events.describe_directions(self.metrics):
                self._event("note", 0, note)
            events.describe_samples(clients, self.history, self.metrics, final.x)
        scales = self.clients.feature_scales()
        known = None if isinstance(scales, str) else scales

        def compare() -> events.Pair:
            both = (self.clients.evaluate(x, ("train",))[0] for x in (self.start, final.x))
            before, after = (found.metrics["loss"] for found in both)
            return before, after

        # Where samples are not here, another evaluation would cost an exchange.
        here = known is not None and final.own is None
        for sentence in events.find_warnings(self.history, known, compare if here else None):
            self._event("warning", last, sentence)
