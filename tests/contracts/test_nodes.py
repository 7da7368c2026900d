"""What agents and control planes of two releases say to each other."""

import pytest
from pydantic import ValidationError

from services.contracts.nodes import (
    ControlsStatus,
    DeviceControls,
    DeviceInfo,
    GpuPartitionSpec,
    Heartbeat,
    HeartbeatReply,
    NodeRegistration,
    WantedPartition,
)

MEASURED = {"elapsed_s": 2.0, "work": 1.0, "gpu_energy_j": 100.0, "marks": 2}


@pytest.mark.parametrize(("length", "measured"), [("slice_s", "slice"), ("interval_s", "interval")])
def test_an_interval_is_read_by_its_old_name_and_its_new_one(length: str, measured: str) -> None:
    controls = DeviceControls.model_validate({"revision": 1, length: 30.0})
    status = ControlsStatus.model_validate({"revision": 1, length: 30.0, measured: MEASURED})

    assert controls.interval_s == status.interval_s == 30.0
    assert status.interval is not None
    assert status.interval.marks == 2


def test_an_interval_is_written_by_the_name_that_the_previous_release_knows() -> None:
    status = ControlsStatus.model_validate({"revision": 1, "interval_s": 30.0, "interval": MEASURED})

    written = status.model_dump(mode="json")

    assert (written["slice_s"], written["slice"]["marks"]) == (30.0, 2)
    assert not {"interval", "interval_s"} & set(written)
    assert ControlsStatus.model_validate(written) == status


def test_a_name_that_neither_release_knows_is_refused() -> None:
    with pytest.raises(ValidationError, match="span_s"):
        DeviceControls.model_validate({"revision": 1, "span_s": 30.0})


GPU = {"index": 0, "uuid": "GPU-a", "model": "A100-SXM4-80GB", "memory_gib": 80.0, "power_limit_w": 400.0}


def test_of_gpus_that_are_not_cut_nothing_is_said_that_the_previous_release_refuses() -> None:
    device = DeviceInfo.model_validate(GPU).model_dump(mode="json")
    heartbeat = Heartbeat(boot_id="b", ranks=[], devices=[]).model_dump(mode="json")
    reply = HeartbeatReply(lease_ttl_s=1.0, allocations=[]).model_dump(mode="json")

    assert not {"parent", "profile", "sevenths", "start", "mig_enabled"} & set(device)
    assert set(heartbeat) == {"boot_id", "ranks", "devices"}
    assert set(reply) == {"lease_ttl_s", "allocations"}


def test_slices_cut_gpus_and_partitions_are_read_as_they_were_written() -> None:
    of_slice = {"index": 1_028, "uuid": "MIG-a", "parent": 0, "profile": "3g.40gb", "sevenths": 3, "start": 4}
    for fields in ({"mig_enabled": True}, of_slice):
        device = DeviceInfo.model_validate(GPU | fields)
        assert DeviceInfo.model_validate(device.model_dump(mode="json")) == device
        assert set(fields) <= set(device.model_dump(mode="json"))
    reply = HeartbeatReply(lease_ttl_s=1, allocations=[], partitions=[WantedPartition(gpu=0, revision=1, sizes=[7])])
    assert HeartbeatReply.model_validate_json(reply.model_dump_json()) == reply


@pytest.mark.parametrize(
    "fields",
    [
        {"index": 1_024},
        {"index": 1_024, "parent": 1, "start": 0},
        {"index": 1_025, "parent": 0, "start": 0},
        {"index": 1_024, "parent": 0},
        {"parent": 0, "start": 0},
    ],
)
def test_a_device_that_is_numbered_as_another_one_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="slice"):
        DeviceInfo.model_validate(GPU | fields)


def test_slices_of_a_gpu_are_put_in_the_order_of_their_places() -> None:
    assert GpuPartitionSpec(sizes=[3, 2, 2]).sizes == [2, 2, 3]
    assert GpuPartitionSpec(sizes=[]).sizes == []


@pytest.mark.parametrize(
    ("sizes", "said"),
    [([4, 4], "4g, 4g do not fit on one GPU"), ([5], "no slice of 5 sevenths"), ([1] * 8, "at most 7 items")],
)
def test_slices_that_no_gpu_has_are_refused(sizes: list[int], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        GpuPartitionSpec(sizes=sizes)


NODE = {"node_id": "n", "address": "", "devices": [], "driver": "nvml", "containers": False, "host_power": "modelled"}


@pytest.mark.parametrize("url", ["", "http://n1:8070", "https://10.0.0.7:8070/", "http://[fd00::1]:8070"])
def test_a_node_is_asked_at_a_host_and_port(url: str) -> None:
    assert NodeRegistration.model_validate({**NODE, "agent_url": url}).agent_url == url
    for wrong in ("unix://telemetry", "http://169.254.169.254/latest?x=", "http://h/#", "http://u@h:1", "file:///etc"):
        with pytest.raises(ValidationError, match="agent_url"):
            NodeRegistration.model_validate({**NODE, "agent_url": wrong})
