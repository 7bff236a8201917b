"""The client's part in hidden sums: which keys it holds, and what it refuses to do twice."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.flower.memory import Memory
from equifed.flower.secure.identity import Signer
from equifed.flower.secure.ledger import are_apart
from equifed.flower.secure.masks import Words, to_fixed
from equifed.flower.secure.session import Epoch, Published, SecureError

REMEMBERED = 256
"""Sums that a client remembers to have helped to open."""


class Masking:
    """Answers the mask-related part of one request.

    Parameters
    ----------
    memory : Memory
        Where secrets and what was already answered are kept, on this client only.
    args : dict
        The request's ``mask`` table.
    own : int
        The client's position.
    signer : Signer
        Signs this client's keys, and checks those of others.
    """

    def __init__(self, memory: Memory, args: dict[str, Any], own: int, signer: Signer) -> None:
        self.memory, self.args, self.own, self.signer = memory, args, own, signer

    def mask(self, vector: NDArray[Any], model: str, round: int) -> Words:
        """Return the vector times the client's public weight, in fixed point, under its masks.

        ``model`` and ``round`` are those that the vector comes from.
        """
        slot, parties = int(self.args["slot"]), self._agreed_parties()
        members = self._members(parties)
        scaled = np.asarray(vector, dtype=np.float64) * float(self.args["weight"])
        words = to_fixed(scaled, len(parties), int(self.args["bits"]))
        self._do_once(f"masked {slot}", _encode([sorted(parties), members]) + words.tobytes())
        sums = self.memory.read_record(self._name("sums"))
        entry = {"model": model, "round": round, "members": members}
        self.memory.write_record(self._name("sums"), {**sums, str(slot): entry})
        return self._epoch().mask(words, slot, _read(parties), str(members))

    def publish(self) -> dict[str, Any]:
        """Step 1 of a secure sum: the public keys of a new epoch."""
        return self.signer.sign(self._name("epoch"), self._epoch().publish().to_dict())

    def share(self) -> dict[str, Any]:
        """Step 2: encrypted shares for every other party, and digests of all shares."""
        parties = self._parties()
        self._do_once("shares", _encode(self.args["parties"]))
        self.signer.check(self._name("epoch"), parties)
        epoch, published = self._epoch(), _read(parties)
        shares = epoch.share(published)
        self.memory.write_record(
            self._name("parties"), {str(i): keys for i, keys in parties.items()}
        )
        digests = {
            str(j): [[own.hex(), mask.hex()] for own, mask in pairs]
            for j, pairs in epoch.commit(published).items()
        }
        boxes = {str(j): [box.hex() for box in listed] for j, listed in shares.items()}
        return {"boxes": boxes, "digests": digests}

    def check_boxes(self) -> dict[str, Any]:
        """Step 2, second half: keep the boxes of the others, and say whose are not as they said."""
        parties, told = _read(self._agreed_parties()), self.args["boxes"]
        boxes = {int(j): [bytes.fromhex(box) for box in listed] for j, listed in told.items()}
        digests = {
            int(j): [(bytes.fromhex(own), bytes.fromhex(mask)) for own, mask in listed]
            for j, listed in self.args["digests"].items()
        }
        self._do_once("boxes", _encode([told, self.args["digests"]]))
        bad = self._epoch().find_bad_boxes(parties, boxes, digests)
        good = {j: listed for j, listed in told.items() if int(j) not in bad}
        self.memory.write_record(self._name("boxes"), good)
        return {"bad": bad}

    def unmask(self) -> dict[str, Any]:
        """Step 4: one share for every party whose box opened."""
        parties, slot = _read(self._agreed_parties()), int(self.args["slot"])
        arrived = sorted(int(i) for i in self.args["arrived"])
        self._do_once(f"unmask {slot}", _encode(arrived))
        kept = self.memory.read_record(self._name("boxes"))
        boxes = {int(j): bytes.fromhex(listed[slot]) for j, listed in kept.items()}
        shares = self._epoch().unmask(slot, parties, arrived, boxes)
        self._agree_to_open(slot)
        return {"shares": {str(j): share.hex() for j, share in shares.items()}}

    def _agree_to_open(self, slot: int) -> None:
        """Refuse a sum that differs from another one of its round or model by one or two."""
        sums = self.memory.read_record(self._name("sums"))
        if str(slot) not in sums:
            raise SecureError("no vector of this client is in this sum")
        new = sums[str(slot)]
        opened = self.memory.read_record("opened").get("sums", [])
        for old in opened:
            near = old["model"] == new["model"] or old["round"] == new["round"]
            if near and not are_apart(old["members"], new["members"]):
                raise SecureError(
                    "this client helped to open a sum at this model with other members; the "
                    "difference would show those who were missing. Go on when they are back"
                )
        if new not in opened:
            self.memory.write_record("opened", {"sums": [*opened[-REMEMBERED + 1 :], new]})

    def _members(self, parties: dict[int, Any]) -> list[int]:
        """Return who has a weight in the sum, as all parties are told."""
        members = sorted(int(i) for i in self.args["members"])
        weighted = float(self.args["weight"]) != 0
        if len(members) < 2 or not set(members) <= set(parties):
            raise SecureError("a sum of one client's vector hides nothing")
        if weighted != (self.own in members):
            raise SecureError("this client's weight is not what the others are told")
        return members

    def _epoch(self) -> Epoch:
        name = str(self.args["name"])
        return Epoch(name, self.own, self._secret(f"epoch {name}"), int(self.args["slots"]))

    def _parties(self) -> dict[int, Any]:
        parties = {int(i): keys for i, keys in self.args["parties"].items()}
        if self.own not in parties or len(parties) < 2:
            raise SecureError("a hidden sum needs this client and at least one other")
        return parties

    def _agreed_parties(self) -> dict[int, Any]:
        """Return the parties and keys of step 2; later requests cannot change them."""
        parties = self.memory.read_record(self._name("parties"))
        if not parties:
            raise SecureError("this client takes no part in the epoch; it lost its memory")
        return {int(i): keys for i, keys in parties.items()}

    def _name(self, kind: str) -> str:
        return f"{kind} {self.args['name']}"

    def _secret(self, purpose: str) -> bytes:
        """Return this client's secret for a purpose; drawn when first asked for."""
        kept = self.memory.read_record(f"secret {purpose}")
        if "secret" not in kept:
            kept = {"secret": secrets.token_bytes(32).hex()}
            self.memory.write_record(f"secret {purpose}", kept)
        return bytes.fromhex(kept["secret"])

    def _do_once(self, what: str, content: bytes) -> None:
        """Refuse to do a step twice with different content: the difference would give it away."""
        digest, name = hashlib.sha256(content).hexdigest(), self._name("done")
        done = self.memory.read_record(name)
        if done.setdefault(what, digest) != digest:
            raise SecureError("this step was already taken with other content")
        self.memory.write_record(name, done)


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _read(parties: dict[int, Any]) -> dict[int, Published]:
    return {i: Published.from_dict(keys) for i, keys in parties.items()}
