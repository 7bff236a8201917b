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
from equifed.flower.plan import PURPOSE, Plan, Question, list_questions, read_plan, tally
from equifed.flower.site import Policy
from equifed.flower.wire import Request, find_round
from equifed.training.keys import KeyProblem, find_signer

Rules = Mapping[str, object]  # sentences, and whether they are true: then the site refuses
CHANGED = "the plan of this run was changed after the site had agreed to it"
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
        unsigned = "this site answers only signed runs, and this run has no plan"
        refuse_if({unsigned: policy.operators})
        return policy.check_run(samples)
    operator, plan = read_signed(told, policy)
    policy.check_run(samples, plan)
    refuse_if({"the plan belongs to another run": plan.run != run})
    place = client.root / "plans" / f"{plan.digest[:16]}-{slug(client.name)}.json"
    state = read_json(place).get("state")
    refuse_if(_rules_of_plan(plan, client, kept, state == "used"))
    if policy.budget is not None and not kept:
        policy.budget.check_plan(plan, samples, client.root, client.name)
    about = {"digest": plan.digest, "operator": operator, "words": plan.describe()}
    if policy.approve == "ask" and state not in ("approved", "used"):
        write_json(place, {"state": "waiting", **about})
        raise Waiting(f"the people of this site have not approved the plan {plan.digest[:16]} yet")
    memory.write_record("plan", {"digest": plan.digest, **told})
    return write_json(place, {"state": "used", **about})


def _rules_of_plan(plan: Plan, client: Client, kept: Mapping[str, Any], used: bool) -> Rules:
    peers, members, name = client.peers, plan.members, client.name
    lines = members if peers is None else {who: key.line for who, key in peers.items()}
    odd = next((who for who, line in members.items() if lines.get(who) != line), "")
    alone = peers is not None and plan.privacy == "secure" and not members
    absent = bool(members) and name not in members
    new = bool(kept) and kept["digest"] != plan.digest
    own = json.loads(client.task.about) if client.task.about and not kept else plan.config
    other = find_other(own, plan.config)
    return {
        f"the plan is of another app than this site installed: {other}": other,
        f"the plan does not name {name!r} among those who take part": absent,
        "the plan has no members, but this site has a list of peers": alone,
        f"the plan gives {odd!r} a key that is not in this site's peers": odd,
        CHANGED: new and not plan.extends(read_plan(str(kept["text"]))),
        "this site deleted what it knew of this run; start a new one": used and not kept,
    }


def read_signed(told: Any, policy: Policy) -> tuple[str, Plan]:
    """Return who signed a plan and the plan, or raise :class:`Refused`."""
    try:
        text, signature = str(told["text"]), str(told["signature"])
        plan = read_plan(text)
    except (KeyProblem, KeyError, TypeError) as error:
        raise Refused(f"the plan of the run cannot be read ({type(error).__name__})") from None
    operator = find_signer(policy.operator_keys, PURPOSE, text.encode(), signature)
    stranger = operator is None and bool(policy.operators)
    bare = "this site answers only signed runs, and this run's plan is not signed"
    nobody = "the plan is not signed by an operator listed in this site's policy"
    refuse_if({nobody: stranger and signature, bare: stranger})
    return operator or "", plan


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
    refuse_if({"no plan of this run was agreed to at this site": policy.operators})
    return None


def admit(plan: Plan, request: Request, memory: Memory) -> None:
    """Write a request down in the account of its run, or raise :class:`Refused`."""
    record = memory.read_record("account")
    before = json.dumps(record)
    refuse_if(_rules_of_place(plan, request, record.setdefault("position", request.client)))
    candidate = request.args.get("candidate")
    if plan.fit or candidate is not None:
        refuse_if(_rules_of_candidate(plan, request, bool(record.get("chosen"))))
    if candidate is not None:
        record["chosen"] = bool(candidate["whole"])
    for question in list_questions(request, memory):
        refuse_if(_rules_of_step(plan, question, request))
        _count(plan, question, record)
    if json.dumps(record) != before:
        memory.write_record("account", record)


