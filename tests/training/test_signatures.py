"""Signed folders and packs: whose key vouches for them, and what is refused."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runs.test_hostile_folders import describe_run, equifed, renew_checksums

import equifed as ef
from equifed.runs.evidence import pack_evidence
from equifed.training.files import Damaged, RunFolderError
from equifed.training.keys import (
    SIGNATURE,
    KeyProblem,
    check_pack,
    make_key,
    sign_folder,
    signed_by,
)
from equifed.training.tables import CLIENTS, MODEL, SUMMARY

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that anna signed, her key and bert's, and a pack that she signed."""
    folder = tmp_path_factory.mktemp("made")
    ef.run(describe_run(folder), folder / "run", progress=False)
    for name in ("anna", "bert"):
        make_key(folder, name)
    shutil.copytree(folder / "run", folder / "unsigned")
    sign_folder(folder / "run", folder / "anna.key")
    pack_evidence(folder / "run", folder / "pack.zip", key=folder / "anna.key")
    return folder


@pytest.fixture
def gift(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


READERS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "predict": lambda run, made: (run, made / "rows.csv"),
    "evaluate": lambda run, made: (run, made / "rows.csv"),
    "personalise": lambda run, made: (run,),
    "export": lambda run, made: (run, "--out", run.parent / "out"),
    "evidence": lambda run, made: (run, "--overwrite"),
    "report": lambda run, made: (run, "--page", run.parent / "page.html"),
}


@pytest.mark.parametrize("command", READERS)
def test_readers_take_folders_that_one_of_the_keys_signed_and_no_others(
    command: str, made: Path, gift: Path
) -> None:
    given = READERS[command](gift, made)
    assert equifed(command, *given, "--signed-by", made / "bert.pub").exit_code == 2
    signed = equifed(command, *given, "--signed-by", made / "anna.pub")
    assert signed.exit_code == 0, signed.output
    unsigned = READERS[command](made / "unsigned", made)
    told = equifed(command, *unsigned, "--signed-by", made / "anna.pub")
    assert told.exit_code == 2 and "is not signed: its signer runs equifed sign" in told.output


def test_forged_weights_pass_a_checksum_and_no_signature(made: Path, gift: Path) -> None:
    content = (gift / MODEL).read_bytes()
    (gift / MODEL).write_bytes(content[:-8] + bytes(8))
    renew_checksums(gift)
    ef.load_predictor(gift)  # as it was written, for all that checksums tell
    with signed_by(made / "anna.pub"), pytest.raises(Damaged, match="is not what anna signed"):
        ef.load_predictor(gift)


def test_what_was_added_or_left_out_since_is_refused(made: Path, gift: Path) -> None:
    assert equifed("personalise", gift).exit_code == 0
    keys = ("--signed-by", made / "anna.pub")
    assert equifed("predict", gift, made / "rows.csv", *keys).exit_code == 0
    told = equifed("predict", gift, made / "rows.csv", "--personalised", *keys)
    assert told.exit_code == 2 and "not among the files that were signed" in told.output
    (gift / CLIENTS).unlink()
    assert equifed("predict", gift, made / "rows.csv", *keys).exit_code == 2


def test_a_signature_of_another_folder_or_purpose_does_not_hold(made: Path, gift: Path) -> None:
    other = gift.parent / "other"
    shutil.copytree(made / "unsigned", other)
    (other / SUMMARY).write_text((other / SUMMARY).read_text() + " ")
    shutil.copy(gift / "signature.json", other)
    with signed_by(made / "anna.pub"), pytest.raises(RunFolderError, match="anna"):
        ef.load_predictor(other)
    for broken in ("{}", '{"sums": {}, "signature": "00"}', '{"sums": 3, "signature": []}'):
        (gift / "signature.json").write_text(broken)
        with signed_by(made / "anna.pub"), pytest.raises(RunFolderError):
            ef.load_predictor(gift)


def test_what_is_signed_are_names_and_sums_in_whatever_order_they_stand(
    made: Path, gift: Path
) -> None:
    told = json.loads((gift / SIGNATURE).read_text())
    names = sorted(told["sums"], reverse=True)
    turned = {"signature": told["signature"], "sums": {name: told["sums"][name] for name in names}}
    (gift / SIGNATURE).write_text(json.dumps(turned))
    with signed_by(made / "anna.pub"):
        ef.load_predictor(gift)
    turned["sums"][names[0]] = turned["sums"][names[1]]
    (gift / SIGNATURE).write_text(json.dumps(turned))
    with signed_by(made / "anna.pub"), pytest.raises(RunFolderError, match="none of anna"):
        ef.load_predictor(gift)


def test_verify_says_who_signed(made: Path) -> None:
    for path in (made / "run", made / "pack.zip"):
        told = equifed("verify", path, "--signed-by", made / "anna.pub")
        assert told.exit_code == 0 and told.output.strip().endswith("signed by anna")
        assert equifed("verify", path, "--signed-by", made / "bert.pub").exit_code == 2


def rewrite(pack: Path, out: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    with zipfile.ZipFile(pack) as old:
        files = {name: old.read(name) for name in old.namelist()}
    change(files)
    with zipfile.ZipFile(out, "w") as new:
        for name, content in files.items():
            new.writestr(name, content)
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.update({"clients.csv": b"client\nall well\n"}), "clients.csv.*signed"),
        (lambda files: files.update({"more.txt": b"x"}), "more.txt.*not what anna signed"),
        (lambda files: files.pop("report.html"), "report.html.*not what anna signed"),
        (lambda files: files.pop("SHA256SUMS.signature"), "is not signed"),
        (lambda files: files.update({"SHA256SUMS": b""}), "signed by none of anna"),
    ],
)
def test_a_changed_pack_is_refused(
    made: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], object], message: str
) -> None:
    changed = rewrite(made / "pack.zip", tmp_path / "pack.zip", change)
    with pytest.raises(RunFolderError, match=message):
        check_pack(changed, made / "anna.pub")


def test_a_run_that_has_not_ended_and_a_missing_key_are_refused(made: Path, gift: Path) -> None:
    with pytest.raises(KeyProblem, match="no private key that can be used"):
        sign_folder(gift, made / "anna.pub")
    (gift / SUMMARY).unlink()
    with pytest.raises(RunFolderError, match="has not ended; sign it then"):
        sign_folder(gift, made / "anna.key")
    with pytest.raises(RunFolderError, match=r"rows\.csv"):
        check_pack(made / "rows.csv", made / "anna.pub")
