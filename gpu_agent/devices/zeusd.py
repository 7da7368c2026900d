"""Clocks and power limits set by Zeus's daemon, for an agent that may not set them itself; NVML reads everything.

``zeusd`` runs as root on the node and takes its orders over HTTP, on a Unix socket or a port: see its own
documentation (https://ml.energy/zeus/zeusd/). Its milliwatts are converted here.
"""

import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from gpu_agent.devices.driver import DeviceError, NotPermittedError, NotSupportedError, check_whole
from gpu_agent.devices.nvml import NvmlDriver
from gpu_agent.devices.nvml_calls import nvml, optional, text
from services.contracts.nodes import DeviceInfo
from services.kit.logging import Log

log = Log(__name__)

_CONTROL = "gpu-control"
_ERRORS: dict[int, type[DeviceError]] = {
    HTTPStatus.BAD_REQUEST: NotSupportedError,
    HTTPStatus.UNAUTHORIZED: NotPermittedError,
    HTTPStatus.FORBIDDEN: NotPermittedError,
    HTTPStatus.NOT_FOUND: NotSupportedError,
}
"""By the status of its answer; 404 is that of a daemon started without the group of the call."""


class Zeusd:
    """The HTTP API of the daemon.

    Args:
        address: Its socket's path, or ``HOST:PORT``.
        token_file: The token that identifies the agent, if it requires one; read for each call, because tokens expire.
    """

    def __init__(self, address: str, token_file: Path | None = None, *, timeout_s: float = 5.0) -> None:
        is_path = "/" in address
        self.address = address
        self._token_file = token_file
        self._client = httpx.Client(
            base_url="http://zeusd" if is_path else f"http://{address}",
            transport=httpx.HTTPTransport(uds=address) if is_path else None,
            timeout=timeout_s,
            trust_env=False,  # a proxy of the environment is for other hosts
        )

    def controlled(self) -> dict[str, int]:
        """Return the daemon's numbers of the GPUs it sets, by PCI address; by its numbers as text if it reports none.

        There are none if it was started without control of GPUs, or does not permit the agent to use it.
        """
        found = self._ask("GET", "/discover")
        try:
            if _CONTROL not in found["enabled_api_groups"]:
                return {}
            if found["auth_required"] and _CONTROL not in self._ask("GET", "/auth/whoami")["scopes"]:
                return {}
            return {pci_address(gpu.get("pci_address") or str(gpu["id"])): int(gpu["id"]) for gpu in found["gpus"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DeviceError(f"zeusd at {self.address} does not answer as documented: {error!r}") from error

    def set(self, what: str, gpu: int, **values: int) -> None:
        """Have a GPU set, and wait until it is done.

        Raises:
            NotPermittedError: The daemon does not permit it to the agent, or the driver not to the daemon.
            NotSupportedError: The GPU cannot do this, or the daemon was started without it.
            DeviceError: It does not answer, or failed.
        """
        self._ask("POST", f"/gpu/{what}", gpu_ids=str(gpu), block="true", **values)

    def close(self) -> None:
        self._client.close()

    def _ask(self, method: str, path: str, **query: str | int) -> Any:
        try:
            token = self._token_file.read_text().strip() if self._token_file else ""
            headers = {"Authorization": f"Bearer {token}"} if token else None
            answer = self._client.request(method, path, params=query, headers=headers)
            if answer.is_success:
                return answer.json() if method == "GET" else None
        except OSError as error:
            raise DeviceError(f"The token for zeusd cannot be read: {error}") from error
        except httpx.HTTPError as error:
            raise DeviceError(f"zeusd at {self.address} does not answer: {error}") from error
        except ValueError as error:
            raise DeviceError(f"zeusd at {self.address} does not answer as documented: {error}") from error
        kind = _ERRORS.get(answer.status_code, DeviceError)
        raise kind(f"zeusd answered {answer.status_code}: {' '.join(answer.text.split())[:300]}")


class ZeusdDriver(NvmlDriver):
    """The host's NVIDIA GPUs, with clocks and power limits set by ``zeusd``; it does not cut them into slices.

    A daemon that does not answer yet is asked again at each ``refresh``. One that stops answering later still counts as
    able to set the devices: its own supervisor restarts it, and until then each setting is refused with its reason.

    Raises:
        DriverMissingError: NVML is not installed, or the kernel driver does not answer.
    """

    def __init__(self, zeusd: Zeusd) -> None:
        self._zeusd = zeusd
        self._numbers: dict[int, int] = {}
        self._why = ""
        self._controlled = self._find()
        super().__init__(may_probe=False)

    def refresh(self) -> bool:
        """Look for the daemon if it has not answered yet, and check MIG modes as NVML's driver does."""
        changed = super().refresh()
        if self._controlled:
            return changed
        self._controlled = self._find()
        for index in self._gpus if self._controlled else ():
            self._gpus[index] = self._describe(index)
        return changed or bool(self._controlled)

    def set_clock(self, index: int, clock_mhz: int) -> None:
        self._set("set_gpu_locked_clocks", index, min_clock_mhz=clock_mhz, max_clock_mhz=clock_mhz)

    def reset_clock(self, index: int) -> None:
        self._set("reset_gpu_locked_clocks", index)

    def set_power_limit(self, index: int, limit_w: float) -> None:
        self._set("set_power_limit", index, power_limit_mw=round(limit_w * 1_000))

    def close(self) -> None:
        self._zeusd.close()
        super().close()

    def _set(self, what: str, index: int, **values: int) -> None:
        check_whole(index)
        number = self._numbers.get(index)
        if number is None:
            raise NotPermittedError(f"zeusd at {self._zeusd.address} does not set GPU {index}")
        self._zeusd.set(what, number, **values)

    def _find(self) -> dict[str, int]:
        """Return which GPUs the daemon sets; log once why there are none."""
        try:
            controlled, why = self._zeusd.controlled(), "it does not permit the agent to set GPUs"
        except DeviceError as error:
            controlled, why = {}, str(error)
        if not controlled and why != self._why:
            log.warning("zeusd.no_controls", address=self._zeusd.address, reason=why)
        self._why = why
        return controlled

    def _describe(self, index: int) -> DeviceInfo:
        gpu = super()._describe(index)
        number = self._controlled.get(self._pci_address(index), self._controlled.get(str(index)))
        if number is None:
            return gpu
        self._numbers[index] = number
        return gpu.model_copy(update={"can_set_clock": bool(gpu.clocks_mhz), "can_set_power_limit": True})

    def _pci_address(self, index: int) -> str:
        found = optional(lambda: nvml.nvmlDeviceGetPciInfo(self._handle(index)))
        return pci_address(text(found.busId)) if found else ""


def pci_address(written: str) -> str:
    """Return a PCI address in the kernel's spelling: NVML writes the domain with eight digits, and in capitals.

    >>> pci_address("00000000:3B:00.0")
    '0000:3b:00.0'
    """
    return re.sub(r"^0{4}(?=[0-9a-f]{4}:)", "", written.lower())
