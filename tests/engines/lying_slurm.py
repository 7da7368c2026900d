#!/usr/bin/env python3
"""A Slurm that lies: each of its commands does what the file of its name in ``$LIES`` says, line by line."""

import os
import pathlib
import sys
import time

name = pathlib.Path(sys.argv[0]).name
folder = pathlib.Path(os.environ["LIES"])
with (folder / "calls").open("a") as calls:
    calls.write(f"{name} {' '.join(sys.argv[1:])}\n{sys.stdin.read() if name == 'scontrol' else ''}")
what = (folder / name).read_text()
if what == "hang":
    time.sleep(60)
if what.startswith("fail"):
    sys.exit(what)
sys.stdout.write(what)
