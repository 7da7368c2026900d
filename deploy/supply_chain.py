"""What Wattshift is made of, and whether any of it is known to be vulnerable: ``python3 deploy/supply_chain.py``.

``sbom`` writes a CycloneDX document of a lock; ``audit`` compares it with the published advisories. Both tools are
installed into an environment of their own, which is made once, so that nothing that they need comes into the product.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

TOOLS = ("cyclonedx-bom>=7,<8", "pip-audit>=2.9,<3")
HERE = Path(__file__).parent
SKIPPED = 75
"""Exit status where nothing was found out: sysexits' EX_TEMPFAIL."""


def main(words: Sequence[str]) -> int:
    """Run a command; 1 where something is vulnerable, ``SKIPPED`` where that cannot be found out here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("sbom", "audit"))
    parser.add_argument("--lock", type=Path, default=HERE / "control.lock", help="default: the control plane's image")
    parser.add_argument("--output", type=Path, default=Path("sbom.json"), help="of sbom (default sbom.json)")
    parser.add_argument("--tools", type=Path, default=Path(".supply-chain"), help="where the two tools are installed")
    options = parser.parse_args(words)
    if (why := prepare(options.tools)) is not None:
        print(f"skipped: the tools cannot be installed: {why}", file=sys.stderr)
        return SKIPPED
    if options.command == "sbom":
        make = ["cyclonedx-py", "requirements", str(options.lock), "--of", "JSON", "--output-reproducible"]
        return _run(options.tools, [*make, "-o", str(options.output)]).returncode
    wanted = ["pip-audit", "--requirement", str(options.lock), "--disable-pip", "--require-hashes"]
    audited = _run(options.tools, [*wanted, "--format", "json", "--progress-spinner", "off"], capture_output=True)
    return report(audited.stdout, audited.stderr)


def prepare(tools: Path) -> str | None:
    """Install the tools unless they are there; return why that cannot be done."""
    if (tools / "bin" / "pip-audit").exists() and (tools / "bin" / "cyclonedx-py").exists():
        return None
    venv.create(tools, with_pip=True, clear=True)
    made = _run(tools, ["pip", "install", "--quiet", *TOOLS], capture_output=True)
    return None if made.returncode == 0 else (made.stderr.strip().splitlines() or ["pip failed"])[-1]


def report(said: str, complaint: str) -> int:
    """Print what ``pip-audit`` found, a line each, and return the exit status."""
    try:
        packages = json.loads(said)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (complaint.strip().splitlines() or ["no answer"])[-1]
        print(f"skipped: the advisories cannot be read: {last}", file=sys.stderr)
        return SKIPPED
    audited = [each for each in packages if "skip_reason" not in each]
    if not audited:
        print("skipped: the advisories of no package can be read from here", file=sys.stderr)
        return SKIPPED
    found = [(each, flaw) for each in audited for flaw in each["vulns"]]
    for each, flaw in found:
        mended = ", ".join(flaw["fix_versions"]) or "no version yet"
        print(f"{each['name']} {each['version']}: {flaw['id']}, mended in {mended}")
    print(f"{len(audited)} of {len(packages)} packages audited, {len(found)} advisories")
    return int(bool(found))


def _run(tools: Path, words: Sequence[str], *, capture_output: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [str(tools / "bin" / words[0]), *words[1:]]
    return subprocess.run(command, text=True, capture_output=capture_output, env=environment, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
