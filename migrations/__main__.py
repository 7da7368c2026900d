"""``python -m migrations [upgrade [REVISION] | downgrade REVISION | downgrade --to RELEASE]``; by default ``upgrade``.

``downgrade --to`` undoes only what that release cannot start on or read, and refuses while processes use the database.
"""

from __future__ import annotations

import os
import sys

from migrations.run import NoWayBackError, TooNewError, downgrade, go_back, undone_by_going_back, upgrade


def main(arguments: list[str]) -> None:
    """Carry out one command on ``DATABASE_URL``."""
    url = os.environ.get("DATABASE_URL")
    if not url:
        sys.exit("DATABASE_URL is not set")
    match arguments:
        case [] | ["upgrade"]:
            try:
                upgrade(url)
            except TooNewError as error:
                sys.exit(str(error))
        case ["upgrade", revision]:
            upgrade(url, revision)
        case ["downgrade", "--to", release]:
            try:
                undone = undone_by_going_back(url, release)
            except NoWayBackError as error:
                sys.exit(str(error))
            go_back(url, release)
            print("\n".join([*(f"undone: {each}" for each in undone), f"{release} starts on this database"]))
        case ["downgrade", revision]:
            downgrade(url, revision)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
