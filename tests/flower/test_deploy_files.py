"""``deploy/`` and the keys of a trial: every command is one that exists, with options it has."""

from __future__ import annotations

import configparser
import datetime
import re
import shlex
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from cryptography import x509
from typer.testing import CliRunner

from equifed.cli.main import app as cli
from equifed.flower.trial.apps import find_script
from equifed.flower.trial.doctor import find_key_problems

FOLDER = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
UNITS = sorted((FOLDER / "systemd").glob("*.service"))


def split_script(script: str) -> list[list[str]]:
    """Return the commands of a shell script that are programs of ours or of Flower."""
    found = []
    for line in re.split(r"\n|&&|\|\||;", script.replace("$$", "$")):
        words = shlex.split(line)
        words = words[1:] if words[:1] == ["exec"] else words
        if words and words[0] in ("equifed", "flwr", "flower-superlink"):
            found.append(words)
    return found


def commands_of(service: dict[str, Any]) -> list[list[str]]:
    command = [str(word) for word in service["command"]]
    if command[0] != "sh":
        return [command]
    assert command[1] == "-ec", "a script must end at its first error"
    syntax = ["sh", "-n", "-c", command[2].replace("$$", "$")]
    assert subprocess.run(syntax, check=False).returncode == 0
    return split_script(command[2])


def parse(words: list[str]) -> dict[str, Any]:
    """Parse a command of ours as it would be, and return what it was given."""
    command, rest = typer.main.get_command(cli), words[1:]
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, words
        command = command.commands[rest[0]]
        rest = rest[1:]
    return command.make_context(words[0], rest).params


def list_units() -> list[list[str]]:
    lines = []
    for path in UNITS:
        text = path.read_text().replace("\\\n", " ")
        lines += re.findall("^ExecStart=(.*)$", text, flags=re.MULTILINE)
    return [[Path(line.split()[0]).name, *shlex.split(line)[1:]] for line in lines]


COMMANDS = [words for s in COMPOSE["services"].values() for words in commands_of(s)] + list_units()


@pytest.mark.long
def test_commands_of_ours_are_parsed_as_they_are_meant() -> None:
    ours = [parse(words) for words in COMMANDS if words[0] == "equifed"]
    assert len(ours) == 3 + 3 + 2 + 1  # prepare, three nodes, run and report, the unit
    (made,) = [given for given in ours if "address" in given]
    assert list(made["address"]) == ["superlink", "localhost"]
    assert list(made["node"]) == ["north", "south", "west"]
    nodes = [given for given in ours if "node_config" in given]
    assert all(given["root_certificates"] and given["node_key"] for given in nodes)
    assert nodes[-1]["node_config"] == 'site="/etc/equifed/site.toml"'


@pytest.mark.long
def test_commands_of_flower_have_these_options() -> None:
    helped = subprocess.run(
        [find_script("flower-superlink"), "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"--[a-z-]+", helped.stdout))
    links = [words for words in COMMANDS if words[0] == "flower-superlink"]
    assert len(links) == 2
    for words in links:
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known, sorted(given - known)
        assert "--enable-supernode-auth" in given and "--insecure" not in given
    (register,) = [words for words in COMMANDS if words[0] == "flwr"]
    helped = subprocess.run(
        [find_script("flwr"), *register[1:3], "--help"], capture_output=True, text=True, check=True
    )
    assert "PUBLIC_KEY" in helped.stdout.upper() and "SUPERLINK" in helped.stdout.upper()


def test_compose_starts_in_order_and_mounts_what_commands_name() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        for other in service.get("depends_on", ()):
            assert other in services, f"{name} waits for {other}"
        mounted = {v.split(":")[1] for v in service["volumes"]}
        volumes = {v.split(":")[0] for v in service["volumes"] if not v.startswith(".")}
        assert volumes <= set(COMPOSE["volumes"])
        text = " ".join(map(str, service["command"]))
        for place in set(re.findall(r"(?<![\w.])/(?:keys|app|runs|state|memory)\b", text)):
            assert place in mounted, f"{name} uses {place}"
    assert "/runs" in {v.split(":")[1] for v in services["superlink"]["volumes"]}
    sites = services["run"]["depends_on"]
    assert len({services[site]["environment"]["PARTITION"] for site in sites}) == 3
    assert {services[site]["environment"]["SITE"] for site in sites} == set(sites)
    assert (FOLDER.parent / "deploy" / "Dockerfile").exists()
    assert (FOLDER / "connection.toml").exists()


def test_the_image_copies_files_that_are_there() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    kept = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall("^COPY (.*)$", text, flags=re.MULTILINE):
        for name in line.split()[:-1]:
            assert (FOLDER.parent / name).exists()
            assert f"!{name}" in kept, f"{name} is kept from the builder"
    assert re.search("^USER equifed$", text, flags=re.MULTILINE), "not as root"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_again_and_are_closed(path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text().replace("\\\n", " "))
    service = unit["Service"]
    assert service["Restart"] == "always" and service["User"] == "equifed"
    assert service["ProtectSystem"] == "strict" and service["UMask"] == "0077"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_finds_nothing_wrong(path: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    wrong = [line for line in done.stderr.splitlines() if path.name in line]
    assert [line for line in wrong if "is not executable" not in line] == []


# -- equifed flower certificates -------------------------------------------------------------------


def make(folder: Path, *words: str) -> Any:
    return CliRunner().invoke(cli, ["flower", "certificates", str(folder), *words])


def test_certificates_are_for_their_addresses_and_closed(tmp_path: Path) -> None:
    done = make(tmp_path, "--address", "fl.example.org", "--address", "10.0.0.7", "--node", "north")
    assert done.exit_code == 0, done.output
    ca, server = tmp_path / "ca.pem", tmp_path / "server.pem"
    made, authority = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (server, ca))
    made.verify_directly_issued_by(authority)
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["fl.example.org", "10.0.0.7"]
    assert list(find_key_problems(tmp_path / "north.key")) == []
    for name in ("server.key", "north.key"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server, tmp_path / "server.key")
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=30)
    assert f"expire on {end:%Y-%m-%d}" in done.output
    assert not list(tmp_path.glob("ca*key*")), "the authority's key is not kept"


def test_the_authority_lasts_as_long_as_what_it_signed(tmp_path: Path) -> None:
    assert make(tmp_path, "--address", "localhost", "--days", "300").exit_code == 0
    far = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=299)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    (told,) = context.get_ca_certs()
    assert ssl.cert_time_to_seconds(str(told["notAfter"])) > far.timestamp()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert make(tmp_path, "--address", "localhost", "--node", "north").exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for words in (["--address", "localhost"], ["--node", "south", "--node", "north"]):
        done = make(tmp_path, *words)
        assert done.exit_code == 2 and "not overwritten" in done.output
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert make(tmp_path, "--node", "south").exit_code == 0, "another node may come later"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give the --address"),
        (["--address", "fl.example.org:8000"], "without port"),
        (["--address", "https://fl.example.org"], "without port"),
        (["--address", "a b"], "neither a host name"),
        (["--address", "x" * 300], "neither a host name"),
        (["--node", "../north"], "cannot be the name"),
        (["--node", "server"], "cannot be the name"),
        (["--node", "a", "--node", "a"], "same name"),
        (["--address", "localhost", "--days", "0"], "--days"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_written(
    words: list[str], message: str, tmp_path: Path
) -> None:
    done = make(tmp_path / "keys", *words)
    assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "keys").exists()
