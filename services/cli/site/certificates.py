"""An installation's own certificate authority: made once, it issues a certificate for each host."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.commands import EXIT_FAILED, EXIT_USAGE, CliError, Group
from services.cli.output import console
from services.kit import files

Folder = Annotated[Path, typer.Option("--folder", help="Where the authority is, and what it issues.")]
DEFAULT_FOLDER = Path("ca")
OWN_NAMES = ("localhost", "127.0.0.1", "::1")
"""In every certificate: processes of one host reach each other by them."""


def register(app: typer.Typer) -> None:
    words = "Make certificates for TLS between hosts, where the site has no authority of its own."
    Group(app, "ca", words).add(init, issue)


def init(
    folder: Folder = DEFAULT_FOLDER,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="How long it is valid.")] = 3_650,
) -> None:
    """Make an authority: ca.key, which stays here, and ca.crt, which every host gets."""
    from cryptography import x509

    if (folder / "ca.key").exists():
        kept = f"{folder / 'ca.key'} exists and is kept: every certificate would have to be issued again"
        lost = "; its ca.crt is missing: put it back or, if no host has it, remove the key"
        raise CliError(kept + ("" if (folder / "ca.crt").exists() else lost))
    key = _new_key()
    name = _name("Wattshift CA")
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    made = _begin(name, name, key.public_key(), days)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = made.add_extension(usage, critical=True)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    _write(folder, "ca", key, made)
    console.print(f"{folder / 'ca.crt'} is what every host gets; keep {folder / 'ca.key'} here")


def issue(
    name: Annotated[str, typer.Argument(help="Of the host: its files are NAME.crt and NAME.key.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address by which it is reached; may be repeated.")
    ] = None,
    folder: Folder = DEFAULT_FOLDER,
    days: Annotated[int, typer.Option(min=1, max=3_650, help="How long it is valid.")] = 397,
) -> None:
    """Issue a host's certificate; it replaces an earlier one of the same name."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if name == "ca" or Path(name).name != name or name.startswith("."):
        raise CliError(f"{name!r} cannot be the name of a host here", EXIT_USAGE)
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        own_key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except OSError as error:
        hint = "make an authority by `wattshift ca init`"
        raise CliError(f"{error.filename}: {error.strerror}; {hint}", EXIT_FAILED) from error
    except ValueError as error:
        raise CliError(f"{folder}: ca.crt or ca.key is corrupt ({error})", EXIT_FAILED) from error
    assert isinstance(own_key, EllipticCurvePrivateKey)
    key = _new_key()
    names = x509.SubjectAlternativeName([_alternative(each) for each in dict.fromkeys((*(host or [name]), *OWN_NAMES))])
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    made = _begin(_name(name), authority.subject, key.public_key(), days)
    made = made.add_extension(names, critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_key_usage(digital_signature=True), critical=True)
    made = made.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(own_key.public_key())
    _write(folder, name, key, made.add_extension(identifier, critical=False), own_key)
    console.print(
        f"WATTSHIFT_TLS_CERT={folder / name}.crt\nWATTSHIFT_TLS_KEY={folder / name}.key\n"
        f"WATTSHIFT_TLS_CA={folder / 'ca.crt'}"
    )


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _name(common: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    except ValueError as error:
        raise CliError(f"{common!r} cannot be a name: {error}", EXIT_USAGE) from error


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise CliError(f"--host {host}: {error}", EXIT_USAGE) from error


def _key_usage(**used: bool) -> Any:
    from cryptography import x509

    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    every = dict.fromkeys((*names, "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(**(every | used))


def _begin(subject: Any, issuer: Any, public_key: Any, days: int) -> Any:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # the clocks of hosts differ
        .not_valid_after(now + timedelta(days=days))
    )


def _write(folder: Path, name: str, key: Any, made: Any, signing_key: Any = None) -> None:
    """Write a key and its certificate; the key first, so that a certificate never exists without one."""
    from cryptography.hazmat.primitives import hashes, serialization

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = made.sign(signing_key or key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for suffix, content, mode in (("key", private, 0o600), ("crt", public, 0o644)):
            files.replace(folder / f"{name}.{suffix}", content, mode=mode)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}", EXIT_FAILED) from error
