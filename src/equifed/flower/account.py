"""What a site agreed to and has answered in a run, and whether the plan has the next question.

The account lies in the run's memory and is on the disk before an answer leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equifed.flower.memory import Memory, Refused, read_json, refuse_if, slug, write_json
from equifed.flower.participant import Client
from equifed.flower.plan import PURPOSE, Plan, Question, list_questions, read_plan
from equifed.flower.site import Policy
from equifed.flower.wire import Request, find_round
from equifed.training.keys import KeyProblem, find_signer

KEPT_ROUNDS = 32  # back to which a run may be resumed: older questions are refused


class Waiting(Exception):
    """The site's people have not approved the plan yet."""


# -- the plan of a run at a site -------------------------------------------------------------------


def accept_plan(told: Any, client: Client, memory: Memory, run: str) -> None:
    """Take the plan that comes with a hello, or raise :class:`Refused` or :class:`Waiting`.

    Without operators in the policy a run may have no plan.
    """
    policy, samples, kept = client.policy, client.sizes["train"], memory.read_record("plan")
    if not told:
        refuse_if(policy.operators, "this site answers only signed runs, and this run has no plan")
        return policy.check_run(samples)
    operator, plan = read_signed(told, policy)
    policy.check_run(samples, plan)
    place = client.root / "plans" / f"{plan.digest[:16]}-{slug(client.name)}.json"
    state = read_json(place).get("state")
    refuse_if(plan.run != run, "the plan belongs to another run")
    if kept:
        same = kept["digest"] == plan.digest or plan.extends(read_plan(str(kept["text"])))
        refuse_if(not same, "the plan of this run was changed after the site had agreed to it")
    else:
        other = find_other(json.loads(client.task.about or "null") or plan.config, plan.config)
        refuse_if(other, f"the plan is of another app than this site installed: {other}")
        refuse_if(state == "used", "this site deleted what it knew of this run; start a new one")
        if policy.budget is not None:
            policy.budget.check_plan(plan, samples, client.root, client.name)
    _check_members(plan, client)
    about = {"digest": plan.digest, "operator": operator, "words": plan.describe()}
    if policy.approve == "ask" and state not in ("approved", "used"):
        write_json(place, {"state": "waiting", **about})
        raise Waiting(f"the people of this site have not approved the plan {plan.digest[:16]} yet")
    memory.write_record("plan", {"digest": plan.digest, **told})
    write_json(place, {"state": "used", **about})
    return None


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


def _check_members(plan: Plan, client: Client) -> None:
    """Refuse a plan without this site, or with other keys than those of its peers."""
    peers, members, name = client.peers, plan.members, client.name
    refuse_if(
        members and name not in members,
        f"the plan does not name {name!r} among those who take part",
    )
    refuse_if(
        peers is not None and plan.privacy == "secure" and not members,
        "the plan has no members, but this site has a list of peers",
    )
    lines = members if peers is None else {who: key.line for who, key in peers.items()}
    for who, line in members.items():
        refuse_if(
            lines.get(who) != line, f"the plan gives {who!r} a key that is not in this site's peers"
        )


def find_other(own: Any, told: Any, where: str = "") -> str:
    """Return the setting in which two tables differ; nothing where they are equal.

    >>> find_other({"data": {"target": "ill"}}, {"data": {"target": "age"}})
    "data.target is 'age' there and 'ill' here"
    """
    if isinstance(own, Mapping) and isinstance(told, Mapping):
        parts = ((own.get(k), told.get(k), f"{where}.{k}" if where else k) for k in {**own, **told})
        return next(filter(None, (find_other(*part) for part in parts)), "")
    return "" if own == told else f"{where} is {told!r:.60} there and {own!r:.60} here"


def list_plans(root: Path) -> dict[str, dict[str, Any]]:
    """Return the plans that a site was shown, by the beginning of their digests."""
    return {path.stem: read_json(path) for path in sorted((root / "plans").glob("*.json"))}


def approve(root: Path, name: str) -> None:
    """Let a plan that waits run."""
    path = root / "plans" / f"{name}.json"
    write_json(path, {**read_json(path), "state": "approved"})


# -- its requests ----------------------------------------------------------------------------------


def find_plan(memory: Memory, policy: Policy) -> Plan | None:
    """Return the plan that a site agreed to; None where it lets anybody ask.

    An operator whom the policy lists no more has no say in runs that are under way either.
    """
    if kept := memory.read_record("plan"):
        return read_signed(kept, policy)[1]
    refuse_if(policy.operators, "no plan of this run was agreed to at this site")
    return None


def admit(plan: Plan, request: Request, memory: Memory) -> None:
    """Write a request down in the account of its run, or raise :class:`Refused`."""
    record = memory.read_record("account")
    before = json.dumps(record)
    if plan.privacy == "secure":
        _refuse_clear(request)
    _refuse_other_place(plan, request, record)
    _refuse_other_candidate(plan, request, record)
    for question in list_questions(request, memory):
        _refuse_unplanned(plan, question, request)
        _count(plan, question, record)
    if json.dumps(record) != before:
        memory.write_record("account", record)


