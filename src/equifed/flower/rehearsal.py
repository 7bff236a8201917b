"""A plan from an app: its algorithm plays a few rounds among made-up clients, and we listen."""

from __future__ import annotations

import functools
import itertools
import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from equifed.algorithms.around import unwrap
from equifed.algorithms.fair_newton import FairNewton
from equifed.contract.evaluation import SPLITS
from equifed.data import Federation
from equifed.data.fields import KINDS, Layout, Packed
from equifed.flower.app_config import AppConfig, FederationSettings, Kept, read_app_settings
from equifed.flower.fit import LONGEST, MEASURED, STRENGTHS, build_solver, count_candidates, present
from equifed.flower.flwr_private import parse_node_config
from equifed.flower.handshake import Hello
from equifed.flower.mailbox import Answers, Check, Mailbox
from equifed.flower.members import Members
from equifed.flower.memory import Memory
from equifed.flower.messenger import SecureSums
from equifed.flower.participant import Client
from equifed.flower.plan import Plan, list_questions, pack_plan, read_plan, sign_plan, tally
from equifed.flower.secure.masking import DRAWN, LARGEST_SHARE
from equifed.flower.server import FlowerClients
from equifed.flower.site import Privacy, Site, import_from
from equifed.flower.task import Candidate, Schema, Task
from equifed.flower.wire import Request
from equifed.flower.worker import Worker
from equifed.models.losses import resolve_loss
from equifed.runs.candidates import Point
from equifed.training import train
from equifed.training.keys import PublicKey, read_key_file, read_private

REHEARSED, MOST_CLIENTS, ROWS = 3, 12, 24  # rounds and clients of a rehearsal, and rows of each
TRIES = 40  # questions of a round in a step whose number depends on the data (measured step sizes)
SHAPES = ((5,), (1, 28, 28), (3, 32, 32))  # of samples that are tried, where no data are named

PREPARE = ("kinds", "sums", "squares", "names", "counts")
RECKONED = ("steps", "epochs", "batch_size", "proximal", "radius", "correction", "average",
            "mean_gradient", "multiplier")  # settings of local work that a plan fixes # fmt: skip

Step = dict[str, Any]  # of a plan: times in a round, models, batch and local work


def make_plan(
    config: AppConfig,
    settings: FederationSettings,
    members: Mapping[str, PublicKey] | None = None,
    run: str = "",
) -> Plan:
    """Return the plan of a run; ``members`` are the only ones that take part, if there are any."""
    rounds, fit = settings.count_rounds(config), settings.do == "fit"
    about: Step = {"times": 1, "models": 1}
    splits, steps = choose_splits(config, settings), dict[str, Step]()
    if settings.deliver or settings.do == "evaluate":
        steps["deliver"] = about
    if settings.do == "statistics":
        steps, splits, rounds = {"statistics": about}, (), 0
    elif settings.do == "evaluate":
        rounds = 0
    else:
        told = json.dumps(config.to_dict(), sort_keys=True)
        steps |= _rehearse_once(told, settings.privacy, settings.clients, fit) | {"bounds": about}
        steps |= {f"prepare {stage}": about for stage in PREPARE if config.table is not None}
    evaluations, given = rounds // config.evaluate.every + 4, {}
    if fit:
        count, (l2, _, own_l2, _) = count_candidates(settings.privacy), STRENGTHS[settings.privacy]
        evaluations, given = MEASURED * count, {"l2": [*l2], "own_l2": [*own_l2]}
        for name in [name for name in steps if name.startswith(("once", "bounds"))]:
            every = {key: count * steps[name][key] for key in about}  # of every candidate
            steps[name] = steps[name] | every
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
        0 if settings.deadlines.on_missing != "continue" else 2 + rounds // 10,
        {name: key.line for name, key in (members or {}).items()},
        given,
    )


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

    def __init__(self, clients: list[Client], limits: Any, found: dict[str, Step]) -> None:
        super().__init__(None, limits, len(clients))  # type: ignore[arg-type]
        self.clients, self.found = clients, found
        self.accounts: list[dict[str, Any]] = [{} for _ in clients]

    @override
    def ask(self, requests: Mapping[int, Request], check: Check, partial: bool = False) -> Answers:
        answers = Answers()
        for i, request in requests.items():
            read, client = Request.from_records(request.to_records()), self.clients[i]
            memory = Memory(client.root, request.run, client.name)
            for question in list_questions(read, memory):
                step = self.found.setdefault(question.step, {"times": 0, "models": 0, "asked": []})
                told = tally(self.accounts[i], question)
                step |= {what: max(step[what], count) for what, count in told.items()}
                step["asked"].append({} if "opened" in question.step else read.args)
            reply = Worker(client, read).answer()
            if request.op == "curvature":  # which sites with a budget say
                reply = replace(reply, numbers={"deviation": 0.0})
            check(i, reply)
            answers.replies[i] = reply
        self.traffic.exchanges += 1
        return answers


@functools.lru_cache(maxsize=64)
def _rehearse_once(told: str, privacy: Privacy, clients: int, fit: bool) -> dict[str, Step]:
    settings = FederationSettings(clients, privacy, do="fit" if fit else "train")
    return rehearse(AppConfig.from_dict(json.loads(told)), settings)


