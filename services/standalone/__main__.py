"""Run everything on this machine until SIGTERM or Ctrl-C: `python -m services.standalone [--help]`."""

import argparse
import asyncio
import sys

from services.kit.pulse import Pulse
from services.kit.settings import EXIT_BAD_SETTINGS
from services.standalone.process import BadInputError, StackError
from services.standalone.processes import SERVICES, WORKERS
from services.standalone.stack import Stack, default_data_dir, serve


def main() -> int:
    """Return 0 after a requested stop, 1 if something could not start, 2 if an option or setting is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m services.standalone", description="Run everything on this machine until SIGTERM or Ctrl-C."
    )
    parser.add_argument("--data-dir", metavar="DIR", help=f"where all state is kept (default {default_data_dir()})")
    parser.add_argument("--nodes", metavar="NODES", help="simulated nodes, such as 2x4:A100-SXM4-40GB,1x8")
    parser.add_argument("--port", type=int, metavar="PORT", help="the gateway's port (default 8000, else a free one)")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where nodes on other hosts join")
    parser.add_argument("--without", metavar="NAMES", default="", help="processes not to start: simulator,optimizer")
    parser.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    pulse = Pulse()  # for systemd, if that runs this: before the environment is handed on
    left_out = set(options.without.split(","))
    stack = Stack(
        options.data_dir,
        nodes=options.nodes,
        port=options.port,
        listen=options.listen,
        services=[service for service in SERVICES if service.name not in left_out],
        workers=[worker for worker in WORKERS if worker not in left_out],
        checks=not options.checked,
    )

    def say_ready() -> None:
        print(f"wattshift: ready at {stack.gateway_url}", flush=True)

    try:
        asyncio.run(serve(stack, on_ready=say_ready, beat=pulse.beat))
    except (StackError, OSError) as error:  # the latter: a file cannot be written, such as on a full disk
        print(f"wattshift: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS if isinstance(error, BadInputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
