"""Hosts whose wall clocks jump: a preloaded library moves the time that their processes read."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("fake_clock.c")


class Clocks:
    """A clock for each host, in files that all accounts can read; none where there is no C compiler."""

    def __init__(self, folder: Path, hosts: tuple[str, ...]) -> None:
        folder.mkdir(mode=0o755)
        compiler = shutil.which("cc")
        self.hosts = hosts if compiler else ()
        self._library, self._files = folder / "fake_clock.so", {host: folder / host for host in hosts}
        if compiler:
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", self._library, _SOURCE], check=True)
            os.environ["LD_PRELOAD"] = str(self._library)  # for the server that processes are forked from
        for path in self._files.values():
            path.write_bytes(struct.pack("q", 0))
            path.chmod(0o644)

    def environment(self, host: str) -> dict[str, str]:
        """Return what a process of a host needs in its environment to have that host's clock."""
        if host not in self.hosts:
            return {}
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._files[host])}

    def move(self, host: str, by_s: int) -> None:
        """Set the clock of a host, so many seconds from the true time."""
        with self._files[host].open("r+b") as file, mmap.mmap(file.fileno(), 8) as seen:
            seen[:] = struct.pack("q", by_s)

    def close(self) -> None:
        """Have no more processes with such clocks."""
        os.environ.pop("LD_PRELOAD", None)
