"""``python -m migrations [upgrade [REVISION] | downgrade REVISION | current]``; the default is ``upgrade head``."""

from __future__ import annotations

import os
import sys

from migrations.run import TooNewError, downgrade, upgrade


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
        case ["downgrade", revision]:
            downgrade(url, revision)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
