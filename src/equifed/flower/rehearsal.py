"""A plan from an app: its algorithm plays a few rounds among made-up clients, and we listen."""

from __future__ import annotations

import functools
import json
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from equifed.algorithms.around import unwrap
from equifed.algorithms.fair_newton import FairNewton
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.evaluation import SPLITS
from equifed.data.federation import Federation
from equifed.data.fields import KINDS, Layout, Packed
from equifed.flower.account import RECKONED, Question, list_questions
from equifed.flower.app_config import AppConfig, FederationSettings, Kept, read_app_settings
from equifed.flower.fit import (
    LONGEST,
    MEASURED,
    STRENGTHS,
    build_solver,
    count_candidates,
    present,
)
from equifed.flower.flwr_private import parse_node_config
from equifed.flower.handshake import Hello
from equifed.flower.mailbox import Answers, Check, Mailbox
from equifed.flower.members import Members
from equifed.flower.memory import Memory
from equifed.flower.messenger import SecureSums
from equifed.flower.participant import Client
from equifed.flower.plan import Plan, pack_plan, read_plan, sign_plan
from equifed.flower.secure.masking import DRAWN, LARGEST_SHARE
from equifed.flower.server import FlowerClients
from equifed.flower.site import Privacy, import_from
from equifed.flower.task import Candidate, Schema, Task
from equifed.flower.wire import Request
from equifed.flower.worker import Worker
from equifed.models.losses import resolve_loss
from equifed.runs.candidates import Point
from equifed.training.keys import PublicKey, read_key_file, read_private
from equifed.training.loop import train

REHEARSED, MOST_CLIENTS, ROWS = 3, 12, 24
"""Rounds and clients of a rehearsal, and rows of each."""

TRIES = 40
"""Questions of a round in a step whose number depends on the data (measured step sizes)."""

SHAPES = ((5,), (1, 28, 28), (3, 32, 32))
"""Kinds of samples on which a rehearsal is tried, where no data are named."""

PREPARE = ("kinds", "sums", "squares", "names", "counts")


def make_plan(
    config: AppConfig,
    settings: FederationSettings,
    members: Mapping[str, PublicKey] | None = None,
    run: str = "",
) -> Plan:
    """Return the plan of a run; ``members`` are the only ones that take part, if there are any."""
    rounds, fit = settings.count_rounds(config), settings.do == "fit"
    splits = choose_splits(config, settings)
    about: dict[str, Any] = {"times": 1, "models": 1}
    steps = {"deliver": about} if settings.deliver or settings.do == "evaluate" else {}
    if settings.do == "statistics":
        steps, splits, rounds = {"statistics": about}, (), 0
    elif settings.do == "evaluate":
        rounds = 0
    else:
        told = json.dumps(config.to_dict(), sort_keys=True)
        steps |= _rehearse_once(told, settings.privacy, settings.clients, fit)
        steps["bounds"] = about
        steps |= {f"prepare {stage}": about for stage in PREPARE if config.table is not None}
    again = 0 if settings.deadlines.on_missing != "continue" else 2 + rounds // 10
    evaluations, given = rounds // config.evaluate.every + 4, {}
    if fit:
        count, (l2, _, own_l2, _) = count_candidates(settings.privacy), STRENGTHS[settings.privacy]
        evaluations, given = MEASURED * count, {"l2": [*l2], "own_l2": [*own_l2]}
        steps = {name: _repeat(name, step, count) for name, step in steps.items()}
    return Plan(
        run or secrets.token_hex(8),
        settings.do,
        json.loads(json.dumps(config.to_dict())),
        settings.privacy,
        settings.clients,
        rounds,
        steps,
        evaluations if splits else 0,
        splits,
        find_cap(config, settings.clients),
        max(settings.largest_model, LONGEST if fit else 0.0),
        config.guard.rounding,
        again,
        {name: key.line for name, key in (members or {}).items()},
        given,
    )


