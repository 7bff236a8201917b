"""Keys and signatures: one format for operators, sites, run folders and evidence packs.

A public key is a line as ``ssh-keygen`` writes it, with the name of its owner at the end; a private
one a file in OpenSSH format without a password. Operators have Ed25519 keys. Nodes have elliptic
ones, which are the only ones that Flower takes. Needs ``cryptography`` (the extra ``flower``).
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256

from equifed.training import files
from equifed.training.files import CHECK, Damaged, RunFolderError, StoredRun, digest, reading
from equifed.training.folder import CHECKPOINTS, EXPORTED, is_complete, open_run_folder
from equifed.training.tables import SIGNATURE, SUMS, SUMS_SIGNATURE

OPENSSH = serialization.PublicFormat.OpenSSH, serialization.PrivateFormat.OpenSSH
RUN_PURPOSE, PACK_PURPOSE = "run folder", "evidence"


class KeyProblem(ValueError):
    """A key that cannot be used, or a signature that does not hold; says whose and why."""


@dataclass(frozen=True)
class PublicKey:
    """A public key and the name of its owner.

    >>> PublicKey.read("ssh-dss AAAA anna")
    Traceback (most recent call last):
    equifed.training.keys.KeyProblem: 'ssh-dss AAAA anna' is not a public key with a name, as ...
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
                f"{text[:60]!r} is not a public key with a name, as 'ssh-ed25519 AAAA... anna'; "
                "make one with: equifed flower keys"
            ) from None
        return key

    def load(self) -> Any:
        """Return the key as ``cryptography`` has it."""
        key = serialization.load_ssh_public_key(self.line.encode())
        if not isinstance(key, ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey):
            raise ValueError("another kind of key")
        return key

    @property
    def fingerprint(self) -> str:
        """Sixteen characters to compare by telephone."""
        return hashlib.sha256(self.line.encode()).hexdigest()[:16]

    def holds(self, purpose: str, content: bytes, signature: str) -> bool:
        """Tell whether the key's owner signed this content for this purpose."""
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
    told = private.public_key().public_bytes(serialization.Encoding.OpenSSH, OPENSSH[0])
    return PublicKey(told.decode(), name)


def make_key(folder: Path, name: str, private: Any = None) -> PublicKey:
    """Write ``name.key``, readable by its owner alone, and ``name.pub``; overwrite nothing.

    It is a new Ed25519 key, unless one is given.
    """
    private = ed25519.Ed25519PrivateKey.generate() if private is None else private
    public, file = public_of(private, name), folder / f"{name}.key"
    folder.mkdir(parents=True, exist_ok=True)
    file.touch(0o600, exist_ok=False)
    no_password = serialization.NoEncryption()
    file.write_bytes(private.private_bytes(serialization.Encoding.PEM, OPENSSH[1], no_password))
    (folder / f"{name}.pub").write_text(f"{public.line} {name}\n", encoding="utf-8")
    return public


def read_private(path: Path) -> Any:
    """Read a private key in OpenSSH format, or raise :class:`KeyProblem`."""
    try:
        return serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise KeyProblem(
            f"{path} holds no private key that can be used ({type(error).__name__}); it must be in "
            "OpenSSH format and have no password. Make one with: equifed flower keys (an "
            "operator's) or equifed flower certificates (a node's)"
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
            told = f"the key of {double.name!r} under a second name, {key.name!r}"
            told = f"a second key of {key.name!r}" if double.name == key.name else told
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
    elliptic = isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey)
    return (ec.ECDSA(SHA256()),) if elliptic else ()


# -- run folders: their names and SHA-256 sums are signed, in ``signature.json`` -------------------


def sign_folder(folder: str | Path, key: str | Path) -> Path:
    """Sign all files of a complete run, or of an export, and return where the signature is."""
    run = open_run_folder(folder, data_only=True)
    if not (is_complete(run.path) or EXPORTED in run):
        raise RunFolderError(f"{run.path} has not ended; sign it then.")
    private = read_private(Path(key))
    # All files but checkpoints, the lock and the signature
    found = (path.relative_to(run.path) for path in run.path.rglob("*") if path.is_file())
    names = sorted(path.as_posix() for path in found if path.parts[0] != CHECKPOINTS)
    signed = [name for name in names if name not in (files.LOCK, SIGNATURE)]
    sums = {name: digest(run.read(name)) for name in signed}
    told = {"sums": sums, "signature": sign(private, RUN_PURPOSE, _frame_sums(sums))}
    files.write_file(run / SIGNATURE, (json.dumps(told, indent=1) + "\n").encode())
    return run / SIGNATURE


def check_signature(run: StoredRun, keys: Mapping[str, PublicKey]) -> str:
    """Return who signed an opened folder; from then on only what was signed can be read from it."""
    if SIGNATURE not in run:
        raise RunFolderError(f"{run.path} is not signed: its signer runs equifed sign {run.path}")
    told = run.json(SIGNATURE)
    with reading(run / SIGNATURE):
        sums = {str(name): str(found) for name, found in told["sums"].items()}
        name = find_signer(keys, RUN_PURPOSE, _frame_sums(sums), str(told["signature"]))
    if name is None:
        raise RunFolderError(f"{run.path} is signed by none of {', '.join(keys)}; do not use it.")
    for file, expected in sums.items():
        if file not in run or digest(run.read(file)) != expected:
            raise Damaged(f"{run / file} is not what {name} signed.")
    run.sums.update(sums)
    run.only = frozenset((*sums, SIGNATURE))
    return name


@contextmanager
def signed_by(keys: str | Path) -> Iterator[None]:
    """Refuse, within a block, every folder that none of the keys of a file has signed.

    The file has one public key on a line, as ``equifed flower keys`` writes them.

    >>> with signed_by("anna.pub"):  # doctest: +SKIP
    ...     predictor = equifed.load_predictor("run")
    """
    known = read_key_file(Path(keys))
    if not known:
        raise RunFolderError(f"{keys} holds no public key.")
    token = CHECK.set(lambda run: check_signature(run, known))
    try:
        yield
    finally:
        CHECK.reset(token)


def check_pack(path: str | Path, keys: str | Path) -> str:
    """Return who signed an evidence pack; refuse one that is damaged, or that none of them did."""
    known, where = read_key_file(Path(keys)), Path(path)
    with reading(where), zipfile.ZipFile(where) as pack:
        names = pack.namelist()
        large = [one for one in pack.infolist() if one.file_size > files.LARGEST[".npz"]]
        if len(set(names)) < len(names) or large or SUMS not in names:
            raise ValueError("it is not an evidence pack")
        if SUMS_SIGNATURE not in names:
            raise RunFolderError(f"{where} is not signed; ask for: equifed evidence RUN --key KEY")
        listed = pack.read(SUMS)
        signature = pack.read(SUMS_SIGNATURE).decode().strip()
        lines = (line.split("  ", 1) for line in listed.decode().splitlines())
        sums = {name: found for found, name in lines}
        name = find_signer(known, PACK_PURPOSE, listed, signature)
        if name is None:
            raise RunFolderError(f"{where} is signed by none of {', '.join(known)}; do not use it.")
        for file in sorted({*names, *sums} - {SUMS, SUMS_SIGNATURE}):
            if file not in sums or file not in names or digest(pack.read(file)) != sums[file]:
                raise Damaged(f"{file} in {where} is not what {name} signed.")
    return name


def _frame_sums(sums: Mapping[str, str]) -> bytes:
    return json.dumps(sums, sort_keys=True, ensure_ascii=True).encode()
