"""A site that gives a table: what it answers until the preparation of all sites is known.

It says hello with its columns, answers the questions of the fit with vectors that are only added
(in clear, or under masks where the run or the site asks for it), and takes the fitted preparation,
which it keeps for the run. From then on it is a client like any other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from equifed.data.columns import read_numbers
from equifed.data.preparation import NumberColumn, Preparation
from equifed.data.split import DataError
from equifed.flower.hidden_fit import find_names, to_vector
from equifed.flower.memory import Memory
from equifed.flower.policy import Policy
from equifed.flower.secure.masking import Identity, Masking, Signer
from equifed.flower.site_data import SiteData
from equifed.flower.statistics import describe_table
from equifed.flower.task import PACKAGES, Schema, Task, shorten_names
from equifed.flower.wire import Reply, Request
from equifed.flower.worker import Client, Stale
from equifed.training.tables import package_versions

MASKING = ("keys", "shares", "boxes", "unmask")
"""Steps of hidden sums, which need no model."""

FAR = 3.0
"""Deviations of the other sites by which a site's mean must lie apart to be told."""

log = logging.getLogger("equifed")


@dataclass
class TableClient:
    """One client with a table, before and after its preparation."""

    data: SiteData
    task: Task
    root: Path
    partition: int | None = None
    policy: Policy = field(default_factory=Policy)
    results: Path | None = None
    identity: Identity = field(default_factory=Identity)
    _open: dict[str, Client] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The client's name."""
        return self.data.table.name

    def answer(self, request: Request) -> Reply | None:
        """Answer what belongs to the preparation; None where a prepared client is asked."""
        memory = Memory(self.root, request.run, self.name)
        fitted = bool(memory.read_record("preparation"))
        if request.op in MASKING and not fitted:  # they need no model
            return self._answer_masking(request, memory)
        if request.op == "prepare":
            return self._answer_question(request, memory)
        if request.op == "statistics":
            self.policy.check_plan({}, self.data.table.sizes["train"])
            shown = self.policy.show_by_name
            return _reply(request, {"statistics": describe_table(self.data.table, shown)})
        if request.op == "hello" and "preparation" in request.args:
            told = request.args["preparation"]
            Preparation.from_json(told)  # refuses what is none
            memory.write_record("preparation", told)
        elif request.op == "hello" and not fitted:
            return self._introduce(request, memory)
        return None

    def open(self, request: Request) -> Client:
        """Return the client with its rows prepared as the run has it."""
        told = Memory(self.root, request.run, self.name).read_record("preparation")
        if not told:
            raise Stale("this client does not hold the preparation of the run")
        text = json.dumps(told, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._open:
            fitted, table = Preparation.from_json(told), self.data.table
            federation = table.prepare(fitted, self.data.settings.dtype)
            for sentence in (*table.told, *table.find_duplicates(fitted)):
                log.warning("equifed: %s", sentence)
            about = self.task, self.root, self.partition, self.policy, self.identity
            self._open = {key: Client(federation, *about, results=self.results)}
        client = self._open[key]
        others = request.args.get("totals")
        if others is not None:
            client.notes = tuple(find_far(self.data, others)) if self.policy.show_by_name else ()
        return client

    def _introduce(self, request: Request, memory: Memory) -> Reply:
        """Say hello with columns that are not prepared yet."""
        table, settings = self.data.table, self.data.settings
        plan = request.args.get("plan", {})
        self.policy.check_plan(plan, table.sizes["train"])
        names, plain = table.features, describe_settings(settings)
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        shape = (len(names),), settings.dtype, (), "float64"
        schema = Schema(*shape, None, digest, shorten_names(names))
        return _reply(
            request,
            {
                "name": self.name,
                "partition": self.partition,
                "versions": package_versions(PACKAGES),
                "sizes": table.sizes,
                "schema": schema.to_dict(),
                "model": "",
                "table": {
                    "columns": table.describe_kinds(),
                    "target": table.describe_target(),
                    "rest": table.rest,
                    "units": dict(self.data.units),
                    "settings": plain,
                },
                "notes": self.policy.describe(),
            },
        )

    def _masking(self, request: Request, memory: Memory) -> Masking:
        signer = Signer(self.identity, request.run, self.name)
        return Masking(memory, request.args["mask"], request.client, signer)

    def _answer_masking(self, request: Request, memory: Memory) -> Reply:
        masking = self._masking(request, memory)
        steps = {"keys": masking.publish, "shares": masking.share, "unmask": masking.unmask}
        steps["boxes"] = masking.check_boxes
        return _reply(request, steps[request.op]())

    def _answer_question(self, request: Request, memory: Memory) -> Reply:
        """Answer one question of the fit."""
        asked = request.args["asked"]
        rule = describe_settings(self.data.settings)["prepare"]
        if {**asked["prepare"]} != rule:
            raise DataError("the question is of another preparation than this site agreed to")
        named = asked["stage"] in ("names", "counts")
        answer = self.data.table.answer({**asked, "stage": "sums"} if named else asked)
        if asked["stage"] == "names":
            return _reply(request, {"names": find_names(asked, answer)})
        vector = to_vector(asked, answer)
        if "mask" in request.args:
            masked = self._masking(request, memory).mask(vector, _name_question(asked), 0)
            return _reply(request, {}, {"masked": masked})
        self.policy.allow_clear()
        return _reply(request, {}, {"vector": vector})


def describe_settings(settings: Any) -> dict[str, Any]:
    """Return what was agreed on as JSON has it."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return plain


def find_far(data: SiteData, totals: Mapping[str, Any]) -> list[str]:
    """Name the columns whose mean here is far from that of the other sites.

    ``totals`` are count, mean and deviation of every column over all sites.
    """
    found = []
    for name, (count, mean, deviation) in totals.items():
        if name not in data.table.features:
            continue
        numbers = read_numbers(name, data.table.take([name], "train")[name])
        own = numbers[~(numbers != numbers)]
        n, left = len(own), int(count) - len(own)
        if n < 2 or left < 2:
            continue
        here, spread = float(own.mean()), float(own.var())
        there = mean + (mean - here) * n / left  # (N M - n m) / (N - n)
        square = (count * deviation**2 - n * (spread + (here - mean) ** 2)) / left
        scale = math.sqrt(max(square - (there - mean) ** 2, 0.0))
        scale = max(scale, 1e-12 * abs(there))
        if scale > 0 and abs(here - there) > FAR * scale:
            apart = abs(here - there) / scale
            found.append(
                f"its column {name!r} has a mean that lies {apart:.1f} deviations from that of the "
                "other sites; are its units the same?"
            )
    return found


def list_totals(fitted: Preparation, counts: Mapping[str, int]) -> dict[str, list[float]]:
    """Return count, mean and deviation of the columns that were scaled by these."""
    if fitted.scale != "standard":
        return {}
    return {
        c.name: [counts[c.name], c.centre, c.scale]
        for c in fitted.columns
        if isinstance(c, NumberColumn) and c.name in counts
    }


def _name_question(asked: Mapping[str, Any]) -> str:
    """Name a question: sums of its answers over nearly the same sites must not both be opened."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def _reply(request: Request, numbers: dict[str, Any], arrays: Any = None) -> Reply:
    return Reply(request.op, request.run, request.tag, numbers, arrays or {})
