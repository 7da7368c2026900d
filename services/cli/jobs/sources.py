"""Files of jobs that travel with the submission: ``--upload``, ``--git``, and ``source`` in a file of specs."""

import re
from pathlib import Path
from typing import Any

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, CliError
from services.contracts.jobs import JobSpec
from services.core.domain.counted import counted
from services.kit.references import named_upload
from wattshift.errors import WattshiftError
from wattshift.sources import Archive, SourceError, git_source

_SHA256 = re.compile("[0-9a-f]{64}")
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


class LocalSources:
    """The sources of one command's jobs: folders are packed, and branches and tags are resolved to commits."""

    def __init__(self) -> None:
        self._archives: dict[Path, Archive] = {}

    def of_options(self, upload: Path | None, git: str | None, secret: str | None) -> dict[str, Any] | None:
        """Return the source that options name, if any; ``CliError`` if it cannot be packed or found."""
        if upload is not None and git is not None:
            raise CliError("--upload and --git: give one of them", EXIT_USAGE)
        if secret is not None and git is None:
            raise CliError("--git-secret goes with --git", EXIT_USAGE)
        if upload is not None:
            return {"upload": self._packed(upload, "--upload")}
        return None if git is None else self._resolved(git, secret, "--git")

    def of_document(self, source: Any, folder: Path) -> Any:
        """Return the source of a spec in a file, whose folders are relative to it; ``CliError`` as ``of_options``."""
        if not isinstance(source, dict):
            return source
        upload, git = source.get("upload"), source.get("git")
        if isinstance(upload, str) and not _SHA256.fullmatch(upload):
            return {**source, "upload": self._packed(folder / upload, "source.upload")}
        if isinstance(git, dict) and isinstance(git.get("url"), str):
            revision = git.get("revision", "HEAD")
            if isinstance(revision, str) and not _COMMIT.fullmatch(revision):
                found = self._resolved(f"{git['url']}@{revision}", None, "source.git")
                return {**source, "git": {**git, "revision": found["git"]["revision"]}}
        return source

    def send(self, gateway: Gateway) -> None:
        """Upload the archives that the control plane lacks; ``CliError`` if it does not accept one."""
        for archive in self._archives.values():
            gateway.send(archive)

    def as_if_sent(self, spec: JobSpec) -> JobSpec:
        """Return a spec to test as if its archive were already uploaded, which a submission would do first.

        When and where a job starts does not depend on its files.
        """
        if named_upload(spec) in {archive.sha256 for archive in self._archives.values()}:
            return spec.model_copy(update={"source": None, "working_dir": None})
        return spec

    def _packed(self, folder: Path, what: str) -> str:
        if folder not in self._archives:
            try:
                archive = self._archives[folder] = Archive(folder)
            except SourceError as error:
                raise CliError(f"{what}: {error}", EXIT_USAGE) from None
            size = f"{archive.size_bytes / 2**20:.1f} MiB" if archive.size_bytes > 2**20 else f"{archive.size_bytes} B"
            output.say(f"{counted(len(archive.entries), 'file')} of {folder.absolute()}, {size} compressed")
            for name in archive.skipped:
                output.say(f"wattshift: {name} is a repository of its own, and left out")
        return self._archives[folder].sha256

    def _resolved(self, text: str, secret: str | None, what: str) -> dict[str, Any]:
        try:
            source = git_source(text, secret)
        except WattshiftError as error:
            raise CliError(f"{what}: {error}", EXIT_USAGE) from None
        output.say(f"{source['git']['url']} at commit {source['git']['revision']}")
        return source
