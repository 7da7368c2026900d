"""The clusters that a user has logged in to: addresses and keys, in one file that only its owner can read."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from wattshift.errors import WattshiftError

LOCAL = "local"  #: The name of this machine's own installation, which needs no login


class LoginsError(WattshiftError):
    """The logins file cannot be used, or does not have the cluster; the message says what to do, in one line."""


@dataclass(frozen=True)
class Login:
    """Where a cluster's gateway is, and the key for it."""

    url: str
    key: str


@dataclass(frozen=True)
class Logins:
    """All logins by cluster name, and the one in use; None means this machine's installation."""

    clusters: dict[str, Login]
    current: str | None

    def named(self, name: str) -> Login:
        """Return one login."""
        if name not in self.clusters:
            known = ", ".join([*sorted(self.clusters), LOCAL])
            raise LoginsError(f"there is no login for a cluster {name!r}; known: {known}. See `wattshift login --help`")
        return self.clusters[name]

    def with_login(self, name: str, login: Login) -> Logins:
        """Return these logins plus another, which becomes the current one."""
        return Logins({**self.clusters, name: login}, name)

    def without(self, name: str) -> Logins:
        """Return these logins without the named one."""
        self.named(name)
        left = {each: login for each, login in self.clusters.items() if each != name}
        return Logins(left, None if self.current == name else self.current)

    def using(self, name: str) -> Logins:
        """Return these logins with another current cluster."""
        if name == LOCAL:
            return replace(self, current=None)
        self.named(name)
        return replace(self, current=name)


def logins_file() -> Path:
    """Return where logins are kept: ``wattshift/config.toml`` in ``XDG_CONFIG_HOME``, or in ``~/.config``."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "wattshift" / "config.toml"


def read_logins() -> Logins:
    """Return the logins; none if there is no file.

    Raises:
        LoginsError: The file cannot be read, or is not a logins file.
    """
    file = logins_file()
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        clusters = {
            str(name): Login(str(each["url"]), str(each["key"])) for name, each in document.get("clusters", {}).items()
        }
        current = document.get("current")
    except FileNotFoundError:
        return Logins({}, None)
    except OSError as error:
        raise LoginsError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LoginsError(f"{file} is not a file of logins; repair it, or remove it and log in again") from None
    return Logins(clusters, current if current in clusters else None)


def write_logins(logins: Logins) -> Path:
    """Replace the logins file, which only its owner can read; return where it is."""
    file = logins_file()
    lines = [f"current = {json.dumps(logins.current)}"] if logins.current else []
    for name, login in sorted(logins.clusters.items()):
        lines += ["", f"[clusters.{json.dumps(name)}]", f"url = {json.dumps(login.url)}"]
        lines += [f"key = {json.dumps(login.key)}"]
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, scratch = tempfile.mkstemp(dir=file.parent, prefix=".config-")  # made with mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                opened.write("\n".join(lines).lstrip("\n") + "\n")
            os.replace(scratch, file)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise LoginsError(f"cannot write {file}: {error.strerror}") from None
    return file


def chosen_login() -> Login | None:
    """Return the login in use; None for this machine's installation.

    ``WATTSHIFT_CLUSTER`` names one; ``WATTSHIFT_DATA_DIR`` means this machine's installation; otherwise it is the
    current one.

    Raises:
        LoginsError: There is no login of that name.
    """
    name = os.environ.get("WATTSHIFT_CLUSTER")
    if name == LOCAL or (not name and os.environ.get("WATTSHIFT_DATA_DIR")):
        return None
    logins = read_logins()
    if name:
        return logins.named(name)
    return logins.clusters[logins.current] if logins.current else None
