"""The client's part in hidden sums: which keys it holds, and what it refuses to do twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.flower.memory import Memory
from equifed.flower.secure.masks import Words, pair_mask, public_key, to_fixed
from equifed.flower.secure.session import Epoch, Published, SecureError


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
    random : callable
        Gives random bytes.
    """

    def __init__(
        self, memory: Memory, args: dict[str, Any], own: int, random: Callable[[int], bytes]
    ) -> None:
        self.memory, self.args, self.own, self.random = memory, args, own, random

    def run_key(self) -> bytes:
        """Return the public key of this client in this run."""
        return public_key(self._secret("run"))

    def masked(self, vector: NDArray[Any]) -> Words:
        """Return the vector times the client's public weight, in fixed point, under its masks."""
        pairs = self.args["scheme"] == "pairs"
        members = self._members() if pairs else self._agreed_members()
        scaled = np.asarray(vector, dtype=np.float64) * float(self.args["weight"])
        words = to_fixed(scaled, len(members), int(self.args["bits"]))
        told = _told(sorted(members)) + words.tobytes()
        self._once(f"masked {self.args['slot']}", told)
        if pairs:
            return words + self._pairs(members, len(words))
        return self._epoch().masked(words, int(self.args["slot"]), _published(members))

    def keys(self) -> dict[str, Any]:
        """Step 1 of a secure sum: the public keys of a new epoch."""
        published = self._epoch().published()
        return {"sharing": published.sharing.hex(), "masking": [k.hex() for k in published.masking]}

    def shares(self) -> dict[str, Any]:
        """Step 2: encrypted shares for every other member."""
        members = self._members()
        self._once("shares", _told(self.args["members"]))
        shares = self._epoch().shares(_published(members))
        self.memory.note(self._called("members"), {str(i): keys for i, keys in members.items()})
        return {"boxes": {str(j): [box.hex() for box in boxes] for j, boxes in shares.items()}}

    def unmask(self) -> dict[str, Any]:
        """Step 4: one share for every member."""
        members, slot = _published(self._agreed_members()), int(self.args["slot"])
        arrived = sorted(int(i) for i in self.args["arrived"])
        self._once(f"unmask {slot}", _told(arrived))
        boxes = {int(j): bytes.fromhex(box) for j, box in self.args["boxes"].items()}
        shares = self._epoch().unmask(slot, members, arrived, boxes)
        return {"shares": {str(j): share.hex() for j, share in shares.items()}}

    def _pairs(self, members: dict[int, Any], size: int) -> Words:
        publics = {j: bytes.fromhex(key) for j, key in members.items()}
        if publics.get(self.own) != self.run_key():
            raise SecureError("the server holds another key of this client; it lost its memory")
        purpose = f"{self.args['name']} {self.args['slot']} of {sorted(publics)}"
        return pair_mask(self._secret("run"), self.own, publics, purpose, size)

    def _epoch(self) -> Epoch:
        name = str(self.args["name"])
        return Epoch(name, self.own, self._secret(f"epoch {name}"), int(self.args["slots"]))

    def _members(self) -> dict[int, Any]:
        members = {int(i): keys for i, keys in self.args["members"].items()}
        if self.own not in members or len(members) < 2:
            raise SecureError("a hidden sum needs this client and at least one other")
        return members

    def _agreed_members(self) -> dict[int, Any]:
        """Return the members and keys of step 2; later requests cannot change them."""
        members = self.memory.record(self._called("members"))
        if not members:
            raise SecureError("this client takes no part in the epoch; it lost its memory")
        return {int(i): keys for i, keys in members.items()}

    def _called(self, kind: str) -> str:
        return f"{kind} {self.args['name']}"

    def _secret(self, purpose: str) -> bytes:
        """Return this client's secret for a purpose; drawn when first asked for."""
        kept = self.memory.record(f"secret {purpose}")
        if "secret" not in kept:
            kept = {"secret": self.random(32).hex()}
            self.memory.note(f"secret {purpose}", kept)
        return bytes.fromhex(kept["secret"])

    def _once(self, what: str, content: bytes) -> None:
        """Refuse to do a step twice with different content: the difference would give it away."""
        digest, name = hashlib.sha256(content).hexdigest(), self._called("done")
        done = self.memory.record(name)
        if done.setdefault(what, digest) != digest:
            raise SecureError("this step was already taken with other content")
        self.memory.note(name, done)


def _published(members: dict[int, Any]) -> dict[int, Published]:
    return {
        i: Published(
            bytes.fromhex(keys["sharing"]), tuple(bytes.fromhex(k) for k in keys["masking"])
        )
        for i, keys in members.items()
    }


def _told(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
