"""Keys and signatures: one format for operators, sites and whatever else is signed.

A public key is a line as ``ssh-keygen`` writes it, with the name of its owner at the end; a private
one a file in OpenSSH format without a password. Operators have Ed25519 keys. Nodes have elliptic
ones, which are the only ones that Flower takes. Needs ``cryptography`` (the extra ``flower``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class KeyProblem(ValueError):
    """A key that cannot be used, or a signature that does not hold; says whose and why."""


@dataclass(frozen=True)
class PublicKey:
    """A public key and the name of its owner.

    >>> PublicKey.read("ssh-dss AAAA anna")
    Traceback (most recent call last):
    equifed.training.keys.KeyProblem: 'ssh-dss AAAA anna' is no public key with a name, as ...
    """

    line: str
    name: str

    @classmethod
    def read(cls, text: str) -> PublicKey:
        """Read ``ssh-ed25519 AAAA... name``, or raise :class:`KeyProblem`."""
        words = text.split(maxsplit=2)
        key = cls(" ".join(words[:2]), words[2].strip() if len(words) == 3 else "")
        try:
            if not key.name:
                raise ValueError
            key.load()
        except Exception:
            raise KeyProblem(
                f"{text[:60]!r} is no public key with a name, as 'ssh-ed25519 AAAA... anna'; make "
                "one with: equifed flower keys"
            ) from None
        return key

    def load(self) -> Any:
        """Return the key as ``cryptography`` has it."""
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        key = load_ssh_public_key(self.line.encode())
        if not isinstance(key, Ed25519PublicKey | EllipticCurvePublicKey):
            raise ValueError("another kind of key")
        return key

    @property
    def fingerprint(self) -> str:
        """Sixteen characters to compare by telephone."""
        return hashlib.sha256(self.line.encode()).hexdigest()[:16]

    def holds(self, purpose: str, content: bytes, signature: str) -> bool:
        """Tell whether the key's owner signed this content for this purpose."""
        from cryptography.exceptions import InvalidSignature

        key, signed = self.load(), _frame(purpose, content)
        try:
            key.verify(bytes.fromhex(signature), signed, *_scheme(key))
        except (InvalidSignature, ValueError):
            return False
        return True


def sign(private: Any, purpose: str, content: bytes) -> str:
    """Return the signature of some content for one purpose, in hexadecimal digits."""
    return str(private.sign(_frame(purpose, content), *_scheme(private)).hex())


def public_of(private: Any, name: str) -> PublicKey:
    """Return the public half of a key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    told = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return PublicKey(told.decode(), name)


def make_key(folder: Path, name: str) -> PublicKey:
    """Write ``name.key``, readable by its owner alone, and ``name.pub``; overwrite nothing."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = Ed25519PrivateKey.generate()
    public = public_of(private, name)
    folder.mkdir(parents=True, exist_ok=True)
    content = private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    with os.fdopen(
        os.open(folder / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
    ) as file:
        file.write(content)
    (folder / f"{name}.pub").write_text(f"{public.line} {name}\n", encoding="utf-8")
    return public


def read_private(path: Path) -> Any:
    """Read a private key in OpenSSH format, or raise :class:`KeyProblem`."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        return load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise KeyProblem(
            f"{path} holds no private key that can be used ({type(error).__name__}); it must be in "
            "OpenSSH format and have no password. Make one with: equifed flower keys"
        ) from error


def read_keys(lines: Iterable[str], where: str) -> dict[str, PublicKey]:
    """Return public keys by name; a second key of a name, or name of a key, is refused."""
    found: dict[str, PublicKey] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip() or text.startswith("#"):
            continue
        try:
            key = PublicKey.read(text)
        except KeyProblem as error:
            raise KeyProblem(f"{where}, line {number}: {error}") from None
        double = next((k for k in found.values() if key.name == k.name or key.line == k.line), None)
        if double is not None:
            told = (
                f"a second key of {key.name!r}"
                if double.name == key.name
                else (f"the key of {double.name!r} under a second name, {key.name!r}")
            )
            raise KeyProblem(f"{where}, line {number}: {told}; every name has one key.")
        found[key.name] = key
    return found


def read_key_file(path: Path) -> dict[str, PublicKey]:
    """Return the public keys of a file, one on a line, by name."""
    try:
        return read_keys(path.read_text(encoding="utf-8").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise KeyProblem(f"{path} cannot be read ({type(error).__name__}).") from error


def find_signer(
    keys: Mapping[str, PublicKey], purpose: str, content: bytes, signature: str
) -> str | None:
    """Return the name of the key that signed, or None."""
    holds = (name for name, key in keys.items() if key.holds(purpose, content, signature))
    return next(holds, None)


def _frame(purpose: str, content: bytes) -> bytes:
    return f"equifed {purpose}\n".encode() + content


def _scheme(key: Any) -> tuple[Any, ...]:
    """Return what a key's kind needs besides: a digest where the curve has none of its own."""
    from cryptography.hazmat.primitives.asymmetric.ec import (
        ECDSA,
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.hashes import SHA256

    elliptic = isinstance(key, EllipticCurvePrivateKey | EllipticCurvePublicKey)
    return (ECDSA(SHA256()),) if elliptic else ()
