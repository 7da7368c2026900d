"""`python -m services.standalone`, but its processes are forked from one that has their imports already.

What a supervisor does with a process is the same; a start takes a quarter of the CPU time.
"""

import sys

from services.standalone.__main__ import main
from tests.support.forked import forked_by_the_supervisor

if __name__ == "__main__":
    with forked_by_the_supervisor():
        status = main()
    sys.exit(status)
