"""Which devices count as whose: running jobs hold what their engine gave them, planned ones get the rest."""

from collections.abc import Mapping, Sequence

from services.scheduler.repository.engines import Claim, HeldRow


def claims_of(holders: Sequence[HeldRow], devices: Mapping[str, Sequence[int]]) -> set[Claim]:
    """Return who holds which device of engines' nodes; no device is held twice.

    If an engine gives the same device to two runs, the one that began last has it: the other one is over, and its end
    has not been reported yet. A planned run keeps its devices if they are free, or else gets others of the same node,
    or of any node, so that room is kept for it wherever the engine puts it.
    """
    owner: dict[tuple[str, int], str] = {}
    known = {(node, device) for node, numbers in devices.items() for device in numbers}
    real = [holder for holder in holders if holder.state != "starting"]
    for holder in sorted(real, key=lambda each: (each.started_s, each.id)):
        for share in holder.shares:
            for device in share["devices"]:
                if (share["node_id"], device) in known:
                    owner[share["node_id"], device] = holder.id
    for holder in (each for each in holders if each.state == "starting"):
        for share in holder.shares:
            node = share["node_id"]
            own = [(node, device) for device in share["devices"]]
            beside = [(node, device) for device in devices.get(node, ())]
            elsewhere = [place for place in sorted(known) if place[0].startswith(f"{holder.engine}.")]
            wanted = len(share["devices"])
            for place in (*own, *beside, *elsewhere):
                if wanted and place in known and place not in owner:
                    owner[place] = holder.id
                    wanted -= 1
    return {(holder, node, device) for (node, device), holder in owner.items()}
