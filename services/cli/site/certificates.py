"""An installation's own certificate authority: made once, it issues a certificate for each host."""

from pathlib import Path
from typing import Annotated

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
    from services.kit.authority import new_authority

    if (folder / "ca.key").exists():
        kept = f"{folder / 'ca.key'} exists and is kept: every certificate would have to be issued again"
        lost = "; its ca.crt is missing: put it back or, if no host has it, remove the key"
        raise CliError(kept + ("" if (folder / "ca.crt").exists() else lost))
    _write(folder, "ca", new_authority(days))
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
    from services.kit.authority import Authority

    if name == "ca" or Path(name).name != name or name.startswith("."):
        raise CliError(f"{name!r} cannot be the name of a host here", EXIT_USAGE)
    try:
        authority = Authority((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes())
    except OSError as error:
        hint = "make an authority by `wattshift ca init`"
        raise CliError(f"{error.filename}: {error.strerror}; {hint}", EXIT_FAILED) from error
    except ValueError as error:
        raise CliError(f"{folder}: ca.crt or ca.key is corrupt ({error})", EXIT_FAILED) from error
    try:
        made = authority.issued(name, dict.fromkeys((*(host or [name]), *OWN_NAMES)), days)
    except ValueError as error:
        raise CliError(str(error), EXIT_USAGE) from error
    _write(folder, name, made)
    console.print(
        f"WATTSHIFT_TLS_CERT={folder / name}.crt\nWATTSHIFT_TLS_KEY={folder / name}.key\n"
        f"WATTSHIFT_TLS_CA={folder / 'ca.crt'}"
    )


def _write(folder: Path, name: str, made: tuple[bytes, bytes]) -> None:
    """Write a key and its certificate; the key first, so that a certificate never exists without one."""
    certificate, key = made
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for suffix, content, mode in (("key", key, 0o600), ("crt", certificate, 0o644)):
            files.replace(folder / f"{name}.{suffix}", content, mode=mode)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}", EXIT_FAILED) from error
