"""Certificates and node keys for trying out, and what is wrong with the key of a node.

A SuperLink needs a server certificate whose subject alternative name holds its address. A SuperNode
proves who it is with an elliptic-curve key in OpenSSH format (PKCS8 is refused by Flower).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from equifed.flower.memory import write_private
from equifed.training.keys import KeyProblem, make_key, read_private

PEM, AUTHORITY = Encoding.PEM, "equifed trial authority"
VALID_DAYS = 30  # certificates made here are for trying out and do not last

HOSTNAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*")
NODE_NAME = re.compile(r"(?!(ca|server)\Z)[A-Za-z0-9][A-Za-z0-9._-]*")


def issue(
    folder: Path, addresses: Sequence[str], nodes: Sequence[str], days: float = VALID_DAYS
) -> datetime.datetime | None:
    """Write what a trial federation needs; return until when the server's certificate is valid.

    That is what :func:`make_certificates` writes, where there are addresses, and a key pair for
    every node. Files that are there are not overwritten: nothing is written then.
    """
    for address in addresses:
        if not HOSTNAME.fullmatch(address) and isinstance(_general_name(address), x509.DNSName):
            raise ValueError(
                f"{address!r} is neither a host name nor an IP address; give the address alone, as "
                "fl.example.org, without port or https://."
            )
    for name in nodes:
        if not NODE_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be the name of a node's key: letters, digits, '-', '_' and '.' "
                "are possible, 'ca' and 'server' are taken."
            )
    if len(set(nodes)) < len(nodes):
        raise ValueError("Two nodes have the same name.")
    wanted = ["ca.pem", "server.pem", "server.key"] if addresses else []
    wanted += [f"{name}.{end}" for name in nodes for end in ("key", "pub")]
    if there := [name for name in wanted if (folder / name).exists()]:
        raise FileExistsError(
            f"{folder} holds {', '.join(there)} already, which are not overwritten; choose another "
            "folder, or move them away."
        )
    until = make_certificates(folder, addresses, days) if addresses else None
    for name in nodes:
        make_node_key(folder, name)
    return until


def make_certificates(
    folder: Path, addresses: Sequence[str], days: float = VALID_DAYS
) -> datetime.datetime:
    """Write ``ca.pem``, ``server.pem`` and ``server.key`` for a SuperLink at these addresses.

    The server's certificate is valid for ``days``, with a negative number it has expired; until
    when is returned. The authority's key is not kept: nobody can issue another certificate that
    these nodes trust.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = _issue((), ca_key, ca_key, max(days, VALID_DAYS))
    server = _issue(addresses, key, ca_key, days)
    private = key.private_bytes(PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(folder / "server.key", private)
    for name, certificate in {"ca.pem": ca, "server.pem": server}.items():
        (folder / name).write_bytes(certificate.public_bytes(PEM))
    return server.not_valid_after_utc


def _issue(addresses: Sequence[str], key: Any, by: Any, days: float) -> x509.Certificate:
    """Return the certificate of a server at these addresses; without any, of the authority."""
    signs = not addresses
    names = [x509.NameAttribute(NameOID.COMMON_NAME, n) for n in (AUTHORITY, *addresses[:1])]
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    begin, number = min(now, end) - datetime.timedelta(minutes=5), x509.random_serial_number()
    about = x509.Name(names[:1]), x509.Name(names[-1:]), key.public_key(), number, begin, end
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only"
    unused = dict.fromkeys([*others.split(), "decipher_only"], False)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(signs, 0 if signs else None), True),
        (x509.KeyUsage(
            digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **unused
        ), True),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False),
    ]  # fmt: skip
    if signs:
        extensions.append((x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False))
    else:
        found = x509.SubjectAlternativeName([_general_name(address) for address in addresses])
        serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        extensions += [(found, False), (serves, False)]
    made = x509.CertificateBuilder(*about)
    for extension, critical in extensions:
        made = made.add_extension(extension, critical)
    return made.sign(by, SHA256())


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a SuperNode's key pair, ``name.key`` and ``name.pub``, in OpenSSH format."""
    secret, public = folder / f"{name}.key", folder / f"{name}.pub"
    secret.unlink(missing_ok=True)
    make_key(folder, name, ec.generate_private_key(ec.SECP384R1()))
    return secret, public


def find_key_problems(path: Path) -> Iterator[str]:
    """Say what is wrong with a SuperNode's private key: format, kind, or who may read it."""
    try:
        key = read_private(path)
    except KeyProblem as error:
        yield str(error)
        return
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        yield f"{path} is not an elliptic-curve key; make one with: ssh-keygen -t ecdsa -b 384"
    if os.name == "posix" and path.stat().st_mode & 0o077:
        yield f"{path} can be read by others; run: chmod 600 {path}"
