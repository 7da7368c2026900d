"""Packing a job's files, and finding the commit of a branch or tag."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from wattshift import sources
from wattshift.sources import Archive, SourceError, git_source, split_revision


def run_git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A work tree with a file that git has, one that it does not know yet, and one that it ignores."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    run_git(tree, "init", "-q")
    (tree / ".gitignore").write_text("*.bin\n")
    for name in ("known.py", "new.py", "data.bin", "deleted.py", "sub/x.py"):
        (tree / name).write_text(name)
    run_git(tree, "add", ".gitignore", "known.py", "deleted.py", "sub")
    run_git(tree, "commit", "-q", "-m", "first")
    (tree / "deleted.py").unlink()
    return tree


def names(archive: Archive) -> list[str]:
    return [entry.name for entry in archive.entries]


def test_what_git_ignores_is_left_out_and_what_is_new_is_not(tree: Path) -> None:
    with Archive(tree) as whole, Archive(tree / "sub") as part:
        assert names(whole) == [".gitignore", "known.py", "new.py", "sub/x.py"]
        assert names(part) == ["x.py"]


def test_a_repository_within_is_named_and_left_out(tree: Path) -> None:
    inner = tree / "inner"
    inner.mkdir()
    run_git(inner, "init", "-q")
    (inner / "file").touch()
    run_git(inner, "add", "file")
    run_git(inner, "commit", "-q", "-m", "x")
    with Archive(tree) as archive:
        assert archive.skipped == ["inner"]
        assert "inner/file" not in names(archive)


def test_without_git_caches_and_environments_are_left_out(tmp_path: Path) -> None:
    for name in ("train.py", "__pycache__/x.pyc", ".venv/bin/python", "src/a.py", "src/__pycache__/a.pyc", ".env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "latest").symlink_to("src")
    with Archive(tmp_path) as archive:
        assert names(archive) == [".env", "latest", "src/a.py", "train.py"]


def test_equal_files_make_an_equal_archive(tmp_path: Path) -> None:
    hashes = set[str]()
    for place, time in (("a", 1_000_000_000), ("b", 1_700_000_000)):
        (tmp_path / place).mkdir()
        for name in sorted(("x.py", "y.py"), reverse=place == "b"):
            (tmp_path / place / name).write_text(name)
            os.utime(tmp_path / place / name, (time, time))
        with Archive(tmp_path / place) as archive:
            hashes.add(archive.sha256)
    assert len(hashes) == 1
    (tmp_path / "a" / "x.py").chmod(0o755)
    with Archive(tmp_path / "a") as archive:
        assert archive.sha256 not in hashes


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside"])
def test_a_link_that_leads_out_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(SourceError, match="link is a link that leads out"):
        Archive(tmp_path)


def test_an_empty_or_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no files"):
        Archive(tmp_path)
    with pytest.raises(SourceError, match="is not a folder"):
        Archive(tmp_path / "none")


def test_a_folder_that_is_too_large_names_its_biggest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_BYTES", 1_000)
    (tmp_path / "model.pt").write_bytes(os.urandom(3 * 2**20))
    (tmp_path / "a.py").touch()
    with pytest.raises(SourceError, match=r"model\.pt \(3\.0 MiB\), a\.py .*\.gitignore"):
        Archive(tmp_path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("https://example.org/team/repo.git", ("https://example.org/team/repo.git", "HEAD")),
        ("https://example.org/team/repo@feature/x", ("https://example.org/team/repo", "feature/x")),
        ("git@example.org:team/repo.git@v1.2", ("git@example.org:team/repo.git", "v1.2")),
        ("ssh://git@example.org:2222/repo@main", ("ssh://git@example.org:2222/repo", "main")),
        ("file:///srv/repo@main", ("file:///srv/repo", "main")),
    ],
)
def test_a_revision_follows_the_last_at(text: str, parts: tuple[str, str]) -> None:
    assert split_revision(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "https://me:hunter2@example.org/r@main",
        "ext::sh -c 'touch x'",
        "--upload-pack=touch",
        "/srv/repo",
        "http://example.org/r",
        "https://example.org/r@--output=x",
        "git@example.org:-x",
    ],
)
def test_what_is_no_address_of_a_repository_is_refused(text: str) -> None:
    with pytest.raises(SourceError) as raised:
        split_revision(text)
    assert "hunter2" not in str(raised.value)


def test_branches_and_tags_become_commits(tree: Path) -> None:
    commit = run_git(tree, "rev-parse", "HEAD")
    run_git(tree, "tag", "-a", "v1", "-m", "annotated")
    run_git(tree, "branch", "feature/x")
    url = f"file://{tree}"
    for revision in ("", "@main", "@v1", "@feature/x", "@refs/heads/main", f"@{commit}"):
        assert git_source(url + revision) == {"git": {"url": url, "revision": commit}}
    assert git_source(f"{url}@main", "KEY")["git"]["secret"] == "KEY"


def test_a_revision_that_is_not_there_and_a_repository_that_is_not(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no branch or tag nowhere; a commit is given by its whole id"):
        git_source(f"file://{tree}@nowhere")
    with pytest.raises(SourceError, match=r"cannot be reached from here .*; give a whole commit id"):
        git_source(f"file://{tmp_path}/none@main")
