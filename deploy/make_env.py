"""Write the `.env` of docker-compose.yml: the installation's secrets, made once. `python3 deploy/make_env.py`."""

import os
import secrets
import sys
from pathlib import Path

NAMES = (
    "POSTGRES_PASSWORD",
    "VALKEY_PASSWORD",
    "WATTSHIFT_SERVICE_TOKEN",
    "WATTSHIFT_NODE_JOIN_TOKEN",
    "WATTSHIFT_SECRETS_KEY",
)


def main(path: Path) -> None:
    """Write the file, readable by its owner alone; an existing one is kept, since the volumes know its passwords."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.exit(f"{path} exists and is kept")
    with os.fdopen(descriptor, "w") as file:
        file.writelines(f"{name}={secrets.token_hex(24)}\n" for name in NAMES)


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1] / ".env")