def _rules_of_place(plan: Plan, request: Request, place: int) -> Rules:
    """Return rules of what is shown, and of the position, the round and the name of a request.

    Minibatches follow from the position, and what is kept is found by its name and round.
    """
    op, args, hidden = request.op, request.args, plan.privacy == "secure"
    address, first = args.get("address", []), [plan.seed, "initial"]
    where, scope = "/".join(map(str, address)), find_round(address)
    other = "address" in args and request.tag.rpartition("#")[0] != (where or op)
    said = args.get("round", scope) if "address" in args else scope
    more = args.get("give") or args.get("describe") or op == "recall"
    bare = op in ("sum", "curvature", "prepare") and "mask" not in args
    bare = bare and args.get("asked", {}).get("stage") != "names"
    return {
        f"the plan allows only sums, and {op!r} is more": hidden and more,
        f"the plan allows only sums, and {op!r} is a single term": hidden and bare,
        f"this site is client {place} of the run, not {request.client}": request.client != place,
        f"a request of {where!r:.60} is named {request.tag!r:.60}": other,
        f"a request of round {scope} is said to be of {said}": int(said) != scope,
        "own parts are drawn by another seed than the plan's": args.get("start", first) != first,
    }


def _rules_of_candidate(plan: Plan, request: Request, chosen: bool) -> Rules:
    """Return rules of the candidates of a fit: test rows come after the others are done with."""
    told, fit = request.args.get("candidate"), plan.fit
    if not fit or told is None:
        words = "the plan names candidates" if fit else "the plan has no candidates"
        return {words: told is not None or request.op != "prepare"}
    known = told["l2"] in fit["l2"] and told["own_l2"] in (None, *fit["own_l2"])
    whole = bool(told["whole"])
    early = [split for split in request.args.get("splits", []) if (split == "test") != whole]
    return {
        f"the plan has no candidate with {told!r:.80}": not known,
        "test rows are measured after the choice alone, validation rows before it": early,
        "a candidate was chosen, and others are not solved after that": chosen and not whole,
    }


def _rules_of_step(plan: Plan, asked: Question, request: Request) -> Rules:
    """Return rules of what is measured, of minibatches and of local work."""
    args, step, scope = request.args, plan.limits.get(asked.step), asked.scope
    if asked.step == "metrics":
        known = {*plan.splits, *plan.config["evaluate"]["metrics"]}
        odd = [one for one in (*args["splits"], *args["metrics"]) if one not in known]
        refuse_if({f"the plan measures nothing on or by {one!r:.40}": True for one in odd})
    if step is None:
        return {f"the plan of this run has no {asked.step!r:.80}": True}
    drawn = request.op in ("losses", "gradient", "local") and "opened" not in asked.step
    batch, usual, work = args.get("batch_size"), step.get("batch"), args.get("work") or {}
    seed, rows = drawn and int(args["seed"]) != plan.seed, usual or "all rows"
    others = {
        key: value
        for key, value in (step.get("work") or {}).items()
        if work.get(key) != value and not (key == "lr" and 0 < float(work.get(key) or 0) <= value)
    }
    return {
        f"round {scope} is asked about, the plan has {plan.rounds}": not 0 <= scope <= plan.rounds,
        "the minibatches are drawn by another seed than the plan's": seed,
        f"the request has minibatches of {batch}, the plan {rows}": drawn and batch != usual,
    } | {
        f"the request has {key} = {work.get(key)}, the plan {value}": True
        for key, value in others.items()
    }


def _count(plan: Plan, asked: Question, record: dict[str, Any]) -> None:
    """Add a question to the record; refuse one too many, or out of its order."""
    (step, scope, digest, _), latest = asked, int(record.get("round", 0))
    over = f"round {scope} is long over: this run is in round {latest}"
    refuse_if({over: 0 < scope < latest - KEPT_ROUNDS})
    if digest in record.get(step, {}).get(str(scope), {}):
        return
    limit, found, wrong = plan.limits[step], tally(record, asked), ""
    if (models := found["models"]) > int(limit["models"]):
        many = f"{models} models in {step!r}, the plan has {limit['models']}"
        wrong = f"a second model in {step!r}" if models == 2 else many
    elif found["times"] > int(limit["times"]):
        wrong = f"{step!r} {found['times']} times, the plan says {limit['times']}"
    elif 0 < scope < latest:
        wrong = f"{step!r} of round {scope} after round {latest} had begun"
    if wrong:
        used = int(record.get("repeats", 0))  # of what the plan allows for lost clients
        told = f"the run asks for {wrong}{f', round {scope}' if scope else ''}"
        refuse_if({told: used >= plan.repeats})
        record["repeats"] = used + 1
    if scope > latest:
        record["round"] = scope
        for done in (value for value in record.values() if isinstance(value, dict)):
            for old in [r for r in done if 0 < int(r) < scope - KEPT_ROUNDS]:
                del done[old]
