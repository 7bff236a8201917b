"""The client's part in hidden sums: which keys it holds, and what it refuses to do twice."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.flower.memory import Memory
from equifed.flower.secure.masks import Words, make_pair_mask, make_public_key, to_fixed
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
    """

    def __init__(self, memory: Memory, args: dict[str, Any], own: int) -> None:
        self.memory, self.args, self.own = memory, args, own

    def publish_run_key(self) -> bytes:
        """Return the public key of this client in this run."""
        return make_public_key(self._secret("run"))

    def mask(self, vector: NDArray[Any]) -> Words:
        """Return the vector times the client's public weight, in fixed point, under its masks."""
        pairs = self.args["scheme"] == "pairs"
        parties = self._parties() if pairs else self._agreed_parties()
        scaled = np.asarray(vector, dtype=np.float64) * float(self.args["weight"])
        words = to_fixed(scaled, len(parties), int(self.args["bits"]))
        self._do_once(f"masked {self.args['slot']}", _encode(sorted(parties)) + words.tobytes())
        if pairs:
            return words + self._pairs(parties, len(words))
        return self._epoch().mask(words, int(self.args["slot"]), _read(parties))

    def publish(self) -> dict[str, Any]:
        """Step 1 of a secure sum: the public keys of a new epoch."""
        return self._epoch().publish().to_dict()

    def share(self) -> dict[str, Any]:
        """Step 2: encrypted shares for every other party."""
        parties = self._parties()
        self._do_once("shares", _encode(self.args["parties"]))
        shares = self._epoch().share(_read(parties))
        self.memory.write_record(
            self._name("parties"), {str(i): keys for i, keys in parties.items()}
        )
        return {"boxes": {str(j): [box.hex() for box in boxes] for j, boxes in shares.items()}}

    def unmask(self) -> dict[str, Any]:
        """Step 4: one share for every party."""
        parties, slot = _read(self._agreed_parties()), int(self.args["slot"])
        arrived = sorted(int(i) for i in self.args["arrived"])
        self._do_once(f"unmask {slot}", _encode(arrived))
        boxes = {int(j): bytes.fromhex(box) for j, box in self.args["boxes"].items()}
        shares = self._epoch().unmask(slot, parties, arrived, boxes)
        return {"shares": {str(j): share.hex() for j, share in shares.items()}}

    def _pairs(self, parties: dict[int, Any], size: int) -> Words:
        publics = {j: bytes.fromhex(key) for j, key in parties.items()}
        if publics.get(self.own) != self.publish_run_key():
            raise SecureError("the server holds another key of this client; it lost its memory")
        purpose = f"{self.args['name']} {self.args['slot']} of {sorted(publics)}"
        return make_pair_mask(self._secret("run"), self.own, publics, purpose, size)

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
