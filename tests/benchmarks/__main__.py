"""Run every benchmark, or those named: `./test --bench [NAME ...]`; fails if one fails."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(names: list[str]) -> int:
    """Run the benchmarks `names` (all if empty), each in a process of its own so that none warms the next.

    Returns:
        0, 1 if a benchmark failed, or 2 if a name is not known.
    """
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    if unknown := set(names) - set(known):
        print(f"no benchmark called {', '.join(sorted(unknown))}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or known:
        print(f"== {name}", flush=True)
        ready = "import sys; from services.kit.policies import load_policies; load_policies()"
        program = f"{ready}; from tests.benchmarks.bench_{name} import main; sys.exit(main())"
        if subprocess.run([sys.executable, "-c", program], cwd=HERE.parents[1]).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
