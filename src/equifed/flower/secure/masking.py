"""The client's part in hidden sums: which keys it holds, whose it trusts, what it does only once.

Sites that know each other's keys need not trust the server to relay them. A node's setting
``node-key`` is the file of the private key that it is registered with (OpenSSH), and ``peers`` a
file with the public keys of all sites, one on a line as ``ssh-keygen`` writes them with the site's
name at its end::

    ecdsa-sha2-nistp384 AAAAE2VjZHNh... north
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.flower.memory import Memory, refuse_if
from equifed.flower.secure.ledger import LEAST_MEMBERS, Sum, find_exposed
from equifed.flower.secure.session import Epoch, Published, Words, from_hex, to_fixed, to_hex
from equifed.flower.wire import Request
from equifed.training.keys import PublicKey, sign

REMEMBERED = 256  # sums that a client remembers to have helped to open
LARGEST_SHARE = 0.9  # of the weights of a sum, that a member may have where no plan has a cap
DRAWN = 2 / 3  # the same, where clients are drawn with replacement


def sign_told(told: Mapping[str, Any], key: Any, run: str, purpose: str) -> dict[str, Any]:
    """Return what a client says, with its signature where it has a key."""
    signed = {} if key is None else {"signature": sign(key, "keys", _encode([run, purpose, told]))}
    return {**told, **signed}


def is_signed(told: Mapping[str, Any], key: PublicKey, run: str, purpose: str) -> bool:
    """Tell whether what somebody said in a run is signed by a key."""
    plain = {k: v for k, v in told.items() if k != "signature"}
    return key.holds("keys", _encode([run, purpose, plain]), str(told.get("signature", "")))


class Masking:
    """Answers what a request's ``mask`` table says, from the ``memory`` of this client.

    It is called ``name``, signs with its ``key``, and trusts the keys of its ``peers`` alone, if it
    knows any; ``cap`` is the largest share of a sum that a member may have. What is written down is
    on the disk before an answer leaves.
    """

    def __init__(
        self, memory: Memory, request: Request, name: str, key: Any,
        peers: Mapping[str, PublicKey] | None, cap: float,
    ) -> None:  # fmt: skip
        self.memory, self.args, self.run = memory, request.args["mask"], request.run
        self.own, self.name, self.key = request.client, name, key
        self.peers, self.cap = peers, cap
        self.place = f"epoch {self.args['name']}"
        new = {"secret": secrets.token_bytes(32).hex(), "parties": {}, "boxes": {}, "sums": {}}
        self.kept: dict[str, Any] = memory.read_record(self.place) or {**new, "done": {}}
        secret, slots = bytes.fromhex(self.kept["secret"]), int(self.args["slots"])
        self.epoch = Epoch(str(self.args["name"]), self.own, secret, slots)

    def keys(self) -> dict[str, Any]:
        """Step 1 of a secure sum: the public keys of a new epoch."""
        self._write_once("keys", b"")
        told = {**self.epoch.publish().to_dict(), "client": self.name}
        return sign_told(told, self.key, self.run, self.place)

    def shares(self) -> dict[str, Any]:
        """Step 2: encrypted shares for every other party, and digests of all shares."""
        parties, seen = self.args["parties"], list[str]()
        for told in parties.values() if self.peers is not None else ():
            name = str(told.get("client", ""))[:200]
            key = (self.peers or {}).get(name)
            signed = key is not None and is_signed(told, key, self.run, self.place)
            wrong = f"the keys said to be those of {name!r} are not signed by the key"
            refuse_if({
                "two parties of a hidden sum have the same name": name in seen,
                f"this site has no key of {name!r}, a party of the hidden sum": key is None,
                f"{wrong} that this site has for it": not signed,
            })  # fmt: skip
            seen.append(name)
        boxes, digests = self.epoch.share(_read_parties(parties))
        self._write_once("shares", _encode(parties), parties=parties)
        return {"boxes": to_hex(boxes), "digests": to_hex(digests)}

    def boxes(self) -> dict[str, Any]:
        """Step 2, second half: keep the boxes of the others, and say whose are not as they said."""
        told, digests = self.args["boxes"], self.args["digests"]
        given = from_hex(told, dict, list), from_hex(digests, dict, list)
        bad = self.epoch.find_bad_boxes(self._agreed_parties(), *given)
        good = {j: listed for j, listed in told.items() if int(j) not in bad}
        self._write_once("boxes", _encode([told, digests]), boxes=good)
        return {"bad": bad}

    def mask(self, vector: NDArray[Any], kind: str, model: str, round: int, about: str) -> Words:
        """Return a vector of a kind, model and round, times its public weight, under masks.

        ``about`` names what else all members were told. It enters the masks as the rest does: where
        a server tells members different things, the sum is noise.
        """
        slot, parties = int(self.args["slot"]), self._agreed_parties()
        weights = self._weights(parties)
        words = to_fixed(np.asarray(vector, dtype=np.float64) * weights[self.own], len(parties))
        row = f"{name_row(weights)} of {kind} {model} {round} {about}"
        entry = {"kind": kind, "model": model, "round": round, "weights": to_keys(weights)}
        content = _encode([sorted(parties), row]) + words.tobytes()
        sums = {**self.kept["sums"], str(slot): entry}
        self._write_once(f"masked {slot}", content, sums=sums)
        return self.epoch.mask(words, slot, parties, row)

    def unmask(self) -> dict[str, Any]:
        """Step 4: one share for every party whose box opened."""
        parties, slot, sums = self._agreed_parties(), int(self.args["slot"]), self.kept["sums"]
        held = from_hex(self.kept["boxes"], dict, list)
        boxes = {j: listed[slot] for j, listed in held.items()}
        refuse_if({"no vector of this client is in this sum": str(slot) not in sums})
        new, opened = sums[str(slot)], self.memory.read_record("opened").get("sums", [])
        wanted, *before = _read_sums([new, *opened])
        shown = find_exposed(before, wanted)
        helped = "This client helped to open a sum at this model with others"
        cure = "continue when those missing are back"
        refuse_if({f"this sum is not opened: {shown}. {helped}; {cure}": shown})
        if new not in opened:
            self.memory.write_record("opened", {"sums": [*opened[-REMEMBERED + 1 :], new]})
        return {"shares": to_hex(self.epoch.unmask(slot, parties, boxes))}

    def _weights(self, parties: Mapping[int, Any]) -> dict[int, float]:
        """Return everybody's weight in the sum, which all parties are told; refuse a bad one."""
        weights = {int(i): float(w) for i, w in self.args["weights"].items()}
        members = [i for i, w in weights.items() if w != 0]
        finite = all(map(math.isfinite, weights.values()))
        refuse_if({
            "the weights of a sum are not those of all its parties": set(weights) != set(parties)
            or not finite,
            f"a sum of {len(members)} members hides too little": len(members) < LEAST_MEMBERS,
        })  # fmt: skip
        largest = max(members, key=lambda i: abs(weights[i]))
        share = abs(weights[largest]) / sum(map(abs, weights.values()))
        most = max(self.cap, 1.5 / len(members)) if self.cap < DRAWN else self.cap
        if min(weights.values()) < 0:  # a change of weights has half of itself on either side
            most = max(most, 0.5)
        told = f"client {largest} has {share:.4g} of the weights of a sum, the cap is {most:.3g}"
        refuse_if({told: share > most * (1 + 1e-9)})
        return weights

    def _agreed_parties(self) -> dict[int, Published]:
        """Return the parties and keys of step 2; later requests cannot change them."""
        lost = "this client takes no part in the epoch; it lost its memory"
        refuse_if({lost: not self.kept["parties"]})
        return _read_parties(self.kept["parties"])

    def _write_once(self, what: str, content: bytes, **more: Any) -> None:
        """Write a step down; refuse it with different content, as the difference would show it."""
        digest = hashlib.sha256(content).hexdigest()
        other = self.kept["done"].setdefault(what, digest) != digest
        refuse_if({"this step was already taken with different content": other})
        self.kept |= more
        self.memory.write_record(self.place, self.kept)


def name_row(weights: Mapping[int, float]) -> str:
    """Name a sum by all its weights: masks vanish only if all are told the same.

    >>> name_row({1: 0.5, 0: 2.0})
    '0:0x1.0000000000000p+1 1:0x1.0000000000000p-1'
    """
    return " ".join(f"{i}:{float(w).hex()}" for i, w in sorted(weights.items()))


def to_keys(weights: Mapping[int, float]) -> dict[str, float]:
    """Return weights as JSON has them."""
    return {str(i): float(w) for i, w in sorted(weights.items())}


def _read_sums(entries: Sequence[Mapping[str, Any]]) -> list[Sum]:
    size, sums = 1 + max(int(i) for entry in entries for i in entry["weights"]), list[Sum]()
    for entry in entries:
        row = np.array([entry["weights"].get(str(i), 0.0) for i in range(size)])
        sums.append(Sum(entry["kind"], entry["model"], entry["round"], row))
    return sums


def _read_parties(parties: Mapping[str, Any]) -> dict[int, Published]:
    return {int(i): Published.from_dict(keys) for i, keys in parties.items()}


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
