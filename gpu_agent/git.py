"""Fetch one commit of a git repository, as the user that the job runs as, and confined like the job.

What git does is up to the job's owner: it depends on the server that it talks to and on files of the account that it
and ``ssh`` read, such as ``~/.ssh/config``, which can name programs to run.
"""

import asyncio
import base64
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from gpu_agent import enclosure, files, shim
from gpu_agent.account import Account, shim_user
from gpu_agent.environment import passed_environment
from gpu_agent.processes import run
from gpu_agent.secrets import CannotStartError, InputError, memory_folder
from gpu_agent.settings import AgentSettings
from services.contracts.sources import GitSource

_LONGEST_MESSAGE = 400


async def fetch_commit(
    source: GitSource,
    credential: str | None,
    into: Path,
    settings: AgentSettings,
    account: Account | None = None,
    confinement: Sequence[tuple[str, str]] = (),
) -> None:
    """Make a folder with the files of a commit, without its history where the server allows that.

    Neither submodules nor Git LFS files are fetched.

    Args:
        credential: A token, ``USER:TOKEN`` or a private key for SSH.
        account: Who runs git and owns the files; None for this process's user.
        confinement: What confines the job's processes, and so git, as entries of its shim's spec.

    Raises:
        CannotStartError: It is on a node's own disk, which this site does not allow.
        InputError: It cannot be fetched; the message has git's own words, without the credential.
    """
    if source.url.startswith("file:") and not settings.git_local:
        raise CannotStartError("This site does not allow repositories on a node's own disk (GPU_AGENT_GIT_LOCAL).")
    into.mkdir(mode=0o700)
    if account is not None:
        account.own(into)
    try:
        with _access(source, credential, into, account, local=settings.git_local) as (environment, key):
            shown = [("confine", f"show {key}")] if key else []
            entries = shim.spec_bytes([*confinement, *shown, *shim_user(account)])
            allowed = ["https", "ssh", *(["file"] if settings.git_local else [])]
            options = {"protocol.allow": "never", **{f"protocol.{name}.allow": "always" for name in allowed}}
            options |= {"core.hooksPath": os.devnull, "fetch.recurseSubmodules": "false"}
            given = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
            words = [*enclosure.command(str(into)), "git", *given]
            async with asyncio.timeout(settings.git_timeout_s):
                await _git([*words, "init", "-q", "--template="], environment, entries)
                fetch = [*words, "fetch", "-q"]
                try:
                    shallow = [*fetch, "--no-tags", "--depth=1", "--", source.url, source.revision]
                    await _git(shallow, environment, entries)
                except _GitError:  # a server that gives only what its branches and tags name
                    references = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
                    await _git([*fetch, "--", source.url, *references], environment, entries)
                await _git([*words, "checkout", "-q", "--detach", source.revision, "--"], environment, entries)
    except TimeoutError:
        raise InputError(f"{source.url} was not fetched within {settings.git_timeout_s:g} s.") from None
    except _GitError as error:
        words = str(error).replace(credential, "***") if credential else str(error)
        raise InputError(f"{source.url} at {source.revision[:12]} cannot be fetched: {words}") from None


def remove_keys(allocations: Path) -> None:
    """Remove the keys that a killed agent left in memory for ``allocations``, its ranks' folder; nothing is fetched."""
    for path in memory_folder(allocations).glob(f"{_key_prefix(allocations)}*"):
        path.unlink(missing_ok=True)


def _key_prefix(allocations: Path) -> str:
    return f"git-key-{hashlib.sha256(os.fsencode(allocations.absolute())).hexdigest()[:16]}-"


class _GitError(Exception):
    """git failed; the message is its last line."""


async def _git(words: Sequence[str], environment: Mapping[str, str], entries: bytes) -> None:
    if shutil.which("git", path=environment.get("PATH")) is None:
        raise InputError("This node has no git.")
    code, said = await run(words, entries, cwd="/", env=environment)
    if code:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        fatal = [line.partition(":")[2].strip() for line in lines if line.startswith(("fatal:", "error:"))]
        raise _GitError((fatal or lines or [f"git exited with {code}"])[0][:_LONGEST_MESSAGE])


@contextmanager
def _access(
    source: GitSource, credential: str | None, into: Path, account: Account | None, *, local: bool
) -> Iterator[tuple[dict[str, str], Path | None]]:
    """Yield git's environment, and its key if that is a file: git prompts nobody; the credential is for this server."""
    login = account.environment if account else {}
    environment = passed_environment((), os.environ | login) | {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_GLOBAL": os.devnull,  # the account's own, which earlier jobs may have written
        "GIT_LFS_SKIP_SMUDGE": "1",
        "LC_ALL": "C",
    }
    if local:  # repositories on the node's disk belong to others than the job's account
        settings = into.with_name("gitconfig")
        files.replace(settings, b"[safe]\n\tdirectory = *\n", durable=False, mode=0o644)
        environment["GIT_CONFIG_GLOBAL"] = str(settings)
    ssh = "ssh -o BatchMode=yes -o ConnectTimeout=15"
    key: Path | None = None
    try:
        if credential is not None and source.url.startswith("https:"):
            pair = credential.strip() if ":" in credential else f"x-access-token:{credential.strip()}"
            environment |= {
                "GIT_CONFIG_COUNT": "2",
                "GIT_CONFIG_KEY_0": f"http.https://{urlsplit(source.url).netloc}/.extraHeader",
                "GIT_CONFIG_VALUE_0": f"Authorization: Basic {base64.b64encode(pair.encode()).decode()}",
                "GIT_CONFIG_KEY_1": "http.followRedirects",  # the header would go along
                "GIT_CONFIG_VALUE_1": "false",
            }
        elif credential is not None:
            folder = memory_folder(into.parent)
            os.close(shim.open_own_folder(str(folder)))
            descriptor, name = tempfile.mkstemp(prefix=_key_prefix(into.parent.parent), dir=folder)
            key = Path(name)
            with os.fdopen(descriptor, "w") as file:
                file.write(credential if credential.endswith("\n") else credential + "\n")
            if account is not None:
                account.own(key)
            ssh += f" -o IdentitiesOnly=yes -i '{key}'"
        yield environment | {"GIT_SSH_COMMAND": ssh}, key
    finally:
        if key is not None:
            key.unlink(missing_ok=True)
