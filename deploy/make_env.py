"""Write the `.env` of docker-compose.yml: the installation's secrets, made once. `python3 deploy/make_env.py`.

Each service gets a credential and a user in Valkey of its own, and each simulated agent a token to enrol with. `--add`
keeps what is in the file, and adds what an earlier release did not have. `--rotate`, given twice, and then `--finish`
replace the secret that the credentials follow from: after each of the three, `docker compose up -d`. First both are
accepted, then the new one signs, and at last the old one is dropped.
"""

import os
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from services.kit import redis_users  # noqa: E402
from services.kit.callers import SERVICES  # noqa: E402
from services.kit.credentials import Credential, caller_key, standing_token  # noqa: E402

NAMES = (
    "POSTGRES_PASSWORD",
    "VALKEY_PASSWORD",
    "WATTSHIFT_SERVICE_TOKEN",
    "WATTSHIFT_NODE_JOIN_TOKEN",
    "WATTSHIFT_SECRETS_KEY",
)
"""The service token is for webhooks, whose secrets follow from it, and for agents of earlier releases."""
AGENTS = ("node-1", "node-2")
STEP = "WATTSHIFT_ROTATION"
"""What has become of a new secret: `accepted` beside the old one, or `signs`; empty without one."""


def settings(given: "dict[str, str]") -> "dict[str, str]":
    """Return all settings, those that are given as they are."""
    made = {name: secrets.token_hex(24) for name in NAMES}
    made.update(given)
    if f"{SERVICES[0].upper()}_CREDENTIAL" not in given:  # all at once: they know each other
        root = secrets.token_bytes(32)
        for service in SERVICES:
            made[f"{service.upper()}_CREDENTIAL"] = Credential.derived(service, (root,)).text()
    for service in redis_users.RULES:
        made[f"{service.upper()}_VALKEY_PASSWORD"] = redis_users.password(made["VALKEY_PASSWORD"], service)
    for node in AGENTS:
        name = node.upper().replace("-", "_")
        made[f"{name}_ENROLL_TOKEN"] = standing_token(made["WATTSHIFT_NODE_JOIN_TOKEN"], node)
    return made


def rotated(given: "dict[str, str]", finish: bool) -> "dict[str, str]":
    """Return the settings that another step towards a new secret changes; the services' keys of each other stay whole.

    Raises:
        SystemExit: It is not time for that step.
    """
    names = {f"{service.upper()}_CREDENTIAL": service for service in SERVICES}
    if not set(names) <= set(given):
        sys.exit("there are no credentials to replace: run this with --add first")
    known = {service: Credential.parsed(given[name]) for name, service in names.items()}
    step = given.get(STEP, "")
    if finish and step != "signs":
        sys.exit("no new secret signs yet: --rotate")
    if step == "signs" and not finish:
        sys.exit("the old secret is still accepted: --finish")
    root, made = secrets.token_bytes(32), {}
    for service, old in known.items():
        new = Credential.derived(service, (root,))
        if finish:
            changed = Credential(service, old.secrets[:1], old.keys, old.nodes[:1])
        elif not step:
            changed = Credential(service, old.secrets + new.secrets, old.keys, old.nodes + new.nodes)
        else:
            keys = {audience: caller_key(known[audience].secrets[-1], service) for audience in old.keys}
            changed = Credential(service, old.secrets[::-1], keys, old.nodes[::-1])
        made[f"{service.upper()}_CREDENTIAL"] = changed.text()
    return {**made, STEP: "" if finish else "signs" if step else "accepted"}


def write(path: Path, lines: "list[str]", mode: int) -> None:
    """Write a file, whole or not at all."""
    draft = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.writelines(f"{line}\n" for line in lines)
    draft.replace(path)


def main(folder: Path, words: "list[str]") -> None:
    """Write the files; an existing one is kept, since the volumes know its passwords."""
    path = folder / ".env"
    is_step = "--rotate" in words or "--finish" in words
    if path.exists() and not is_step and "--add" not in words:
        sys.exit(f"{path} exists and is kept; --add adds what it lacks")
    lines = path.read_text().splitlines() if path.exists() else []
    given = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    if is_step:
        changed = rotated(given, "--finish" in words)
        kept = [line for line in lines if line.split("=", 1)[0] not in changed]
        write(path, kept + [f"{name}={value}" for name, value in changed.items()], 0o600)
        return
    made = settings(given)
    # Hashes alone, which the user in Valkey's container has to be able to read.
    write(folder / "valkey-users.conf", redis_users.configuration(made["VALKEY_PASSWORD"]), 0o644)
    write(path, lines + [f"{name}={value}" for name, value in made.items() if name not in given], 0o600)


if __name__ == "__main__":
    main(ROOT, sys.argv[1:])
