"""A client at one request: the library's own local work on its data.

Every request is answered from the request, the data and the client's memory alone, and memory is
written at the end, so a request may be repeated at will.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.algorithms.guard_limits import round_losses
from equifed.contract import Stream
from equifed.contract.curvature import Inexactness
from equifed.contract.local import LocalWork, own_strength
from equifed.data import DataError, Federation, Preparation
from equifed.data.fit_by_sums import find_names, to_vector
from equifed.engines.base import OwnRows
from equifed.engines.ordered_sums import DenseVectors
from equifed.flower.account import accept_plan, admit, find_plan
from equifed.flower.memory import Memory, Refused, Stale, digest, keep_delivery, refuse_if, slug
from equifed.flower.participant import Client, SiteData
from equifed.flower.plan import Plan, digest_sent, list_questions, name_common
from equifed.flower.secure.masking import LARGEST_SHARE, Masking, sign_told
from equifed.flower.site import FREE, MOMENTS, PAID, TABLE, refuse
from equifed.flower.task import PACKAGES, OneClient, Schema
from equifed.flower.wire import (
    ALWAYS,
    PARTS,
    VERBS,
    Reply,
    Request,
    WireError,
    expect_vector,
    pack_blocks,
    read_metric,
)
from equifed.metrics.metric import as_metrics
from equifed.models.curvature import known_curvature
from equifed.models.own_part import fit_new_client
from equifed.training.keys import PublicKey
from equifed.training.tables import package_versions


class Worker:
    """One client at one request."""

    def __init__(self, client: Client, request: Request) -> None:
        self.client, self.request, self.args = client, request, request.args
        self.policy, self.memory = client.policy, Memory(client.root, request.run, client.name)
        self.round = int(self.args.get("round", 0))
        self.plan: Plan | None = None  # none in a hello, and where the site lets anybody ask

    @cached_property
    def federation(self) -> Federation:
        """The client's samples."""
        return self.client.prepare(self.memory)

    @cached_property
    def engine(self) -> OneClient:
        """The library's own engine on these samples; under a budget one that adds noise."""
        client, budget = self.client, self.policy.budget
        if budget is not None and self.plan is not None:
            given = self.plan, client.root, client.name
            return budget.build_engine(client.task, self.federation, *given)
        position, told = max(self.request.client, 0), self.args.get("candidate")
        return client.build_engine(self.federation, position, told)

    def answer(self) -> Reply:
        """Do what the request says."""
        op, verb = self.request.op, VERBS[self.request.op]
        if op != "hello":
            self.plan = find_plan(self.memory, self.policy)
        if self.plan is not None:
            sent = set(self.request.arrays)
            for name in sorted(sent & {"x", "target", "control"} if "x" in sent else ()):
                self._refuse_far(self.plan, name)
            admit(self.plan, self.request, self.memory)
        self.memory.tidy(self.round, [str(key) for key in self.args.get("pins", [])])
        if verb.own_part and self.engine.remembers_own():
            after = int(self.args.get("own_round", 0)) + 1
            self._bind_own_part(self.round if verb.own_part == "before" else after)
        if verb.masks:
            return self.request.reply(getattr(self._masking(), op)())
        told = None if self.policy.budget is None else self._tell_again(op)
        return told or getattr(self, op)()

    def _refuse_far(self, plan: Plan, name: str) -> None:
        """Refuse a model that is longer than honest training makes it, or the way to one."""
        what, length = "the model", float(self._sent(name).double().norm())
        if name != "x":
            work = LocalWork.from_dict(self.args["work"])
            length *= work.lr * float(work.steps_for([self.client.sizes["train"]])[0])
            what = "the correction of local steps"
        plan.check_model(what, length, self.client.measure_first(self.engine, plan.seed))

    def _tell_again(self, op: str) -> Reply | None:
        """Refuse what has no mechanism under a budget; tell again what was told, for nothing."""
        if op not in (*PAID, *FREE):
            refuse(op)
        if op == "hello" and isinstance(self.client.data, SiteData):
            refuse(TABLE)
        if op not in PAID:
            return None
        (asked, *_) = list_questions(self.request, self.memory)
        told = self.memory.read_record("told").get(asked.digest)
        if told is None:
            return None
        rows = {k: self.memory.get(f"{told['tag']}/{k}") for k in told["parts"]}
        lost = f"{asked.step!r:.80} was answered before, and the answer is no longer stored"
        parts = {k: self._held(row) for k, row in rows.items() if row is not None}
        refuse_if({lost: len(parts) < len(rows)})
        return self._keep(told["numbers"], parts)

    # -- before the first round -------------------------------------------------------------------

    def hello(self) -> Reply:
        """Say who this is, what data there are, and with which software.

        A table whose preparation is not known yet is described by its columns.
        """
        client, data, told = self.client, self.client.data, self.args.get("preparation")
        accept_plan(self.args.get("plan"), client, self.memory, self.request.run)
        notes, ready = self.policy.describe(), True
        about: dict[str, Any] = {"name": client.name, "partition": client.site.partition}
        about |= {"versions": package_versions(PACKAGES), "sizes": client.sizes}
        if isinstance(data, SiteData):
            if told is not None:
                Preparation.from_json(told)  # refuses what is none
            about |= data.describe()
            ready, totals = bool(self._take_once("preparation")), self._take_once("totals")
            notes += data.find_far(totals) if self.policy.show_by_name else []
        if ready:
            schema, model = Schema.of(self.federation), client.task.fingerprint(self.engine)
            about |= {"schema": schema.to_dict(), "model": model}
            about["noised"] = self.policy.budget is not None
        told = {**about, "notes": notes}
        return self.request.reply(sign_told(told, client.key, self.request.run, "hello"))

    def prepare(self) -> Reply:
        """Answer one question of the fit, in clear or under masks."""
        data, asked = self.client.data, self.args["asked"]
        if not isinstance(data, SiteData):
            raise WireError("this site gives no table")
        if asked["prepare"] != json.loads(json.dumps(asdict(data.settings.prepare))):
            raise DataError("the question is of another preparation than this site agreed to")
        named = asked["stage"] in ("names", "counts")
        answer = data.table.answer({**asked, "stage": "sums"} if named else asked)
        if asked["stage"] == "names":
            return self.request.reply({"names": find_names(asked, answer)})
        # Sums of a question's answers over nearly the same sites must not both be opened.
        (question,) = list_questions(self.request, self.memory)
        about = "prepare", question.digest, 0, ""
        return self._give({}, {"vector": to_vector(asked, answer)}, *about)

    def statistics(self) -> Reply:
        """Return rows, labels and means, as far as the site shows them."""
        self.policy.check_run(self.client.sizes["train"])
        return self.request.reply({"statistics": self.client.describe_rows()})

    # -- the verbs --------------------------------------------------------------------------------

    def losses(self) -> Reply:
        """Return f_i(x)."""
        losses = self.engine.losses(self._sent("x"), self._stream(), self.args["batch_size"])
        return self._keep({"loss": self._round_loss(losses)}, {})

    def gradient(self) -> Reply:
        """Return f_i(x), and keep the gradient or also send it."""
        x, stream = self._sent("x"), self._stream()
        losses, vectors = self.engine.value_and_gradient(x, stream, self.args["batch_size"])
        numbers: dict[str, Any] = {"loss": self._round_loss(losses)}
        found = self.engine.inexactness(x)
        if isinstance(found, Inexactness):  # own parts that are found numerically
            numbers["own_error"] = [float(found.losses[0]), float(found.gradients[0])]
        self._keep_own_part()
        return self._keep(numbers, {"gradient": vectors})

    def local(self) -> Reply:
        """Do local work, and keep or send what comes of it."""
        work = LocalWork.from_dict(self.args["work"])
        work = work.work(scale=read_metric(self.request.arrays, self.engine.model.size))
        self.policy.check_work(work, len(self.federation.train))
        x, slope, control = self._sent("x"), self.args["slope"], self._control()
        moved = self.engine.local_steps(
            x, work, self._stream(), control=control,
            target=None if control is None else self._sent("target"),
            slopes=None if slope is None else np.array([float(slope)]),
        )  # fmt: skip
        if self.plan is not None and moved.displacement is not None:
            first = self.client.measure_first(self.engine, self.plan.seed)
            after = x.double() - moved.displacement.weighted_sum(np.ones(1))
            self.plan.check_model("the model after local steps", float(after.norm()), first)
        self._keep_own_part()
        numbers: dict[str, Any] = {"steps": int(moved.steps[0])}
        if moved.thresholds is not None:
            numbers["threshold"] = float(moved.thresholds[0])
        parts = {name: getattr(moved, name) for name in PARTS}
        return self._keep(numbers, {name: part for name, part in parts.items() if part is not None})

    def sum(self) -> Reply:
        """Return a kept vector times this client's weight, masked."""
        key, old = str(self.args["key"]), self.args.get("minus")
        vector, kind = self._recall(key), key.rpartition("/")[2]
        if old is not None:
            vector, kind = vector - self._recall(str(old)), f"change of {kind}"
        return self._give({}, {"vector": vector}, kind, *self.memory.trace(key))

    def curvature(self) -> Reply:
        """Return this client's second derivatives, or their product with a thin matrix, packed.

        Under a budget a bound on one block from noised moments, without the penalty.
        """
        form, thin = self.args["form"], self.request.arrays.get("thin")
        model, numbers, dtype = digest_sent(self.request), {}, self.engine.model.dtype
        if self.policy.budget is not None:
            if form != "mean" or thin is not None or self.plan is None:
                raise Refused(
                    f"under a privacy budget curvature is sent as 'mean', not as {form!r:.20}"
                )
            site = self.engine.site(0)  # type: ignore[attr-defined]
            vector = pack_blocks(site.hessian()[None], thin=False)
            model, numbers = MOMENTS, {"deviation": site.hessian_noise()}
        else:
            by = None if thin is None else self._tensor(np.asarray(thin))
            found = self.engine.curvature_sum(self._sent("x"), np.ones(1), form, by)
            if isinstance(found, str):
                raise WireError(found)
            vector = pack_blocks(found.blocks, thin is not None and form == "blocks")
        about = "curvature", model, self.round, name_common(self.request)
        return self._give(numbers, {"curvature": _array(vector.to(dtype))}, *about)

    def bounds(self) -> Reply:
        """Return what is certain of this client's curvature, as a simulation of all finds it."""
        if self.policy.budget is not None:
            return self.request.reply({})
        clients, inputs = int(self.args["clients"]), self.engine.inputs_of
        known = known_curvature(self.engine.model, clients, inputs, [0])
        if isinstance(known, str) or not np.isfinite(known.smoothness[0]):
            return self.request.reply({})
        least, largest = float(known.strong_convexity[0]), float(known.smoothness[0])
        told = {"smoothness": largest, "strong_convexity": least, "tight": known.tight}
        return self.request.reply(told)

    def norms(self) -> Reply:
        """Return the squared length of a kept vector."""
        vectors = self._held(self._recall(str(self.args["key"])))
        metric = read_metric(self.request.arrays, self.engine.model.size)
        return self.request.reply({"norm": float(vectors.squared_norms(metric)[0])})

    def recall(self) -> Reply:
        """Return a kept vector in clear."""
        self.policy.allow_clear()
        return self.request.reply({}, {"vector": self._recall(str(self.args["key"]))})

    def metrics(self) -> Reply:
        """Return the metrics of every split, and what single samples say if that is asked."""
        told, x, splits = dict[str, Any](), self._sent("x"), self.args["splits"]
        asked = as_metrics(self.args["metrics"])
        for found in self.engine.evaluate(x, splits, asked):
            metrics = {
                name: self._round_loss(values) if name in ("loss", "mse") else float(values[0])
                for name, values in found.metrics.items()
            }
            kept = {k: v for k, v in metrics.items() if k in ALWAYS or not np.isnan(v)}
            told[found.split] = {"size": int(found.sizes[0]), "metrics": kept}
        if not self.args["describe"]:
            return self.request.reply({"splits": told})
        details = self.engine.describe(x, splits[0], asked)
        own = None if details is None else details.clients[0]
        detail = None if own is None else own.to_dict()
        return self.request.reply({"splits": told, "detail": detail})

    def deliver(self) -> Reply:
        """Keep the model of a run that ended, with its card and this client's page."""
        client, x = self.client, self._sent("x")
        if digest(_array(x)) != self.args["sha256"]:
            raise WireError("the model was changed on its way")
        default = client.root / "results" / slug(client.name)
        folder, predictor = client.site.settings.get("results", default), self.engine.predictor(x)
        if predictor.own:  # this site's model: with the own part that it has
            predictor = predictor.for_client(client.name)
        checksum = keep_delivery(Path(str(folder)), self.request.run, predictor, self.args)
        return self.request.reply({"checksum": checksum})

    # -- own parts --------------------------------------------------------------------------------

    def _bind_own_part(self, before: int) -> None:
        """Let the engine start from the own part of the last round before another one.

        A site that comes after the end has none, and no run to draw one for: it fits its own.
        """
        engine, kept = self.engine, self.memory.own_before(before)
        if kept is None and "start" not in self.args:
            row = self._fit_own_part()[None]
        elif kept is None or kept.shape != (engine.model.own_size,):
            seed, *address = self.args["start"]
            engine.initial(Stream(int(seed), tuple(address)))  # draws the own part, too
            row = engine.own_rows.start
        else:
            row = engine.own_rows.start.new_tensor(kept)[None]
        engine.own_rows = OwnRows(row)

    def _keep_own_part(self) -> None:
        """Keep the own part for the next round, if it has moved in this one."""
        if self.engine.remembers_own() and self.engine.own_rows.after is not None:
            self.memory.keep_own(self.round, _array(self.engine.own_after()[0]))

    def _fit_own_part(self) -> Tensor:
        """Return the best own part (p,) for the site's training samples at the shared part x."""
        x, train = self._sent("x"), self.federation.train
        told, names = self.engine.predictor(x), tuple(self.engine.model.own_shapes)
        targets, held = torch.as_tensor(train.targets), own_strength(told.own_l2, len(train))

        def run(module: torch.nn.Module) -> Tensor:
            return torch.as_tensor(told.run_module(module, train.inputs))

        try:
            module = fit_new_client(told.module, names, run, targets, told.loss, held)
        except ValueError as error:  # our own words, about parameters and settings
            raise WireError(f"no own part can be fitted here: {error}") from error
        return torch.cat([module.get_parameter(n).detach().reshape(-1) for n in names]).to(x)

    # -- small parts ------------------------------------------------------------------------------

    def _take_once(self, what: str) -> Any:
        """Return what was said with the hello of a run, which cannot be changed later."""
        told, kept = self.args.get(what), self.memory.read_record(what)
        other = f"the {what} differs from the one this site received earlier in this run"
        refuse_if({other: told and kept and told != kept})
        if told and not kept:
            self.memory.write_record(what, told)
        return told or kept

    def _round_loss(self, losses: NDArray[Any]) -> float:
        """Return this client's loss as it may leave: rounded where sums are hidden."""
        losses = losses if self.policy.budget is None else np.maximum(losses, 0.0)
        hidden = self.plan is not None and self.plan.privacy == "secure"
        step = self.plan.rounding if self.plan is not None and hidden else 0.0
        return float(round_losses(losses, step)[0])

    def _keep(self, numbers: dict[str, Any], parts: Mapping[str, Any]) -> Reply:
        """Keep vectors under their keys; send them, or one of them scaled and masked, if asked."""
        request, memory, args = self.request, self.memory, self.args
        rows = {name: self.policy.shorten(_array(held.matrix[0])) for name, held in parts.items()}
        about = digest_sent(request), self.round, name_common(request)
        memory.tidy(self.round, [f"{request.tag}/{name}" for name in rows])
        for name, row in rows.items():
            memory.put(f"{request.tag}/{name}", row, *about)
        if self.policy.budget is not None:
            (asked, *_) = list_questions(request, memory)
            entry = {"tag": request.tag, "parts": list(rows), "numbers": numbers}
            memory.write_record("told", {**memory.read_record("told"), asked.digest: entry})
        if rows and "mask" in args:
            kind = str(args["mask"]["part"])
            return self._give(numbers, {kind: rows[kind]}, kind, *about)
        return self._give(numbers, rows) if rows and args["give"] else request.reply(numbers)

    def _give(self, numbers: dict[str, Any], rows: dict[str, NDArray[Any]], *about: Any) -> Reply:
        """Send a vector scaled and masked (``about`` is for ``Masking``), else all in clear."""
        if "mask" in self.args:
            (vector,) = rows.values()
            return self.request.reply(numbers, {"masked": self._masking().mask(vector, *about)})
        self.policy.allow_clear()
        return self.request.reply(numbers, rows)

    def _control(self) -> DenseVectors | None:
        if "control" in self.request.arrays:
            return DenseVectors(self._sent("control")[None])
        key = self.args["control"]
        return None if key is None else self._held(self._recall(str(key)))

    def _recall(self, key: str) -> NDArray[Any]:
        size, dtype = self._kind()
        if not key:  # the memory that every client starts with
            return np.zeros(size, dtype=dtype)
        vector = self.memory.get(key)
        if vector is None or vector.shape != (size,) or vector.dtype.name != dtype:
            raise Stale(f"this client does not hold {key}")
        return vector

    def _masking(self) -> Masking:
        """Return this client's part in a hidden sum, in which the plan's members are trusted."""
        client, plan, peers = self.client, self.plan, self.client.peers
        if plan is not None and plan.members:
            peers = {name: PublicKey(line, name) for name, line in plan.members.items()}
        cap = LARGEST_SHARE if plan is None else plan.cap
        return Masking(self.memory, self.request, client.name, client.key, peers, cap)

    def _sent(self, name: str) -> Tensor:
        return self._tensor(expect_vector(self.request.arrays, name, *self._kind()))

    def _stream(self) -> Stream:
        return Stream(int(self.args["seed"]), tuple(self.args["address"]))

    def _kind(self) -> tuple[int, str]:
        return self.engine.model.size, str(self.engine.model.dtype)[6:]

    def _held(self, row: NDArray[Any]) -> DenseVectors:
        return DenseVectors(self._tensor(row)[None])

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.as_tensor(array.copy(), device=self.engine.model.device)


def _array(vector: Tensor) -> NDArray[Any]:
    out: NDArray[Any] = vector.detach().to("cpu").contiguous().numpy()
    return out
