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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.flower.memory import Memory, refuse_if
from equifed.flower.secure.ledger import LEAST_MEMBERS, Sum, find_exposed
from equifed.flower.secure.session import Epoch, Published, Words, from_hex, to_fixed, to_hex
from equifed.training.keys import PublicKey, read_key_file, read_private, sign

REMEMBERED = 256
"""Sums that a client remembers to have helped to open."""

LARGEST_SHARE = 0.9
"""Of the weights of a sum, that a member may have where no plan has a cap."""

DRAWN = 2 / 3
"""The same, where clients are drawn with replacement."""


@dataclass(frozen=True)
class Identity:
    """The key of this site, and those of the others by name; None: they are not known."""

    key: Any = None
    peers: Mapping[str, PublicKey] | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Identity:
        """Read the files that a node's settings name."""
        peers = read_key_file(Path(str(settings["peers"]))) if "peers" in settings else None
        path = settings.get("node-key")
        return cls(None if path is None else read_private(Path(str(path))), peers)


@dataclass(frozen=True)
class Signer:
    """Signs what this client publishes in a run, and checks what others published."""

    identity: Identity = field(default_factory=Identity)
    run: str = ""
    name: str = ""

    def sign(self, purpose: str, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys with this client's name, and its signature where it has a key."""
        told = {**keys, "client": self.name}
        if self.identity.key is None:
            return told
        return {**told, "signature": sign(self.identity.key, *self._encode(purpose, told))}

    def check(self, purpose: str, parties: Iterable[Mapping[str, Any]]) -> None:
        """Refuse keys that are not signed by whom this site knows; nothing, if it knows nobody."""
        peers, seen = self.identity.peers, set[str]()
        for told in parties if peers is not None else ():
            name = str(told.get("client", ""))[:200]
            refuse_if(name in seen, "two parties of a hidden sum have the same name")
            key = (peers or {}).get(name)
            refuse_if(key is None, f"this site has no key of {name!r}, a party of the hidden sum")
            refuse_if(
                key is None or not self.holds(purpose, told, key),
                f"the keys said to be those of {name!r} are not signed by the key that this site "
                "has for it",
            )
            seen.add(name)

    def holds(self, purpose: str, told: Mapping[str, Any], key: PublicKey) -> bool:
        """Tell whether what somebody said in this run is signed by a key."""
        plain = {k: v for k, v in told.items() if k != "signature"}
        return key.holds(*self._encode(purpose, plain), str(told.get("signature", "")))

    def _encode(self, purpose: str, keys: Mapping[str, Any]) -> tuple[str, bytes]:
        return "keys", _encode([self.run, purpose, dict(keys)])


class Masking:
    """Answers what a request's ``mask`` table ``args`` says, from the ``memory`` of this client.

    ``own`` is its position; ``signer`` signs its keys, and checks those of others; ``cap`` is the
    largest share of a sum that a member may have.
    """

    def __init__(
        self,
        memory: Memory,
        args: dict[str, Any],
        own: int,
        signer: Signer,
        cap: float | None = None,
    ) -> None:
        self.memory, self.args, self.own, self.signer = memory, args, own, signer
        self.cap = LARGEST_SHARE if cap is None else cap

    def mask(self, vector: NDArray[Any], kind: str, model: str, round: int, about: str) -> Words:
        """Return a vector of a kind, model and round, times its public weight, under masks.

        ``about`` names what else all members were told. It enters the masks as the rest does: where
        a server tells members different things, the sum is noise.
        """
        slot, parties = int(self.args["slot"]), self._agreed_parties()
        weights = self._weights(parties)
        words = to_fixed(np.asarray(vector, dtype=np.float64) * weights[self.own], len(parties))
        row = f"{name_row(weights)} of {kind} {model} {round} {about}"
        self._do_once(f"masked {slot}", _encode([sorted(parties), row]) + words.tobytes())
        entry = {"kind": kind, "model": model, "round": round, "weights": to_keys(weights)}
        self._write("sums", {**self._read("sums"), str(slot): entry})
        return self._epoch().mask(words, slot, parties, row)

    def keys(self) -> dict[str, Any]:
        """Step 1 of a secure sum: the public keys of a new epoch."""
        return self.signer.sign(self._name("epoch"), self._epoch().publish().to_dict())

    def shares(self) -> dict[str, Any]:
        """Step 2: encrypted shares for every other party, and digests of all shares."""
        parties = self.args["parties"]
        self._do_once("shares", _encode(parties))
        self.signer.check(self._name("epoch"), parties.values())
        boxes, digests = self._epoch().share(_read_parties(parties))
        self._write("parties", parties)
        return {"boxes": to_hex(boxes), "digests": to_hex(digests)}

    def boxes(self) -> dict[str, Any]:
        """Step 2, second half: keep the boxes of the others, and say whose are not as they said."""
        told, digests = self.args["boxes"], self.args["digests"]
        given = from_hex(told, dict, list), from_hex(digests, dict, list)
        self._do_once("boxes", _encode([told, digests]))
        bad = self._epoch().find_bad_boxes(self._agreed_parties(), *given)
        self._write("boxes", {j: listed for j, listed in told.items() if int(j) not in bad})
        return {"bad": bad}

    def unmask(self) -> dict[str, Any]:
        """Step 4: one share for every party whose box opened."""
        parties, slot = self._agreed_parties(), int(self.args["slot"])
        boxes = {j: b[slot] for j, b in from_hex(self._read("boxes"), dict, list).items()}
        shares, sums = self._epoch().unmask(slot, parties, boxes), self._read("sums")
        refuse_if(str(slot) not in sums, "no vector of this client is in this sum")
        opened = self.memory.read_record("opened").get("sums", [])
        new, *before = _read_sums([sums[str(slot)], *opened])
        shown = find_exposed(before, new)
        refuse_if(
            shown,
            f"this sum is not opened: {shown}. This client helped to open a sum at this model with "
            "others; continue when those missing are back",
        )
        if sums[str(slot)] not in opened:
            kept = [*opened[-REMEMBERED + 1 :], sums[str(slot)]]
            self.memory.write_record("opened", {"sums": kept})
        return {"shares": to_hex(shares)}

    def _weights(self, parties: Mapping[int, Any]) -> dict[int, float]:
        """Return everybody's weight in the sum, which all parties are told; refuse a bad one."""
        weights = {int(i): float(w) for i, w in self.args["weights"].items()}
        members = [i for i, w in weights.items() if w != 0]
        finite = all(map(math.isfinite, weights.values()))
        refuse_if(
            set(weights) != set(parties) or not finite,
            "the weights of a sum are not those of all its parties",
        )
        refuse_if(len(members) < LEAST_MEMBERS, f"a sum of {len(members)} members hides too little")
        largest = max(members, key=lambda i: abs(weights[i]))
        share = abs(weights[largest]) / sum(map(abs, weights.values()))
        most = max(self.cap, 1.5 / len(members)) if self.cap < DRAWN else self.cap
        if min(weights.values()) < 0:  # a change of weights has half of itself on either side
            most = max(most, 0.5)
        refuse_if(
            share > most * (1 + 1e-9),
            f"client {largest} has {share:.4g} of the weights of a sum, the cap is {most:.3g}",
        )
        return weights

    def _epoch(self) -> Epoch:
        """Return this client's part of the epoch; its secret is drawn when first asked for."""
        kept = self._read("secret")
        if not kept:
            kept = {"secret": secrets.token_bytes(32).hex()}
            self._write("secret", kept)
        secret, slots = bytes.fromhex(kept["secret"]), int(self.args["slots"])
        return Epoch(str(self.args["name"]), self.own, secret, slots)

    def _agreed_parties(self) -> dict[int, Published]:
        """Return the parties and keys of step 2; later requests cannot change them."""
        parties = self._read("parties")
        refuse_if(not parties, "this client takes no part in the epoch; it lost its memory")
        return _read_parties(parties)

    def _do_once(self, what: str, content: bytes) -> None:
        """Refuse to do a step twice with different content: the difference would give it away."""
        digest, done = hashlib.sha256(content).hexdigest(), self._read("done")
        other = done.get(what, digest) != digest
        refuse_if(other, "this step was already taken with different content")
        self._write("done", {**done, what: digest})

    def _name(self, kind: str) -> str:
        return f"{kind} {self.args['name']}"

    def _read(self, kind: str) -> dict[str, Any]:
        return self.memory.read_record(self._name(kind))

    def _write(self, kind: str, value: dict[str, Any]) -> None:
        self.memory.write_record(self._name(kind), value)


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


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _read_parties(parties: Mapping[str, Any]) -> dict[int, Published]:
    return {int(i): Published.from_dict(keys) for i, keys in parties.items()}
