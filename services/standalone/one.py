"""Become one process of the control plane: `python -m services.standalone.one NAME`, as the systemd units do."""

import os
import sys

from services.standalone.processes import PYTHON, SERVICES, WORKERS


def command(name: str) -> tuple[str, ...]:
    modules = {service.name: ("-m", service.module) for service in SERVICES}
    arguments = modules.get(name) or WORKERS.get(name)
    if arguments is None:
        sys.exit(f"there is no process {name!r}; known: {', '.join([*modules, *WORKERS])}")
    return (*PYTHON, *arguments)


if __name__ == "__main__":
    words = command(sys.argv[1] if len(sys.argv) == 2 else "")
    os.execv(words[0], words)
