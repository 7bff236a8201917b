"""What a site has answered in a run, and whether the plan has the next question.

A *question* is what an answer depends on: the same one may be asked again at will, because its
answer tells nothing new. The plan says how many different ones a step has in a round, and at how
many models. The account lies in the run's memory and is on the disk before an answer leaves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equifed.flower.budget import Refused
from equifed.flower.memory import Memory, slug, write_private
from equifed.flower.plan import PURPOSE, Plan, find_other, read_plan
from equifed.flower.site import Policy
from equifed.flower.wire import Request, digest_model, find_round
from equifed.training.keys import KeyProblem, PublicKey, find_signer

RECKONED = ("steps", "epochs", "batch_size", "proximal", "radius", "correction", "average",
            "mean_gradient", "multiplier")  # fmt: skip
"""Settings of local work that a plan fixes."""

KEPT_ROUNDS = 32
"""Rounds back to which a run may be resumed: older questions are refused, even asked again."""

ONCE = ("prepare", "metrics", "statistics", "deliver", "bounds")
"""Requests that belong to no round."""

KEYED = ("sum", "norms")
"""Requests about vectors that a client keeps."""

FREE = ("hello", "keys", "shares", "boxes", "unmask", "recall")
"""Requests that are not counted: steps of a hidden sum, and vectors that were shown before."""

WITHOUT = ("mask", "pins", "late", "start", "files", "sha256")
"""What no answer to a question depends on, or is held against the plan in another way."""

ALONE = ("slope", "control")
"""What members of a sum are told apart from the others."""


class Waiting(Exception):
    """The site's people have not approved the plan yet."""


@dataclass(frozen=True)
class Question:
    """One question: the step of the algorithm, the round (0: none), and what its answer is of."""

    step: str
    scope: int
    digest: str
    model: str = ""
    batch: int | None = None
    work: Mapping[str, Any] = field(default_factory=dict)


def list_questions(request: Request, memory: Memory) -> list[Question]:
    """Return the questions of a request: that of its operation, and that of a sum made with it."""
    op, args = request.op, request.args
    if op in FREE:
        return []
    if op == "prepare":
        stage = str(args["asked"]["stage"])
        return [Question(f"prepare {stage}", 0, _digest(args["asked"]))]
    if op in KEYED:
        key = str(args["key"])
        model, scope, _ = memory.trace(key)
        about = [model, scope, memory.trace(str(args.get("minus", "")))]
        tag, _, kind = key.rpartition("/")
        step = f"{op} {_name_place(tag.rpartition('#')[0].split('/'))} {kind}"
    else:
        address = list(map(str, args.get("address", [])))
        model = digest_model(_bytes(request, "x")) if "x" in request.arrays else ""
        scope = find_round(args.get("address", [])) if op not in ONCE else 0
        step = f"{op} {_name_place(address)}".strip() if op not in ONCE else op
        about = [model]
    if scope == 0 and op not in ONCE:
        step = f"once {step}"
    about += [_told(request, WITHOUT), _arrays(request)]
    asked = Question(
        step, scope, _digest([step, about]), model, args.get("batch_size"),
        dict(args.get("work") or {}),
    )  # fmt: skip
    if "mask" not in args:
        return [asked]
    part = str(args["mask"]["part"]) if op == "local" else op
    kind = step.rpartition(" ")[2] if op == "sum" else part
    row = _digest([asked.digest, args["mask"]["weights"]])
    summed = Question(f"{'' if scope else 'once '}opened {kind}", scope, row, model)
    return [summed] if op == "sum" else [asked, summed]


def name_common(request: Request) -> str:
    """Name what all members of a sum are told alike: it enters the masks, which stay otherwise."""
    told = _told(request, (*WITHOUT, *ALONE))
    return _digest(
        [request.op, told, {k: v for k, v in _arrays(request).items() if k not in ALONE}]
    )


def _told(request: Request, without: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in request.args.items() if name not in without}


def _arrays(request: Request) -> dict[str, str]:
    return {name: digest_model(_bytes(request, name)) for name in request.arrays}


