"""``fit`` on a federation: candidates are solved one after the other, and one is chosen.

All are runs of the same sites under one plan; rounds are counted on from one candidate to the next.
The rule is that of :mod:`equifed.runs.candidates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.guard import guard_algorithm
from equifed.algorithms.guard_limits import Guard
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaled import Scaled
from equifed.contract.algorithm import AnyAlgorithm
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.handshake import StartError
from equifed.flower.mailbox import Mailbox, say
from equifed.flower.members import Members
from equifed.flower.messenger import SecureSums
from equifed.flower.secure.ledger import PrivacyError
from equifed.flower.server import FlowerClients
from equifed.flower.site import Privacy
from equifed.flower.task import Candidate
from equifed.objectives import Average, ChiSquare, CVaR, WorstCase
from equifed.runs.candidates import (
    BASE,
    GAP,
    L2,
    OWN_L2,
    OWN_RHOS,
    RHOS,
    ROUNDS,
    TRIED,
    Choice,
    Point,
    Score,
    Strengths,
    find_best,
    model_for,
    read_score,
    try_linear,
)
from equifed.runs.fit import CHOICE, REPORT, Served
from equifed.runs.outcome import describe_gain, list_rows
from equifed.training.files import seal, write_file
from equifed.training.final_model import StopWhen
from equifed.training.folder import RunFolder, is_complete
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.play_round import MissingPolicy, TrainingError

STRENGTHS: Mapping[Privacy, Strengths] = {
    "none": (L2, RHOS, OWN_L2, OWN_RHOS),
    "secure": ((1e-3,), (1.0, 0.1), (1e-1, 1e-2), (1.0, 0.1)),
}
"""What is tried: where sums are hidden a candidate takes many times as many exchanges."""

GAPS: Mapping[Privacy, float] = {"none": GAP, "secure": 1e-4}
MEMBERS = 2.2
"""No site has more than one part in so many of a hidden sum's weight: each has three members."""

FAMILIES, MEASURED = 4, 4
"""Candidates that are solved again after the choice at most; measurements of one."""

LONGEST = 200.0
"""No best model is longer: its penalty is at most the loss at zero, which is 2 or less."""

UNKNOWN = "Whether that is beyond chance is not known here, as single rows stay at the sites."


# -- what a plan has of it -------------------------------------------------------------------------


def build_solver(point: Point, privacy: Privacy, guard: Guard, sites: int) -> AnyAlgorithm:
    """Return what solves a candidate: second-order steps, or what hidden sums can carry."""
    base = WorstCase() if privacy == "none" else CVaR(tail=MEMBERS / sites)
    objective = Average() if point.rho is None else ChiSquare(point.rho, base)
    if privacy == "none":
        return guard_algorithm(FairNewton(objective), guard)
    return Scaled(guard_algorithm(ScaffPD(objective), guard), columns="uncorrelated")


def count_candidates(privacy: Privacy) -> int:
    """Return how many candidates are solved, those after the choice included."""
    l2, rhos, own_l2, own_rhos = map(len, STRENGTHS[privacy])
    return l2 * (1 + rhos + own_l2 + own_rhos) + FAMILIES


def present(
    candidate: Candidate, mailbox: Mailbox, members: Members, hidden: SecureSums | None
) -> FlowerClients:
    """Return the sites as they answer for a candidate."""
    data = members.hellos[0].schema.make_placeholder()
    task = candidate.task(members.task, data)
    given = replace(members, task=task, engine=task.build_engine(data))
    clients = FlowerClients(mailbox, given, hidden)
    clients.common["candidate"] = asdict(candidate)
    return clients


def prepare_fit(settings: FederationSettings, config: AppConfig) -> FederationSettings:
    """Refuse what a fit cannot have; a candidate that lacks a site is no candidate."""
    if settings.privacy == "none" and config.guard.mode == "on":
        raise StartError(
            "A fit at privacy = 'none' sums second derivatives, which no guard can check. Write "
            'guard = "off" into equifed.toml, or fit with privacy = "secure".'
        )
    if settings.start:
        raise StartError("A fit starts from nothing; leave 'start' empty.")
    if settings.deadlines.on_missing == "continue":
        say("WARNING: a fit compares candidates of all sites: it waits for who is missing")
        return replace(settings, deadlines=replace(settings.deadlines, on_missing="wait"))
    return settings


