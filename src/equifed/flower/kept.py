"""What a run of a federation keeps in its folder, so that it goes on as what it was."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from equifed.flower.app_config import DEADLINES, AppConfig, FederationSettings
from equifed.flower.handshake import StartError
from equifed.flower.mailbox import Deadlines
from equifed.flower.members import Members
from equifed.training.history import History
from equifed.training.tables import PREPARATION

FLOWER = "flower.json"
"""What a run folder of a federation holds besides: identity, settings, and who took part."""


def describe_run(
    settings: FederationSettings, config: AppConfig, members: Members
) -> dict[str, Any]:
    """Return everything that a run needs to go on as what it was."""
    first = members.hellos[0]
    return {
        "run": members.run,
        "privacy": settings.privacy,
        "rounds": settings.rounds,
        "start": settings.start,
        "deadlines": {k: getattr(settings.deadlines, k) for k in ("on_missing", *DEADLINES)},
        "config": config.to_dict(),
        "model": first.model,
        "schema": json.loads(json.dumps(first.schema.to_dict())),
        "clients": [
            {"name": h.name, "sizes": h.sizes, "versions": h.versions} for h in members.hellos
        ],
    }


def read_model(folder: Path) -> dict[str, Any]:
    """Return the model of a complete run."""
    found = History.load(folder).parameters
    if found is None:
        raise StartError(f"The run in {folder} is not complete: it has no model yet.")
    return found


@dataclass(frozen=True)
class Kept:
    """The folder's own account of a run, see :func:`describe_run`."""

    told: dict[str, Any]
    preparation: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> Kept:
        """Read a run folder, or raise :class:`StartError`."""
        try:
            told = json.loads((folder / FLOWER).read_text(encoding="utf-8"))
            path = folder / PREPARATION
            kept = cls(told, json.loads(path.read_text("utf-8")) if path.exists() else None)
            _ = kept.run, kept.names, kept.deadlines, told["privacy"], int(told["rounds"])
            _ = told["config"]["algorithm"], told["model"], told["schema"]["input_shape"]
        except (OSError, ValueError, KeyError, TypeError):
            raise StartError(f"{folder} holds no run of a federation to go on with.") from None
        return kept

    @property
    def run(self) -> str:
        """Identity of the run."""
        return str(self.told["run"])

    @property
    def names(self) -> list[str]:
        """Clients in order."""
        return [str(client["name"]) for client in self.told["clients"]]

    @property
    def deadlines(self) -> Deadlines:
        """How long it waits, and for whom."""
        return Deadlines(**self.told["deadlines"])

    def apply(
        self, config: AppConfig, settings: FederationSettings
    ) -> tuple[AppConfig, FederationSettings]:
        """Return what the run started with, but for what the operator changed by name.

        What was agreed with the clients (who takes part, what the server sees of them, what is
        trained) cannot be changed; the app may say something else by now, and is told so.
        """
        same = {"privacy": self.told["privacy"], "clients": len(self.names)}
        wrong = [k for k in same if k in settings.changes and getattr(settings, k) != same[k]]
        if wrong:
            raise StartError(
                f"The run to resume has {wrong[0]} = {same[wrong[0]]!r} to its end, as its clients "
                f"agreed to; {getattr(settings, wrong[0])!r} would be another run."
            )
        kept = AppConfig.from_dict(self.told["config"])
        changed = [name for name in ("on_missing", *DEADLINES) if name in settings.changes]
        waits = {name: getattr(settings.deadlines, name) for name in changed}
        rounds, start = settings.rounds or int(self.told["rounds"]), self.told.get("start") or ""
        waiting = replace(self.deadlines, **waits)
        now = replace(settings, **same, rounds=rounds, start=start, deadlines=waiting)
        given, runs = ({**c.to_dict(), **_list(s)} for c, s in ((config, settings), (kept, now)))
        for k in sorted({*given, *runs} - {"rounds"}):
            if given.get(k) != runs.get(k):
                line = f"{k} is {runs.get(k)}, not {given.get(k)} as the app says now"
                print(f"equifed: the run goes on as it started: {line}", flush=True)
        return kept, now

    def check(self, members: Members) -> None:
        """Refuse clients whose data or model are not those that the run started with."""
        self.check_data(members)
        for hello, before in zip(members.hellos, self.told["clients"], strict=True):
            if hello.sizes != before["sizes"]:
                print(
                    f"equifed: WARNING: {hello.name} had {before['sizes']} samples when the run "
                    f"started, and has {hello.sizes} now",
                    flush=True,
                )

    def check_data(self, members: Members) -> None:
        """Refuse clients, whoever they are, that have other data or another model than the run."""
        first = members.hellos[0]
        schema = json.loads(json.dumps(first.schema.to_dict()))
        for key, value in self.told["schema"].items():
            if schema.get(key) != value:
                raise StartError(
                    f"The earlier run had data whose {key} is {value}; the clients have "
                    f"{schema.get(key)} now. Bring back the same columns, or start a new run."
                )
        if first.model != self.told["model"]:
            raise StartError("The earlier run had another model than the clients build now.")


def _list(settings: FederationSettings) -> dict[str, Any]:
    """Return what a run keeps of the settings; the number of its rounds may change."""
    table = asdict(settings)
    return {"privacy": table["privacy"], "clients": table["clients"], **table["deadlines"]}