def rehearse(config: AppConfig, settings: FederationSettings) -> dict[str, Step]:
    """Return the questions of a few rounds among made-up clients: how often, at how many models.

    Raises :class:`ValueError` where nothing that is tried makes the algorithm run.
    """
    problems = ["there are no samples to try it on"]
    for federation in _make_up(config, settings.clients):
        try:
            return _play(config, settings, federation)
        except Exception as error:  # the next kind of samples may do
            problems.append(f"{type(error).__name__}: {error}")
    raise ValueError(
        "What this run asks of the sites cannot be found out by a rehearsal, so it has no plan: "
        f"{problems[:2][-1]}"
    )


def _play(
    config: AppConfig, settings: FederationSettings, federation: Federation
) -> dict[str, Step]:
    """Play a few rounds of all algorithms there are, and return what was asked."""
    sizes, found = federation.train.sizes.tolist(), dict[str, Step]()
    plays: list[Any] = [(config.build_algorithm(sizes), FlowerClients)]
    if settings.do == "fit":
        l2, rhos, own_l2, _ = STRENGTHS[settings.privacy]
        points = itertools.product(l2[:1], (None, own_l2[0]), (None, rhos[0]))
        plays = [
            (build_solver(Point(*point), settings.privacy, config.guard, len(sizes)),
             functools.partial(present, Candidate(*point[:2])))
            for point in points
        ]  # fmt: skip
    for algorithm, take in plays:
        task, hidden = config.build_task(), SecureSums() if settings.privacy == "secure" else None
        noised = hidden is not None and isinstance(unwrap(algorithm), FairNewton)  # else it cannot
        with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
            site = Site(settings={"memory": temporary})
            clients = [Client(federation.subset([i]), task, site) for i in range(len(sizes))]
            mailbox = _Rehearsal(clients, settings.deadlines, found)
            sites = take(mailbox, _introduce(task, federation, noised), hidden)
            train(algorithm, sites, rounds=REHEARSED, seed=config.seed, progress=False)
    return {name: _finish(name, config, **step) for name, step in found.items()}


def _introduce(task: Task, federation: Federation, noised: bool = False) -> Members:
    schema, sizes = Schema.of(federation.subset([0])), federation.train.sizes.tolist()
    engine = task.build_engine(schema.make_placeholder())
    hellos = [
        Hello(name, None, {}, {"train": size}, schema, task.fingerprint(engine), noised=noised)
        for name, size in zip(federation.names, sizes, strict=True)
    ]
    return Members("rehearsal", task, hellos, engine)


def _finish(
    name: str, config: AppConfig, times: int, models: int, asked: list[dict[str, Any]]
) -> Step:
    """Return a step with what its questions have alike: minibatches, local work, the largest lr."""
    works = [args["work"] for args in asked if args.get("work")]
    same = {k: works[0][k] for k in RECKONED if works and all(w[k] == works[0][k] for w in works)}
    largest = max((float(work["lr"]) for work in works), default=None)
    if works and config.algorithm.get("local", {}).get("lr") == largest:
        same["lr"] = largest
    times = max(TRIES, times) if "#" in name else times
    return {"times": times, "models": models, "batch": asked[0].get("batch_size"), "work": same}


def _make_up(config: AppConfig, clients: int) -> Iterator[Federation]:
    """Return kinds of samples on which the rehearsal is tried."""
    n, rng = min(max(clients, 3), MOST_CLIENTS), np.random.default_rng(0)
    known = config.load_client(0) if "name" in config.data else None
    classes = _count_classes(config) if known is None else known.classes
    layout = config.samples if known is None else known.layout
    shapes = SHAPES if layout is None else ((layout.width,),)
    for shape, tokens in itertools.product(shapes, (False, True) if layout is None else (False,)):
        x: Any = rng.normal(size=(n, ROWS, *shape)).astype(np.float32)
        if tokens:
            x = rng.integers(0, 8, size=x.shape)
        if classes is None:
            y: Any = rng.normal(size=(n, ROWS)).astype(np.float32)
        else:
            y = np.stack([rng.permutation(np.arange(ROWS) % classes) for _ in range(n)])
        if layout is not None:
            x = [_fill(layout, rows) for rows in x]
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
    squared = resolve_loss(config.model.get("loss", "auto"), None) == "squared"
    return None if squared and config.classes is None else config.classes or 2


# -- as an operator --------------------------------------------------------------------------------


def sign_run(
    folder: Path, given: Sequence[str], key: Path, members: Path | None
) -> tuple[str, list[str]]:
    """Return the signed plan of an app with these settings as one word, and the plan in words."""
    config, changes = _read_app(folder, given)
    settings = FederationSettings.from_run_config({**read_app_settings(folder), **changes})
    plan = make_plan(config, settings, None if members is None else read_key_file(members))
    return pack_plan(sign_plan(plan, read_private(key))), plan.describe()


def sign_more_rounds(folder: Path, out: Path, given: Sequence[str], key: Path) -> str:
    """Return the signed plan of an app's run that goes on with more rounds, as one word."""
    (config, changes), kept = _read_app(folder, given), Kept(out)
    config, plan = kept.config(config), read_plan(kept.told["plan"]["text"])
    rounds = max(int(changes.get("rounds", 0)), plan.rounds)
    return pack_plan(sign_plan(lengthen(plan, config, rounds), read_private(key)))


def _read_app(folder: Path, given: Sequence[str]) -> tuple[AppConfig, dict[str, Any]]:
    """Return what an app trains, and the settings that are changed."""
    import_from(folder)
    (path,) = folder.glob("*/equifed.toml")
    return AppConfig.read(path), parse_node_config(" ".join(given))