def _name_place(address: Sequence[str]) -> str:
    """Return an address without its round, and with a sign in place of other numbers.

    >>> _name_place(["round", "3", "steps", "try", "2", "local"])
    'steps try # local'
    """
    words = address[2:] if address[:1] == ["round"] else address
    return " ".join("#" if re.fullmatch(r"-?\d+", word) else word for word in words)


def _bytes(request: Request, name: str) -> bytes:
    return bytes(np.asarray(request.arrays[name]).tobytes())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# -- the plan of a run at a site -------------------------------------------------------------------


def accept_plan(
    told: Any,
    policy: Policy,
    memory: Memory,
    root: Path,
    name: str,
    samples: int,
    about: str,
    keys: Mapping[str, PublicKey] | None,
    run: str,
) -> Plan | None:
    """Take the plan that comes with a hello, or raise :class:`Refused` or :class:`Waiting`.

    ``about`` are the settings of the site's own copy of the app, ``keys`` are those of all sites
    that it knows. Without operators in the policy a run may have no plan.
    """
    if not told:
        if policy.operators:
            raise Refused("this site answers only signed runs, and this run has no plan")
        policy.check_plan({}, samples)
        return None
    operator, plan = read_signed(told, policy)
    works = [step["work"] for step in plan.steps.values() if step.get("work")]
    work = {"lr": 1.0, **works[0]} if works else None
    policy.check_plan({"privacy": plan.privacy, "work": work}, samples)
    if plan.run != run:
        raise Refused("the plan belongs to another run")
    kept, place = memory.read_record("plan"), root / "plans" / f"{plan.digest[:16]}-{slug(name)}"
    other = find_other(json.loads(about), plan.config) if about and not kept else ""
    if other:
        raise Refused(f"the plan is of another app than this site installed: {other}")
    _check_members(plan, name, keys)
    changed = bool(kept) and kept["digest"] != plan.digest
    if changed and not plan.extends(read_plan(str(kept["text"]))):
        raise Refused("the plan of this run was changed after the site had agreed to it")
    if policy.budget is not None and not kept:
        policy.budget.check_plan(plan, samples, root, name)
    state = _read_state(place)
    if not kept and state.get("state") == "used":
        raise Refused("this site deleted what it knew of this run; start a new one")
    if policy.approve == "ask" and state.get("state") not in ("approved", "used"):
        _write_state(place, "waiting", plan, operator)
        raise Waiting(f"the people of this site have not approved the plan {plan.digest[:16]} yet")
    if not kept or changed:
        memory.write_record("plan", {"digest": plan.digest, **told})
        _write_state(place, "used", plan, operator)
    return plan


def read_signed(told: Any, policy: Policy) -> tuple[str, Plan]:
    """Return who signed a plan and the plan, or raise :class:`Refused`."""
    try:
        text, signature = str(told["text"]), str(told["signature"])
        plan = read_plan(text)
    except (KeyProblem, KeyError, TypeError) as error:
        raise Refused(f"the plan of the run cannot be read ({type(error).__name__})") from None
    operator = find_signer(policy.operator_keys, PURPOSE, text.encode(), signature)
    if operator is None and policy.operators:
        raise Refused(
            "the plan is not signed by an operator listed in this site's policy"
            if signature
            else "this site answers only signed runs, and this run's plan is not signed"
        )
    return operator or "", plan


def _check_members(plan: Plan, name: str, keys: Mapping[str, PublicKey] | None) -> None:
    if plan.members and name not in plan.members:
        raise Refused(f"the plan does not name {name!r} among those who take part")
    if keys is None:
        return
    if plan.privacy == "secure" and not plan.members:
        raise Refused("the plan has no members, but this site has a list of peers")
    for member, line in plan.members.items():
        if member not in keys or keys[member].line != line:
            raise Refused(f"the plan gives {member!r} a key that is not in this site's peers")