def _refuse_clear(request: Request) -> None:
    """Refuse to show a vector or a single row's answer where the plan shows sums alone."""
    op, args, allowed = request.op, request.args, "the plan allows only sums, and"
    more = args.get("give") or args.get("describe") or op == "recall"
    refuse_if(more, f"{allowed} {op!r} is more")
    bare = op in ("sum", "curvature", "prepare") and "mask" not in args
    names = args.get("asked", {}).get("stage") == "names"
    refuse_if(bare and not names, f"{allowed} {op!r} is a single term")


def _refuse_other_place(plan: Plan, request: Request, record: dict[str, Any]) -> None:
    """Refuse another position, round or name than that of the question.

    Minibatches follow from the position, and what is kept is found by its name and round.
    """
    args, place = request.args, record.setdefault("position", request.client)
    refuse_if(
        request.client != place, f"this site is client {place} of the run, not {request.client}"
    )
    if "address" in args:
        where, scope = "/".join(map(str, args["address"])), find_round(args["address"])
        named, round = request.tag.rpartition("#")[0], args.get("round", scope)
        other = f"a request of {where!r:.60} is named {request.tag!r:.60}"
        refuse_if(named != (where or request.op), other)
        refuse_if(int(round) != scope, f"a request of round {scope} is said to be of {round}")
    first = [plan.seed, "initial"]
    other = "own parts are drawn by another seed than the plan's"
    refuse_if(args.get("start", first) != first, other)


def _refuse_other_candidate(plan: Plan, request: Request, record: dict[str, Any]) -> None:
    """Refuse a candidate that a fit has not, and test rows before the others are done with."""
    told, fit = request.args.get("candidate"), plan.fit
    if told is None and (not fit or request.op == "prepare"):
        return
    if not fit or told is None:
        raise Refused(f"the plan {'names candidates' if fit else 'has no candidates'}")
    known = told["l2"] in fit["l2"] and told["own_l2"] in (None, *fit["own_l2"])
    refuse_if(not known, f"the plan has no candidate with {told!r:.80}")
    whole, splits = bool(told["whole"]), request.args.get("splits", [])
    refuse_if(
        any((split == "test") != whole for split in splits),
        "test rows are measured after the choice alone, validation rows before it",
    )
    over = "a candidate was chosen, and others are not solved after that"
    refuse_if(record.get("chosen") and not whole, over)
    record["chosen"] = whole


def _refuse_unplanned(plan: Plan, asked: Question, request: Request) -> None:
    args, step = request.args, plan.limits.get(asked.step)
    if asked.step == "metrics":
        known = plan.config["evaluate"]["metrics"]
        odd = [split for split in args["splits"] if split not in plan.splits]
        for one in odd + [metric for metric in args["metrics"] if metric not in known]:
            raise Refused(f"the plan measures nothing on or by {one!r:.40}")
    if step is None:
        raise Refused(f"the plan of this run has no {asked.step!r:.80}")
    late = f"round {asked.scope} is asked about, the plan has {plan.rounds}"
    refuse_if(not 0 <= asked.scope <= plan.rounds, late)
    if request.op in ("losses", "gradient", "local") and "opened" not in asked.step:
        other = "the minibatches are drawn by another seed than the plan's"
        refuse_if(int(args["seed"]) != plan.seed, other)
        batch, usual = args.get("batch_size"), step.get("batch")
        refuse_if(
            batch != usual,
            f"the request has minibatches of {batch}, the plan {usual or 'all rows'}",
        )
    for key, value in (step.get("work") or {}).items():
        given = (args.get("work") or {}).get(key)
        refuse_if(
            given != value and not (key == "lr" and 0 < float(given or 0) <= value),
            f"the request has {key} = {given}, the plan {value}",
        )


def _count(plan: Plan, asked: Question, record: dict[str, Any]) -> None:
    """Add a question to the record; refuse one too many, or out of its order."""
    (step, scope, digest, model), latest = asked, int(record.get("round", 0))
    answered = record.setdefault(step, {}).setdefault(str(scope), {})
    over = f"round {scope} is long over: this run is in round {latest}"
    refuse_if(0 < scope < latest - KEPT_ROUNDS, over)
    if digest in answered:
        return
    limit, models, wrong = plan.limits[step], len({*answered.values(), model}), ""
    if models > int(limit["models"]):
        many = f"{models} models in {step!r}, the plan has {limit['models']}"
        wrong = f"a second model in {step!r}" if models == 2 else many
    elif len(answered) >= int(limit["times"]):
        wrong = f"{step!r} {len(answered) + 1} times, the plan says {limit['times']}"
    elif 0 < scope < latest:
        wrong = f"{step!r} of round {scope} after round {latest} had begun"
    if wrong:
        used = int(record.get("repeats", 0))  # of what the plan allows for lost clients
        told = f"the run asks for {wrong}{f', round {scope}' if scope else ''}"
        refuse_if(used >= plan.repeats, told)
        record["repeats"] = used + 1
    answered[digest] = model
    if scope > latest:
        record["round"] = scope
        for done in (value for value in record.values() if isinstance(value, dict)):
            for old in [r for r in done if 0 < int(r) < scope - KEPT_ROUNDS]:
                del done[old]
