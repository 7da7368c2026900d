"""Run one program as a job's account, confined like its job: for what the agent does on a job's behalf.

Run as ``python -I -S enclosed.py FOLDER PROGRAM ...``. The confinement is read from standard input, as entries that end
in NUL: ``user=`` with the user id, the group id and further groups, and ``confine=`` as in the shim's ``spec``. The
program gets this process's environment and output, an empty standard input, and FOLDER as its working directory.
"""

import os
import signal
import sys

from enclosure import Enclosure  # pyright: ignore[reportMissingImports]  beside this file, which is no package here

NOT_CONFINED = 126


def main(folder: str, argv: list[str]) -> int:
    """Become the program; return only if that fails, after printing the reason in git's style."""
    try:
        enclosure, user = Enclosure(), []
        for entry in sys.stdin.buffer.read().split(b"\0"):
            kind, _, value = entry.partition(b"=")
            if kind == b"confine":
                enclosure.add(value)
            elif kind == b"user":
                user = [int(number) for number in value.split()]
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        enclosure.make(user)
        enclosure.enter()
        if user and user[0] != os.geteuid():
            os.setgroups(user[2:])
            os.setgid(user[1])
            os.setuid(user[0])
        enclosure.seal()
        os.chdir(folder)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    except (OSError, ValueError) as failure:
        sys.stderr.write(f"fatal: {argv[0]} cannot be run as its job is confined: {failure}\n")
    return NOT_CONFINED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
