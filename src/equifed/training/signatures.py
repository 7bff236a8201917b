"""Signed run folders and evidence packs: who vouches for them, where a checksum shows only damage.

A signature is over the names and SHA-256 sums of all files, in ``signature.json``. Whoever holds
the key signs; whoever has the public half, from the signer and not from the folder, checks.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from equifed.training import files
from equifed.training.files import CHECK, Damaged, RunFolderError, StoredRun, digest, reading
from equifed.training.folder import CHECKPOINTS, EXPORTED, is_complete, open_run_folder
from equifed.training.keys import PublicKey, find_signer, read_key_file, read_private, sign

SIGNATURE, SUMS, SUMS_SIGNATURE = "signature.json", "SHA256SUMS", "SHA256SUMS.signature"
RUN_PURPOSE, PACK_PURPOSE = "run folder", "evidence"


def sign_folder(folder: str | Path, key: str | Path) -> Path:
    """Sign all files of a complete run, or of an export, and return where the signature is."""
    run = open_run_folder(folder, data_only=True)
    if not (is_complete(run.path) or EXPORTED in run):
        raise RunFolderError(f"{run.path} has not ended; sign it then.")
    private = read_private(Path(key))
    sums = {name: digest(run.read(name)) for name in _list_files(run.path)}
    told = {"sums": sums, "signature": sign(private, RUN_PURPOSE, _frame(sums))}
    files.write_file(run / SIGNATURE, (json.dumps(told, indent=1) + "\n").encode())
    return run / SIGNATURE


def check_signature(run: StoredRun, keys: Mapping[str, PublicKey]) -> str:
    """Return who signed an opened folder; from then on only what was signed can be read from it."""
    if SIGNATURE not in run:
        raise RunFolderError(f"{run.path} is not signed: its signer runs equifed sign {run.path}")
    told = run.json(SIGNATURE)
    with reading(run / SIGNATURE):
        sums = {str(name): str(found) for name, found in told["sums"].items()}
        name = find_signer(keys, RUN_PURPOSE, _frame(sums), str(told["signature"]))
    if name is None:
        raise RunFolderError(f"{run.path} is signed by none of {_names(keys)}; do not use it.")
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


def sign_sums(sums: bytes, key: str | Path) -> bytes:
    """Return the signature of an evidence pack's list of checksums."""
    return (sign(read_private(Path(key)), PACK_PURPOSE, sums) + "\n").encode()


def check_pack(path: str | Path, keys: str | Path) -> str:
    """Return who signed an evidence pack; refuse one that is damaged, or that none of them did."""
    known, where = read_key_file(Path(keys)), Path(path)
    with reading(where), zipfile.ZipFile(where) as pack:
        names = pack.namelist()
        large = [one for one in pack.infolist() if one.file_size > files.LARGEST[".npz"]]
        if len(set(names)) < len(names) or large or SUMS not in names:
            raise ValueError("it is no evidence pack")
        if SUMS_SIGNATURE not in names:
            raise RunFolderError(f"{where} is not signed; ask for: equifed evidence RUN --key KEY")
        listed = pack.read(SUMS)
        signature = pack.read(SUMS_SIGNATURE).decode().strip()
        lines = (line.split("  ", 1) for line in listed.decode().splitlines())
        sums = {name: found for found, name in lines}
        name = find_signer(known, PACK_PURPOSE, listed, signature)
        if name is None:
            raise RunFolderError(f"{where} is signed by none of {_names(known)}; do not use it.")
        for file in sorted({*names, *sums} - {SUMS, SUMS_SIGNATURE}):
            if file not in sums or file not in names or digest(pack.read(file)) != sums[file]:
                raise Damaged(f"{file} in {where} is not what {name} signed.")
    return name


def _list_files(folder: Path) -> list[str]:
    """Return the files that are signed: all but checkpoints, the lock and the signature."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    left = (files.LOCK, SIGNATURE)
    return sorted(p.as_posix() for p in found if p.parts[0] != CHECKPOINTS and str(p) not in left)


def _frame(sums: Mapping[str, str]) -> bytes:
    return json.dumps(sums, sort_keys=True, ensure_ascii=True).encode()


def _names(keys: Mapping[str, PublicKey]) -> str:
    return ", ".join(keys)
