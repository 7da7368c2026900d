"""Which secrets each process of an installation gets: its own and no others."""

from collections.abc import Mapping

from services.kit import redis_users
from services.kit.credentials import Credential, roots_of, standing_token
from services.kit.settings import SECRET_VARIABLES
from services.standalone import root_secret
from services.standalone.data_folder import DataFolder

WITHOUT_DATABASE = ("gateway", "router")
WITH_SECRETS_KEY = ("admission", "serving", "telemetry")
OF_WORKERS = {"worker": "optimizer", "plan-solver": "optimizer", "simulator-worker": "simulator"}
"""The service that a worker is a part of."""


class Identities:
    """The secrets of an installation, and which of them each process is given."""

    def __init__(self, folder: DataFolder, environment: Mapping[str, str]) -> None:
        """Read the secrets, or make them; ``environment`` may have the operator's own WATTSHIFT_SECRETS_KEY."""
        self.roots = root_secret.read(folder)
        self._shared = folder.secret("service-token")  # webhooks' secrets follow from it; agents of old ask for it
        self._join = folder.secret("node-join-token")
        self._secrets_key = environment.get("WATTSHIFT_SECRETS_KEY") or folder.secret("secrets-key")
        self._redis_password: str | None = None

    def owns_redis(self, password: str) -> None:
        """Take the password of this installation's own Redis server, in which each process has its own user."""
        self._redis_password = password

    def credential(self, service: str) -> Credential:
        return Credential.derived(service, roots_of(self.roots))

    def credential_of(self, process: str) -> dict[str, str]:
        """Return the part of a service's or worker's environment that is derived from the root secrets."""
        return {"WATTSHIFT_SERVICE_CREDENTIAL": self.credential(OF_WORKERS.get(process, process)).text()}

    def of_process(self, process: str, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a service, or of a worker of it, made from the installation's."""
        service = OF_WORKERS.get(process, process)
        own = _without_secrets(environment) | self.credential_of(service)
        if service not in WITHOUT_DATABASE:
            own["DATABASE_URL"] = environment["DATABASE_URL"]
        if service in WITH_SECRETS_KEY:
            own["WATTSHIFT_SECRETS_KEY"] = self._secrets_key
        if service == "telemetry":
            own["WATTSHIFT_NODE_JOIN_TOKEN"] = self._join
        if service == "admission":
            own["WATTSHIFT_SERVICE_TOKEN"] = self._shared
        return own | self._redis(service, environment)

    def of_node(self, node_id: str, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a node's agent, which runs other people's programs, with a token to enrol with."""
        own = _without_secrets(environment) | {"GPU_AGENT_ENROLL_TOKEN": standing_token(self._join, node_id)}
        url = environment["REDIS_URL"]
        own["REDIS_URL"] = url if self._redis_password is None else redis_users.without_user(url)
        return own

    def _redis(self, service: str, environment: Mapping[str, str]) -> dict[str, str]:
        url = environment["REDIS_URL"]
        if self._redis_password is None:
            return {"REDIS_URL": url}
        if service not in redis_users.RULES:
            return {}
        return {"REDIS_URL": redis_users.with_user(url, service, redis_users.password(self._redis_password, service))}


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in SECRET_VARIABLES}