def check_sites(members: Members) -> None:
    """Refuse sites among which there is nothing to choose."""
    if len(members.names) == 1:
        raise StartError("A fit chooses what serves several sites; there is only one.")
    for split in ("validation", "test"):
        if not any(hello.sizes.get(split) for hello in members.hellos):
            raise StartError(
                f"No site has {split} rows: a fit chooses on validation rows and measures on test "
                "rows. Write holdout = { validation = 0.15, test = 0.25 } into [data] of "
                "equifed.toml, or let load_data return them."
            )


def describe_choice(config: AppConfig, settings: FederationSettings, served: Served) -> AppConfig:
    """Return the settings of the chosen model, for its card."""
    point, (name, loss) = served.chosen.point, served.chosen.model
    rho: dict[str, Any] = {} if point.rho is None else {"rho": point.rho}
    objective = {"name": "chi-square" if rho else "average", **rho}
    solver = "fair-newton" if settings.privacy == "none" else "scaled scaff-pd"
    model = {"name": name, "loss": loss, "l2": point.l2}
    return replace(config, model=model, algorithm={"name": solver, "objective": objective})


# -- the run ---------------------------------------------------------------------------------------


class SiteTrials:
    """Solves candidates at the sites; what is solved is kept in a folder, to resume."""

    def __init__(
        self, clients: FlowerClients, config: AppConfig, settings: FederationSettings,
        folder: RunFolder | None,
    ) -> None:  # fmt: skip
        self.clients, self.config, self.settings, self.folder = clients, config, settings, folder
        self.played = self.count = 0
        self.solved: dict[Point, History] = {}
        self.bounds: dict[Candidate, dict[int, dict[str, Any]]] = {}
        self.unsolved, self.left_out = 0, list[str]()

    def score(self, name: str, points: Sequence[Point]) -> dict[Point, Score]:
        """Return the scores of a path, each candidate solved from the model of the one before."""
        before: History | None = None
        for point in points:
            if point not in self.solved:
                try:
                    self.solved[point] = self.solve(point, before)[0]
                except PrivacyError as error:
                    self._leave_out(point, error)
            before = self.solved.get(point, before)
        there = [point for point in points if point in self.solved]
        return {point: read_score(self.solved[point], "validation") for point in there}

    def _leave_out(self, point: Point, error: PrivacyError) -> None:
        """Do without a fair candidate whose hidden sums would show a site; its rounds are over."""
        if point.rho is None:
            raise error
        self.played += ROUNDS
        told = f"{point.family} ({point.settings}) was left out: {error}"
        say(f"WARNING: {told}")
        self.left_out.append(told)

    def solve(
        self, point: Point, before: History | None, whole: bool = False, chosen: bool = False
    ) -> tuple[History, FlowerClients]:
        """Return the run of a candidate and its sites; ``whole``: on all rows but test rows."""
        candidate = Candidate(point.l2, point.own_l2, whole)
        clients = present(
            candidate, self.clients.mailbox, self.clients.members, self.clients.hidden
        )
        clients.before = self.played
        clients.bounds = self.bounds.setdefault(candidate, clients.bounds)
        place, self.count = self._place(chosen), self.count + 1
        if place is not None and is_complete(place.path):
            history = History.load(place.path)
        else:
            history = self._train(point, clients, before, place, whole)
        self.played += history.rounds[-1].round
        self.unsolved += history.rounds[-1].round >= ROUNDS
        return history, clients

    def _place(self, chosen: bool) -> RunFolder | None:
        if self.folder is None or chosen:
            return self.folder
        return RunFolder(self.folder.path / TRIED / f"{self.count:03d}", self.clients.names)

    def _train(
        self, point: Point, clients: FlowerClients, before: History | None,
        place: RunFolder | None, whole: bool,
    ) -> History:  # fmt: skip
        if (left := self.settings.rounds - self.played) < ROUNDS:
            raise TrainingError(
                f"{left} rounds of the plan are left after {self.count - 1} candidates, and one "
                f"may take {ROUNDS}. Continue with more: equifed flower resume --run-config "
                f"rounds={2 * self.settings.rounds}"
            )
        say(f"candidate {self.count}: {point.family}, {point.settings}{' (all rows)' * whole}")
        resume = place is not None and any(place.checkpoints.glob("*.json"))
        if place is not None and not resume:
            place.create(overwrite=True)
        measured: Any = {"evaluate": lambda x: clients.evaluate(x, ["validation"])}
        if whole:
            measured = {"evaluate": ["test"], "metrics": self.config.evaluate.metrics}
        privacy = self.settings.privacy
        return train(
            build_solver(point, privacy, self.config.guard, len(clients.names)), clients,
            rounds=ROUNDS,
            seed=self.config.seed, x=self._start(before), every=ROUNDS,
            stop=StopWhen(at_relative_gap=GAPS[privacy]), progress=False, folder=place,
            resume=resume, missing=MissingPolicy("fail"), **measured,
        )  # fmt: skip

    def _start(self, before: History | None) -> dict[str, Any] | None:
        """Return the model of the candidate before; hidden sums at one model would add up.

        So there no two candidates begin at the same one.
        """
        if before is None or before.parameters is None:
            return None
        hidden, share = self.settings.privacy != "none", self.count / count_candidates("secure")
        by = 0.5 + 0.5 * share if hidden else 1.0
        return {name: by * part for name, part in before.parameters.items()}

    def choose(self) -> tuple[Served, FlowerClients]:
        """Choose, solve the best of every kind on all rows but test rows, and measure them."""
        members, privacy = self.clients.members, self.settings.privacy
        scores = try_linear(self.score, STRENGTHS[privacy])
        best, point = find_best(scores), min(scores, key=lambda p: scores[p].mean)
        held = [hello.sizes.get("validation", 0) for hello in members.hellos]
        rows = f"{sum(held):,} validation rows of {np.count_nonzero(held)} clients"
        told = {family: scores[p] for family, p in best.items()}
        model = model_for(members.hellos[0].schema.make_placeholder())
        alone = np.zeros(len(members.names))
        choice = Choice(
            point, best, told, (), alone, rows, len(scores), tuple(self._note(privacy)), model
        )
        if self.folder is not None:
            write_file(self.folder.path / CHOICE, seal(choice.to_dict()))
        say(f"chosen: {choice}")
        runs, sites = dict[str, History](), self.clients
        for family, p in sorted(best.items(), key=lambda pair: pair[0] == choice.name):
            before = None if privacy == "none" else self.solved[p]
            try:
                runs[family], sites = self.solve(p, before, True, family == choice.name)
            except PrivacyError as error:
                if family in (choice.name, BASE):
                    raise
                self._leave_out(p, error)
        runs = {family: runs[family] for family in best if family in runs}
        gain = describe_gain(choice, runs, "test", 0.0, False)
        gain += "" if choice.name == BASE else f" {UNKNOWN}"
        served = Served(choice, gain, list_rows(choice, runs, "test"), runs, self.config.seed)
        if self.folder is not None:
            write_file(self.folder.path / CHOICE, seal(served.to_dict()))
            served.report(self.folder.path / REPORT)
        return served, sites

    def _note(self, privacy: Privacy) -> list[str]:
        """Say how candidates were solved, and what was not tried."""
        solver = "FairNewton" if privacy == "none" else "SCAFF-PD in uncorrelated columns"
        notes = [
            *self.left_out,
            f"Solved by {solver} in {self.played} rounds of all sites. Own models of single sites "
            "were not tried: a site compares its own with the model that it gets.",
        ]
        if self.unsolved:
            notes.append(f"{self.unsolved} candidates were not solved in {ROUNDS} rounds.")
        return notes
