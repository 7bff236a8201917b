"""Who signed a key: sites that know each other's keys need not trust the server to relay them.

A node's setting ``node-key`` is the file of the private key that it is registered with (OpenSSH),
and ``peers`` a file with the public keys of all sites, one on a line as ``ssh-keygen`` writes them
with the site's name at its end::

    ecdsa-sha2-nistp384 AAAAE2VjZHNh... north
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from equifed.flower.secure.session import SecureError


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
        content = _encode(self.run, purpose, told)
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
                peers[name].verify(signature, _encode(self.run, purpose, plain), ECDSA(SHA256()))
            except (InvalidSignature, ValueError):
                raise SecureError(
                    f"the keys said to be those of {name!r} are not signed by the key that this "
                    "site has for it"
                ) from None


def _encode(run: str, purpose: str, keys: Mapping[str, Any]) -> bytes:
    return json.dumps(["equifed keys", run, purpose, dict(keys)], sort_keys=True).encode()
