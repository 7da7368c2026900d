"""One IPMI request as a process of its own: ``python -m services.scheduler.power.ipmi``.

The request is JSON on standard input.

pyghmi keeps threads and sockets for every session that it has ever opened; here they end with the process. The password
comes through the pipe, so that no process list shows it.
"""

import json
import sys
import time
from typing import Any

LOOK_EVERY_S = 1.0


def set_power(request: dict[str, Any]) -> None:
    """Switch a chassis and return once its controller reports the new state.

    Raises:
        Exception: any error of pyghmi or the controller.
        TimeoutError: the chassis is not switched in time.
    """
    from pyghmi.ipmi import command  # pyright: ignore[reportMissingTypeStubs]

    controller: Any = command.Command(
        bmc=request["address"], port=request["port"], userid=request["user"], password=request["password"]
    )
    deadline = time.monotonic() + request["time_limit_s"]
    wanted = "on" if request["on"] else "off"

    def is_so(until: float) -> bool:
        while (state := controller.get_power()["powerstate"]) != wanted and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        return state == wanted

    if is_so(0):
        return
    if wanted == "on":
        controller.set_power("on")
    else:
        if request["soft_s"] > 0:
            controller.set_power("shutdown")
            if is_so(min(deadline, time.monotonic() + request["soft_s"])):
                return
        controller.set_power("off")
    if not is_so(deadline):
        raise TimeoutError(f"the chassis is not {wanted} after {request['time_limit_s']:g} s")


def main() -> None:
    """Read the request, carry it out, and say in one line what went wrong, if anything."""
    request = json.loads(sys.stdin.buffer.read())
    try:
        set_power(request)
    except Exception as error:
        known = str(error) if str(error) not in ("", "None") else "no answer"
        sys.exit(f"the controller at {request['address']}:{request['port']}: {known}")


if __name__ == "__main__":
    main()
