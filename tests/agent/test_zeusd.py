"""Clocks and limits set by Zeus' daemon: a stand-in with its documented API sets the fake NVML's devices."""

from __future__ import annotations

import gc
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pynvml
import pytest

from gpu_agent.devices.driver import DeviceError, NotPermittedError, NotSupportedError
from gpu_agent.devices.zeusd import Zeusd, ZeusdDriver, pci_address
from tests.agent.test_nvml import Fault, fault, library

__all__ = ["fault", "library"]

nvml: Any = pynvml
GPUS = [  # in another order than NVML's, as a daemon in another container may have them
    {"id": 0, "name": "NVIDIA A100-SXM4-40GB", "pci_address": "0000:3c:00.0"},
    {"id": 1, "name": "NVIDIA A100-SXM4-40GB", "pci_address": "0000:3b:00.0"},
]
OURS = {0: 1, 1: 0}


class StandIn:
    """The daemon on a Unix socket: what it was asked, and what it answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.tokens: list[str | None] = []
        self.discovered: Any = {"gpus": GPUS, "enabled_api_groups": ["gpu-control", "gpu-read"], "auth_required": False}
        self.scopes = ["gpu-control"]
        self.failure: tuple[int, Any] | None = None
        self._server: Any = None

    def start(self) -> None:
        """Listen."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def address_string(self) -> str:
                return "socket"

            def log_message(self, format: str, *args: Any) -> None: ...

            def _answer(self) -> None:
                status, body = stand_in.answer(self.path, self.headers.get("Authorization"))
                data = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _answer  # noqa: N815

        self._server = socketserver.ThreadingUnixStreamServer(str(self.path), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self.path.unlink()
            self._server = None

    def answer(self, url: str, token: str | None) -> tuple[int, Any]:
        """Do what is asked, as its documentation has it."""
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        self.tokens.append(token)
        if parts.path == "/discover":
            return 200, self.discovered
        if parts.path == "/auth/whoami":
            return 200, {"sub": "wattshift", "scopes": self.scopes}
        self.asked.append((parts.path, query))
        if self.failure:
            return self.failure
        handle = nvml.nvmlDeviceGetHandleByIndex(OURS[int(query["gpu_ids"])])
        if parts.path == "/gpu/set_power_limit":
            nvml.nvmlDeviceSetPowerManagementLimit(handle, int(query["power_limit_mw"]))
        elif parts.path == "/gpu/set_gpu_locked_clocks":
            nvml.nvmlDeviceSetGpuLockedClocks(handle, int(query["min_clock_mhz"]), int(query["max_clock_mhz"]))
        elif parts.path == "/gpu/reset_gpu_locked_clocks":
            nvml.nvmlDeviceResetGpuLockedClocks(handle)
        else:
            return 404, {"error": "no such path"}
        return 200, None


@pytest.fixture
def zeusd(fault: Fault, tmp_path: Path) -> Iterator[StandIn]:
    """The daemon, listening."""
    stand_in = StandIn(tmp_path / "zeusd.sock")
    stand_in.start()
    yield stand_in
    stand_in.stop()


def test_the_daemon_sets_what_the_agent_may_not(zeusd: StandIn) -> None:
    driver = ZeusdDriver(Zeusd(str(zeusd.path)))
    device = driver.devices()[0]
    assert (device.can_set_clock, device.can_set_power_limit, device.can_partition) == (True, True, False)
    driver.set_power_limit(0, 250.5)
    assert (driver.read(0).power_limit_w, driver.read(1).power_limit_w) == (250.5, 400)
    driver.set_clock(1, 705)
    assert (driver.read(0).clock_mhz, driver.read(1).clock_mhz) == (1410, 705)
    driver.reset_power_limit(0)
    driver.reset_clock(1)
    assert (driver.read(0).power_limit_w, driver.read(1).clock_mhz) == (400, 1410)
    assert zeusd.asked[0] == ("/gpu/set_power_limit", {"gpu_ids": "1", "block": "true", "power_limit_mw": "250500"})
    assert [path.rsplit("/")[-1] for path, _ in zeusd.asked] == [
        "set_power_limit", "set_gpu_locked_clocks", "set_power_limit", "reset_gpu_locked_clocks",
    ]  # fmt: skip
    driver.close()


def test_without_addresses_the_daemons_numbers_are_ours(zeusd: StandIn) -> None:
    zeusd.discovered["gpus"] = [{"id": 1, "name": "NVIDIA A100-SXM4-40GB"}]
    first, second = ZeusdDriver(Zeusd(str(zeusd.path))).devices()
    assert (first.can_set_power_limit, second.can_set_power_limit) == (False, True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # httpcore leaves a socket unclosed
def test_a_daemon_that_comes_later_is_found(zeusd: StandIn) -> None:
    zeusd.stop()
    driver = ZeusdDriver(Zeusd(str(zeusd.path)))
    assert not driver.devices()[0].can_set_power_limit
    assert not driver.refresh()
    with pytest.raises(NotPermittedError, match="does not set GPU 0"):
        driver.set_power_limit(0, 300)
    zeusd.start()
    assert driver.refresh(), "the capabilities are others"
    assert driver.devices()[0].can_set_power_limit
    assert not driver.refresh()
    zeusd.stop()
    assert not driver.refresh(), "it is being restarted"
    with pytest.raises(DeviceError, match="does not answer"):
        driver.set_power_limit(0, 300)
    gc.collect()


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, NotSupportedError), (401, NotPermittedError), (403, NotPermittedError), (404, NotSupportedError)],
)
def test_its_refusals_have_names_and_its_words(zeusd: StandIn, status: int, error: type[DeviceError]) -> None:
    driver = ZeusdDriver(Zeusd(str(zeusd.path)))
    zeusd.failure = (status, {"errors": {"1": "power limit out of range"}})
    with pytest.raises(error, match="power limit out of range"):
        driver.set_power_limit(0, 5)
    zeusd.failure = (500, None)
    with pytest.raises(DeviceError, match="500"):
        driver.set_clock(0, 705)


def test_control_needs_the_group_and_the_scope(zeusd: StandIn, tmp_path: Path) -> None:
    zeusd.discovered["auth_required"] = True
    token = tmp_path / "token"
    token.write_text("first\n")
    driver = ZeusdDriver(Zeusd(str(zeusd.path), token))
    token.write_text("second\n")
    driver.set_power_limit(0, 300)
    assert zeusd.tokens == ["Bearer first", "Bearer first", "Bearer second"], "a token is read anew for each call"
    zeusd.scopes = ["gpu-read"]
    assert not ZeusdDriver(Zeusd(str(zeusd.path), token)).devices()[0].can_set_clock
    zeusd.discovered |= {"auth_required": False, "enabled_api_groups": ["gpu-read"]}
    assert not ZeusdDriver(Zeusd(str(zeusd.path), token)).devices()[0].can_set_clock
    token.unlink()
    assert not ZeusdDriver(Zeusd(str(zeusd.path), token)).devices()[0].can_set_clock


@pytest.mark.parametrize("answer", [[], {}, {"gpus": None}, "?", {"enabled_api_groups": 3}])
def test_an_answer_of_another_shape_is_no_control(zeusd: StandIn, answer: Any) -> None:
    zeusd.discovered = answer
    assert not ZeusdDriver(Zeusd(str(zeusd.path))).devices()[0].can_set_clock


def test_addresses_are_written_as_the_kernel_does() -> None:
    assert pci_address("00000000:3B:00.0") == pci_address("0000:3b:00.0") == "0000:3b:00.0"
    assert pci_address("00010000:3B:00.0") == "00010000:3b:00.0"