def _read_state(place: Path) -> dict[str, Any]:
    try:
        found = json.loads(place.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_state(place: Path, state: str, plan: Plan, operator: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    told = {"state": state, "digest": plan.digest, "operator": operator, "words": plan.describe()}
    content = json.dumps(told, indent=1).encode()
    write_private(place.with_suffix(".json"), content, sync=True)


def list_plans(root: Path) -> dict[str, dict[str, Any]]:
    """Return the plans that a site was shown, by the beginning of their digests."""
    return {path.stem: _read_state(path) for path in sorted((root / "plans").glob("*.json"))}


def approve(root: Path, name: str) -> None:
    """Let a plan that waits run."""
    path = root / "plans" / f"{name}.json"
    told = {**_read_state(path), "state": "approved"}
    write_private(path, json.dumps(told, indent=1).encode(), sync=True)


# -- its requests ----------------------------------------------------------------------------------


class Account:
    """The questions that a client answered under a plan."""

    def __init__(self, memory: Memory, plan: Plan) -> None:
        self.memory, self.plan = memory, plan

    @classmethod
    def open(cls, memory: Memory, policy: Policy) -> Account | None:
        """Return the account of a run; None where the site lets anybody ask.

        An operator whom the policy lists no more has no say in runs that are under way either.
        """
        kept = memory.read_record("plan")
        if kept:
            return cls(memory, read_signed(kept, policy)[1])
        if policy.operators:
            raise Refused("no plan of this run was agreed to at this site")
        return None

    def admit(self, request: Request) -> list[str]:
        """Write a request down, or raise :class:`Refused`; return what is unusual about it."""
        told: list[str] = []
        self._refuse_clear(request)
        record = self.memory.read_record("account")
        before = json.dumps(record)
        self._refuse_other_place(request, record)
        self._refuse_other_candidate(request, record)
        for question in list_questions(request, self.memory):
            self._check(question, request)
            told += self._count(question, record)
        if json.dumps(record) != before:
            self.memory.write_record("account", record)
        return told

    def _refuse_other_place(self, request: Request, record: dict[str, Any]) -> None:
        """Refuse another position, round or name than that of the question.

        Minibatches follow from the position, and what is kept is found by its name and round.
        """
        args, place = request.args, record.setdefault("position", request.client)
        if request.client != place:
            raise Refused(f"this site is client {place} of the run, not {request.client}")
        if "address" in args:
            where, scope = "/".join(map(str, args["address"])), find_round(args["address"])
            if request.tag.rpartition("#")[0] != (where or request.op):
                raise Refused(f"a request of {where!r:.60} is named {request.tag!r:.60}")
            if int(args.get("round", scope)) != scope:
                raise Refused(f"a request of round {scope} is said to be of {args['round']}")
        if args.get("start", [self.plan.seed, "initial"]) != [self.plan.seed, "initial"]:
            raise Refused("own parts are drawn by another seed than the plan's")

    def _refuse_other_candidate(self, request: Request, record: dict[str, Any]) -> None:
        """Refuse a candidate that a fit has not, and test rows before the others are done with."""
        told, fit = request.args.get("candidate"), self.plan.fit
        if told is None and (not fit or request.op == "prepare"):
            return
        if not fit or told is None:
            raise Refused(f"the plan {'names candidates' if fit else 'has no candidates'}")
        if told["l2"] not in fit["l2"] or told["own_l2"] not in (None, *fit["own_l2"]):
            raise Refused(f"the plan has no candidate with {told!r:.80}")
        splits = request.args.get("splits", [])
        if any((split == "test") != bool(told["whole"]) for split in splits):
            raise Refused(
                "test rows are measured after the choice alone, validation rows before it"
            )
        if record.get("chosen") and not told["whole"]:
            raise Refused("a candidate was chosen, and others are not solved after that")
        record["chosen"] = bool(told["whole"])

    def _refuse_clear(self, request: Request) -> None:
        """Refuse to show a vector or a single row's answer where the plan shows sums alone."""
        if self.plan.privacy != "secure":
            return
        args, stage = request.args, request.args.get("asked", {}).get("stage")
        bare = request.op in ("sum", "curvature", "prepare") and "mask" not in args
        if args.get("give") or args.get("describe") or request.op == "recall":
            raise Refused(f"the plan allows only sums, and {request.op!r} is more")
        if bare and stage != "names":
            raise Refused(f"the plan allows only sums, and {request.op!r} is a single term")

    def _check(self, asked: Question, request: Request) -> None:
        plan, step = self.plan, self.plan.steps.get(asked.step)
        if asked.step == "metrics":
            odd = [s for s in request.args["splits"] if s not in plan.splits]
            known = set(plan.config["evaluate"]["metrics"])
            odd += [m for m in request.args["metrics"] if m not in known]
            if odd:
                raise Refused(f"the plan measures nothing on or by {odd[0]!r:.40}")
            return
        if step is None:
            raise Refused(f"the plan of this run has no {asked.step!r:.80}")
        if not 0 <= asked.scope <= plan.rounds:
            raise Refused(f"round {asked.scope} is asked about, the plan has {plan.rounds}")
        if request.op in ("losses", "gradient", "local") and "opened" not in asked.step:
            if int(request.args["seed"]) != plan.seed:
                raise Refused("the minibatches are drawn by another seed than the plan's")
            if asked.batch != step.get("batch"):
                raise Refused(f"the request has minibatches of {asked.batch}, the plan "
                              f"{step.get('batch') or 'all rows'}")  # fmt: skip
        for key, value in (step.get("work") or {}).items():
            given = asked.work.get(key)
            if given != value and not (key == "lr" and 0 < float(given or 0) <= value):
                raise Refused(f"the request has {key} = {given}, the plan {value}")

    def _count(self, asked: Question, record: dict[str, Any]) -> list[str]:
        """Add a question to the record; refuse one too many, or out of its order."""
        plan, scope = self.plan, str(asked.scope)
        by_step = record.setdefault(asked.step, {}).setdefault(scope, {})
        latest = int(record.get("round", 0))
        if asked.scope and asked.scope < latest - KEPT_ROUNDS:
            raise Refused(f"round {asked.scope} is long over: this run is in round {latest}")
        if asked.digest in by_step:
            return []
        limit = plan.steps.get(asked.step, {})
        if asked.step == "metrics":
            limit = {"times": plan.evaluations, "models": plan.evaluations}
        models = {*by_step.values(), asked.model}
        wrong = ""
        if len(models) > int(limit["models"]):
            wrong = (
                f"a second model in {asked.step!r}"
                if len(models) == 2
                else (f"{len(models)} models in {asked.step!r}, the plan has {limit['models']}")
            )
        elif len(by_step) >= int(limit["times"]):
            wrong = f"{asked.step!r} {len(by_step) + 1} times, the plan says {limit['times']}"
        elif asked.scope and asked.scope < latest:
            wrong = f"{asked.step!r} of round {scope} after round {latest} had begun"
        if wrong:
            self._repeat(record, wrong if asked.scope == 0 else f"{wrong}, round {scope}")
        by_step[asked.digest] = asked.model
        if asked.scope > latest:
            record["round"] = asked.scope
            for done in (v for v in record.values() if isinstance(v, dict)):
                for old in [r for r in done if 0 < int(r) < asked.scope - KEPT_ROUNDS]:
                    del done[old]
        return [f"unusual: {wrong}"] if wrong else []

    def _repeat(self, record: dict[str, Any], wrong: str) -> None:
        """Use one of the repeats that the plan allows for rounds that clients were lost in."""
        used = int(record.get("repeats", 0))
        if used >= self.plan.repeats:
            raise Refused(f"the run asks for {wrong}")
        record["repeats"] = used + 1

    def check_model(self, what: str, length: float, first: float) -> None:
        """Refuse a model that is longer than honest training makes it."""
        most = self.plan.norm * max(1.0, first)
        if not length <= most:
            raise Refused(
                f"{what} has length {length:.3g}, the plan's bound is {most:.3g}; if the data ask "
                "for more, raise largest-model in [tool.flwr.app.config] and sign again"
            )
