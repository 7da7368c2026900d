#!/bin/sh
# Find a Python that can run Wattshift and hand over to bootstrap.py beside this file.
set -eu
for python in python3.13 python3.12 python3.11 python3; do
    # Some version managers put a launcher on PATH for a Python that is not active: ask it, do not just look for it.
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        exec "$python" "$(dirname "$0")/bootstrap.py" "$@"
    fi
done
echo "wattshift: needs Python 3.11 or newer (looked for python3.13, python3.12, python3.11 and python3 on PATH)" >&2
exit 1
