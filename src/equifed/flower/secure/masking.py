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
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from numpy.typing import NDArray

from equifed.flower.memory import Memory
from equifed.flower.secure.ledger import are_apart
from equifed.flower.secure.masks import Words, to_fixed
from equifed.flower.secure.session import Epoch, Published, SecureError, from_hex, to_hex

REMEMBERED = 256
"""Sums that a client remembers to have helped to open."""


@dataclass(frozen=True)
class Identity:
    """The key of this site, and those of the others by name; None: they are not known."""

    key: EllipticCurvePrivateKey | None = None
    peers: Mapping[str, EllipticCurvePublicKey] | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Identity:
        """Read the files that a node's settings name."""
        peers = read_peers(Path(str(settings["peers"]))) if "peers" in settings else None
        if "node-key" not in settings:
            return cls(None, peers)
        key = load_ssh_private_key(Path(str(settings["node-key"])).read_bytes(), None)
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ValueError(f"{settings['node-key']} holds no elliptic-curve key.")
        return cls(key, peers)


def read_peers(path: Path) -> dict[str, EllipticCurvePublicKey]:
    """Return the public keys of a file by name."""
    found: dict[str, EllipticCurvePublicKey] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split(maxsplit=2)
        if not words or line.startswith("#"):
            continue
        key = load_ssh_public_key(" ".join(words[:2]).encode()) if len(words) == 3 else None
        if not isinstance(key, EllipticCurvePublicKey) or words[2] in found:
            raise ValueError(
                f"{path}, line {number}: expected an elliptic-curve public key and the name of a "
                "site that has no other line."
            )
        found[words[2]] = key
    return found


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
        content = self._encode(purpose, told)
        return {**told, "signature": self.identity.key.sign(content, ECDSA(SHA256())).hex()}

    def check(self, purpose: str, parties: Mapping[int, Mapping[str, Any]]) -> None:
        """Refuse keys that are not signed by whom this site knows; nothing, if it knows nobody."""
        peers = self.identity.peers
        if peers is None:
            return
        names = [str(told.get("client", ""))[:200] for told in parties.values()]
        if len(set(names)) < len(names):
            raise SecureError("two parties of a hidden sum have the same name")
        for name, told in zip(names, parties.values(), strict=True):
            if name not in peers:
                raise SecureError(f"this site has no key of {name!r}, a party of the hidden sum")
            plain = {k: v for k, v in told.items() if k != "signature"}
            try:
                signature = bytes.fromhex(str(told.get("signature", "")))
                peers[name].verify(signature, self._encode(purpose, plain), ECDSA(SHA256()))
            except (InvalidSignature, ValueError):
                raise SecureError(
                    f"the keys said to be those of {name!r} are not signed by the key that this "
                    "site has for it"
                ) from None

    def _encode(self, purpose: str, keys: Mapping[str, Any]) -> bytes:
        return _encode(["equifed keys", self.run, purpose, dict(keys)])


class Masking:
    """Answers what a request's ``mask`` table ``args`` says, from the ``memory`` of this client.

    ``own`` is its position; ``signer`` signs its keys, and checks those of others.
    """

    def __init__(self, memory: Memory, args: dict[str, Any], own: int, signer: Signer) -> None:
        self.memory, self.args, self.own, self.signer = memory, args, own, signer

    def take_step(self, op: str) -> dict[str, Any]:
        """Answer a request of a secure sum besides that for the vector."""
        steps = {"keys": self.publish, "shares": self.share}
        return (steps | {"boxes": self.check_boxes, "unmask": self.unmask})[op]()

    def mask(self, vector: NDArray[Any], model: str, round: int) -> Words:
        """Return a vector of a model and round, times its public weight, under masks."""
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
        parties = {int(i): keys for i, keys in self.args["parties"].items()}
        self._do_once("shares", _encode(self.args["parties"]))
        self.signer.check(self._name("epoch"), parties)
        boxes, digests = self._epoch().share(_read(parties))
        self.memory.write_record(self._name("parties"), self.args["parties"])
        return {"boxes": to_hex(boxes), "digests": to_hex(digests)}

    def check_boxes(self) -> dict[str, Any]:
        """Step 2, second half: keep the boxes of the others, and say whose are not as they said."""
        told, digests = self.args["boxes"], self.args["digests"]
        boxes = from_hex(told, dict, list), from_hex(digests, dict, list, list)
        self._do_once("boxes", _encode([told, digests]))
        bad = self._epoch().find_bad_boxes(_read(self._agreed_parties()), *boxes)
        good = {j: listed for j, listed in told.items() if int(j) not in bad}
        self.memory.write_record(self._name("boxes"), good)
        return {"bad": bad}

    def unmask(self) -> dict[str, Any]:
        """Step 4: one share for every party whose box opened."""
        parties, slot = _read(self._agreed_parties()), int(self.args["slot"])
        arrived = sorted(int(i) for i in self.args["arrived"])
        self._do_once(f"unmask {slot}", _encode(arrived))
        kept = from_hex(self.memory.read_record(self._name("boxes")), dict, list)
        boxes = {j: listed[slot] for j, listed in kept.items()}
        shares = self._epoch().unmask(slot, parties, arrived, boxes)
        self._agree_to_open(slot)
        return {"shares": to_hex(shares)}

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
        """Return this client's part of the epoch; its secret is drawn when first asked for."""
        name, place = str(self.args["name"]), self._name("secret")
        kept = self.memory.read_record(place)
        if "secret" not in kept:
            kept = {"secret": secrets.token_bytes(32).hex()}
            self.memory.write_record(place, kept)
        return Epoch(name, self.own, bytes.fromhex(kept["secret"]), int(self.args["slots"]))

    def _agreed_parties(self) -> dict[int, Any]:
        """Return the parties and keys of step 2; later requests cannot change them."""
        parties = self.memory.read_record(self._name("parties"))
        if not parties:
            raise SecureError("this client takes no part in the epoch; it lost its memory")
        return {int(i): keys for i, keys in parties.items()}

    def _name(self, kind: str) -> str:
        return f"{kind} {self.args['name']}"

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
