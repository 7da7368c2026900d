"""How other hosts join: telemetry over TLS, with a certificate that is known by its fingerprint."""

import re
import socket
from collections.abc import Mapping

from services.kit import files
from services.kit.self_signed import fingerprint, new_certificate
from services.standalone.data_folder import DataFolder
from services.standalone.process import BadInputError

DEFAULT = "0.0.0.0:8443"
_EVERYWHERE = ("0.0.0.0", "::")
_FILE = "join-certificate.pem"
_NOT_BESIDE = ("WATTSHIFT_TLS_CERT", "TELEMETRY_HOST", "TELEMETRY_PORT")


def read_listen(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[?([0-9A-Za-z.:-]+?)\]?:([0-9]{1,5})", text)
    if found is None or not 0 < int(found[2]) < 65_536:
        raise BadInputError(f"--listen {text}: give HOST:PORT, such as {DEFAULT}")
    return found[1], int(found[2])


def check(listen: str, environment: Mapping[str, str]) -> None:
    """Check `--listen`; ``BadInputError`` if it is not HOST:PORT, or contradicts a setting of how nodes come here."""
    read_listen(listen)
    if others := [name for name in _NOT_BESIDE if environment.get(name)]:
        raise BadInputError(f"--listen goes without {others[0]}, by which hosts join by hand: unset one of the two")


def settings(folder: DataFolder, host: str, port: int) -> dict[str, str]:
    """Return telemetry's settings for other hosts; its certificate is made at the first call, and kept."""
    path = folder.path / "secrets" / _FILE
    try:
        if not path.exists():
            files.replace(path, new_certificate("wattshift").encode())
        fingerprint(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInputError(f"cannot use {path}: {reason}; without it, the next start makes another one") from error
    shown = own_address(host) if host in _EVERYWHERE else host
    url = f"https://[{shown}]:{port}" if ":" in shown else f"https://{shown}:{port}"
    return {"WATTSHIFT_TLS_CERT": str(path), "WATTSHIFT_TLS_KEY": str(path), "TELEMETRY_JOIN_URL": url}


def own_address(host: str) -> str:
    """Return the address from which this machine reaches others, found without sending anything."""
    is_ipv6 = ":" in host
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("2001:db8::1" if is_ipv6 else "192.0.2.1", 9))  # of documentation: nobody has it
            return asking.getsockname()[0]
        except OSError:  # no way out
            return "::1" if is_ipv6 else "127.0.0.1"