def _repeat(name: str, step: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a step that every candidate takes, where it belongs to no round."""
    if not name.startswith(("once", "bounds")):
        return step
    return step | {key: count * step[key] for key in ("times", "models")}


def choose_splits(config: AppConfig, settings: FederationSettings) -> tuple[str, ...]:
    """Return on which rows models are measured.

    Where sums are hidden training losses do not leave for the report alone.
    """
    if settings.do == "fit":
        return ("validation", "test")
    asked = SPLITS if settings.do == "evaluate" else config.evaluate.splits
    return tuple(s for s in asked if settings.privacy == "none" or s != "train")


def lengthen(plan: Plan, config: AppConfig, rounds: int) -> Plan:
    """Return the plan with more rounds."""
    more = rounds - plan.rounds
    repeats = plan.repeats + (more // 10 if plan.repeats else 0)
    evaluations = plan.evaluations + (more // config.evaluate.every if plan.evaluations else 0)
    return replace(plan, rounds=rounds, evaluations=evaluations, repeats=repeats)


def find_cap(config: AppConfig, clients: int) -> float:
    """Return the largest share of a hidden sum that one client may have: that of the guard."""
    guard, core = config.guard, unwrap(config.build_algorithm([1] * clients))
    if getattr(core, "clients_per_round", None) is not None:
        return DRAWN
    return guard.share(clients) if guard.bounds else LARGEST_SHARE


class _Rehearsal(Mailbox):
    """Clients in this process, whose requests are counted."""

    def __init__(self, clients: list[Client], limits: Any) -> None:
        super().__init__(None, limits, len(clients))  # type: ignore[arg-type]
        self.clients = clients
        self.asked: dict[int, dict[str, Question]] = {i: {} for i in range(len(clients))}

    @override
    def ask(self, requests: Mapping[int, Request], check: Check, partial: bool = False) -> Answers:
        answers = Answers()
        for i, request in requests.items():
            arrays = {k: _unpack(a) for k, a in request.arrays.items()}
            read = replace(request, args=json.loads(json.dumps(request.args)), arrays=arrays)
            memory = Memory(self.clients[i].root, request.run, self.clients[i].name)
            self.asked[i].update({q.digest: q for q in list_questions(read, memory)})
            reply = Worker(self.clients[i], read).answer()
            if request.op == "curvature":  # which sites with a budget say
                reply = replace(reply, numbers={"deviation": 0.0})
            check(i, reply)
            answers.replies[i] = reply
        self.traffic.exchanges += 1
        return answers


def _unpack(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)


@functools.lru_cache(maxsize=64)
def _rehearse_once(
    told: str, privacy: Privacy, clients: int, fit: bool
) -> dict[str, dict[str, Any]]:
    settings = FederationSettings(clients, privacy, do="fit" if fit else "train")
    return rehearse(AppConfig.from_dict(json.loads(told)), settings)


def rehearse(config: AppConfig, settings: FederationSettings) -> dict[str, dict[str, Any]]:
    """Return the questions of a few rounds among made-up clients: how often, at how many models.

    Raises :class:`ValueError` where nothing that is tried makes the algorithm run.
    """
    problems = []
    for federation in _make_up(config, settings.clients):
        try:
            return _play(config, settings, federation)
        except Exception as error:  # the next kind of samples may do
            problems.append(f"{type(error).__name__}: {error}")
    raise ValueError(
        "What this run asks of the sites cannot be found out by a rehearsal, so it has no plan: "
        f"{problems[0] if problems else 'there are no samples to try it on'}"
    )


def _play(
    config: AppConfig, settings: FederationSettings, federation: Federation
) -> dict[str, dict[str, Any]]:
    sizes, found = federation.train.sizes.tolist(), dict[str, dict[str, Any]]()
    if settings.do != "fit":
        plays: list[Any] = [(config.build_algorithm(sizes), FlowerClients)]
    else:
        l2, rhos, own_l2, _ = STRENGTHS[settings.privacy]
        plays = [
            (build_solver(Point(l2[0], own, rho), settings.privacy, config.guard, len(sizes)),
             partial(present, Candidate(l2[0], own)))
            for own in (None, own_l2[0]) for rho in (None, rhos[0])
        ]  # fmt: skip
    for algorithm, take in plays:
        for asked in _listen(config, settings, federation, algorithm, take):
            _count(found, asked, config)
    return found


def _listen(
    config: AppConfig, settings: FederationSettings, federation: Federation,
    algorithm: AnyAlgorithm, take: Callable[..., FlowerClients],
) -> list[list[Question]]:  # fmt: skip
    """Play a few rounds, and return what each client was asked."""
    task, n = config.build_task(), len(federation)
    with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
        root = Path(temporary)
        clients = [Client(federation.subset([i]), task, root) for i in range(n)]
        hidden = SecureSums() if settings.privacy == "secure" else None
        newton = isinstance(unwrap(algorithm), FairNewton)
        noised = newton and hidden is not None  # else it cannot run, as it says then
        mailbox = _Rehearsal(clients, settings.deadlines)
        sites = take(mailbox, _introduce(task, federation, noised), hidden)
        train(algorithm, sites, rounds=REHEARSED, seed=config.seed, progress=False)
    return [list(asked.values()) for asked in mailbox.asked.values()]


def _introduce(task: Task, federation: Federation, noised: bool = False) -> Members:
    schema, sizes = Schema.of(federation.subset([0])), federation.train.sizes.tolist()
    engine = task.build_engine(schema.make_placeholder())
    hellos = [
        Hello(name, None, {}, {"train": size}, schema, task.fingerprint(engine), noised=noised)
        for name, size in zip(federation.names, sizes, strict=True)
    ]
    return Members("rehearsal", task, hellos, engine)


def _count(found: dict[str, dict[str, Any]], asked: list[Question], config: AppConfig) -> None:
    """Add one client's questions: of each step the most in a round, and what they have alike."""
    rounds = {q.scope for q in asked}
    for step in dict.fromkeys(q.step for q in asked):
        mine = [q for q in asked if q.step == step]
        per_round = [[q for q in mine if q.scope == r] for r in rounds]
        times = max(len(one) for one in per_round)
        told = {
            "times": max(TRIES, times) if "#" in step else times,
            "models": max(len({q.model for q in one}) for one in per_round),
            "batch": mine[0].batch,
            "work": _common_work([dict(q.work) for q in mine if q.work], config),
        }
        old = found.get(step, told)
        most = {key: max(told[key], old[key]) for key in ("times", "models")}
        found[step] = {**told, **most}


def _common_work(works: list[dict[str, Any]], config: AppConfig) -> dict[str, Any]:
    """Return the settings of local work that are the same in every round, and the largest lr."""
    if not works:
        return {}
    same = {k: works[0][k] for k in RECKONED if all(w[k] == works[0][k] for w in works)}
    chosen = config.algorithm.get("local", {}).get("lr")
    largest = max(float(w["lr"]) for w in works)
    if isinstance(chosen, int | float) and largest == float(chosen):
        same["lr"] = largest
    return same


def _make_up(config: AppConfig, clients: int) -> Iterator[Federation]:
    """Return kinds of samples on which the rehearsal is tried."""
    n, rng = min(max(clients, 3), MOST_CLIENTS), np.random.default_rng(0)
    known = config.load_client(0) if "name" in config.data else None
    classes = _count_classes(config) if known is None else known.classes
    layout = config.samples if known is None else known.layout
    for shape in SHAPES if layout is None else ((layout.width,),):
        for tokens in (False, True) if layout is None else (False,):
            x: Any = rng.normal(size=(n, ROWS, *shape)).astype(np.float32)
            x = rng.integers(0, 8, size=x.shape) if tokens else x
            if classes is None:
                y: Any = rng.normal(size=(n, ROWS)).astype(np.float32)
            else:
                y = np.stack([rng.permutation(np.arange(ROWS) % classes) for _ in range(n)])
            x = x if layout is None else [_fill(layout, rows) for rows in x]
            rows = {f"client {i}": (x[i], y[i]) for i in range(n)}
            yield Federation.from_clients(rows, classes=classes, tokens=tokens)


def _fill(layout: Layout, rows: Any) -> Packed:
    """Return samples of several arrays: whole numbers are 0 or 1, and nothing is masked whole."""
    for one, span in layout.spans():
        if one.kind != KINDS["f"]:
            rows[:, span] = rows[:, span] > 0
            rows[:, span.start] = 1
    return Packed(rows.astype(np.int64) if layout.whole else rows, layout)


def _count_classes(config: AppConfig) -> int | None:
    if config.table is not None:
        names, task = config.table.class_names, config.table.task
        return len(names) if names else None if task == "regression" else config.table.classes or 2
    loss = resolve_loss(config.model.get("loss", "auto"), None)
    squared = config.classes is None and loss == "squared"
    return None if squared else config.classes or 2


# -- as an operator --------------------------------------------------------------------------------


def sign_run(
    folder: Path, given: Sequence[str], key: Path, members: Path | None
) -> tuple[str, list[str]]:
    """Return the signed plan of an app with these settings as one word, and the plan in words."""
    import_from(folder)
    (path,) = folder.glob("*/equifed.toml")
    told = {**read_app_settings(folder), **parse_node_config(" ".join(given))}
    config, settings = AppConfig.read(path), FederationSettings.from_run_config(told)
    plan = make_plan(config, settings, None if members is None else read_key_file(members))
    return pack_plan(sign_plan(plan, read_private(key))), plan.describe()


def sign_more_rounds(folder: Path, out: Path, given: Sequence[str], key: Path) -> str:
    """Return the signed plan of an app's run that goes on with more rounds, as one word."""
    import_from(folder)
    (path,) = folder.glob("*/equifed.toml")
    kept, changes = Kept(out), parse_node_config(" ".join(given))
    config, plan = kept.config(AppConfig.read(path)), read_plan(kept.told["plan"]["text"])
    rounds = max(int(changes.get("rounds", 0)), plan.rounds)
    return pack_plan(sign_plan(lengthen(plan, config, rounds), read_private(key)))
