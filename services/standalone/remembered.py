"""The options that an installation was made with, so that a plain `up` brings back the same cluster.

They are in ``options.json`` in the data folder, written when everything is ready. An option that is given replaces the
remembered one; one that is not given is taken from there.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter

from services.kit import files
from services.standalone.data_folder import DataFolder
from services.standalone.process import BadInputError

FILE = "options.json"
ZONE_VARIABLES = {"zone": "WATTSHIFT_ZONE", "agents_zone": "GPU_AGENT_ZONE", "providers": "CARBON_PROVIDERS"}
_FLAGS = {"nodes": "--nodes", "port": "--port", "listen": "--listen", **ZONE_VARIABLES}


@dataclass(frozen=True)
class Options:
    """What an installation is made with; None: not given, so that the default applies."""

    nodes: str | None = None  #: Nodes in the form that `parse_nodes` reads
    port: int | None = None
    zone: str | None = None  #: Grid zone of nodes that name none, `WATTSHIFT_ZONE`
    agents_zone: str | None = None  #: The same for agents only, `GPU_AGENT_ZONE`
    listen: str | None = None  #: Where other hosts join, as HOST:PORT; empty: nowhere
    providers: str | None = None  #: Where the zones' intensities come from, `CARBON_PROVIDERS`

    def shown(self) -> str:
        """Return the options as they are typed; empty if none was ever given."""
        given = {name: "''" if value == "" else value for name, value in asdict(self).items() if value is not None}
        return " ".join(
            f"{_FLAGS[name]}{'=' if name in ZONE_VARIABLES else ' '}{value}" for name, value in given.items()
        )

    def environment(self) -> dict[str, str]:
        """Return the variables that carry the zones and their providers."""
        return {variable: value for name, variable in ZONE_VARIABLES.items() if (value := getattr(self, name))}


_OPTIONS = TypeAdapter(Options)


def asked(nodes: str | None, port: int | None, environment: Mapping[str, str], listen: str | None = None) -> Options:
    """Return the options that a caller gives: the arguments, and the zones and port in the environment."""
    if port is None and environment.get("GATEWAY_PORT", "").isdigit():
        port = int(environment["GATEWAY_PORT"])
    zones = {name: environment.get(variable) or None for name, variable in ZONE_VARIABLES.items()}
    return Options(nodes=nodes, port=port, listen=listen, **zones)


def read(folder: DataFolder) -> Options:
    """Return what the installation remembers; nothing on its first start."""
    path = folder.path / FILE
    try:
        return _OPTIONS.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return Options()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not the JSON that `wattshift up` writes"
        raise BadInputError(
            f"cannot read {path}: {reason}; remove it, and give `wattshift up` its options (--nodes, --port) again"
        ) from None


def merge(before: Options, given: Options) -> tuple[Options, list[str]]:
    """Return the options in force, and a line for each remembered value that is replaced by a given one."""
    old, new = asdict(before), {name: value for name, value in asdict(given).items() if value is not None}
    changes = [
        f"{_FLAGS[name]} was {old[name] or 'empty'}, is now {value or 'empty'}"
        for name, value in new.items()
        if old[name] not in (None, value)
    ]
    return replace(before, **new), changes


def write(folder: DataFolder, options: Options) -> None:
    files.replace(folder.path / FILE, json.dumps(asdict(options), indent=1).encode())
