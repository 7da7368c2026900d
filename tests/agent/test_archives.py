"""Unpacking what a stranger packed."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from gpu_agent import archives
from gpu_agent.archives import unpack
from gpu_agent.secrets import InputError
from wattshift.sources import Archive

MIB = 2**20


def packed(tmp_path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """Return an archive of these entries."""
    path = tmp_path / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def a_file(name: str, content: bytes = b"x", **fields: int) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, content


def a_link(
    name: str, target: str, kind: bytes = tarfile.SYMTYPE, *, nul: bool = False
) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    member.pax_headers = {"linkpath": "a\0b"} if nul else {}
    return member, b""


def special(name: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type = kind
    return member, b""


def test_what_the_client_packs_is_what_the_node_unpacks(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "train.py").write_text("print(1)")
    (source / "deep" / "er" / "ünïcode name").write_bytes(bytes(range(256)))
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "deep" / "link").symlink_to("../train.py")
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "x.pyc").touch()
    archive = tmp_path / "archive"
    with Archive(source) as made:
        archive.write_bytes(made._file.read())

    unpack(archive, tmp_path / "out", MIB)

    out = tmp_path / "out"
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    assert found == ["deep", "deep/er", "deep/er/ünïcode name", "deep/link", "run.sh", "train.py"]
    assert (out / "deep" / "link").read_text() == "print(1)"
    assert [(out / name).stat().st_mode & 0o7777 for name in ("run.sh", "train.py")] == [0o755, 0o644]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([a_file("../out-of-it")], "outside its folder"),
        ([a_file("/etc/out-of-it")], "outside its folder"),
        ([a_file("a/../../out-of-it")], "outside its folder"),
        ([a_link("out", "/etc")], "leads out of it"),
        ([a_link("out", "..")], "leads out of it"),
        ([a_link("a/out", "../../..")], "leads out of it"),
        ([a_link("a/b", "c/d"), a_link("a/c", "."), a_link("e", "a/c/../..")], "leads out of it"),
        ([a_link("dir", "."), a_file("dir/file")], "two entries dir"),
        ([a_file("dir"), a_file("dir/file")], "which is no folder"),
        ([a_file("twice"), a_file("twice")], "two entries twice"),
        ([a_file("f"), a_link("hard", "f", tarfile.LNKTYPE)], "no file, folder or link"),
        ([special("device", tarfile.CHRTYPE)], "no file, folder or link"),
        ([special("fifo", tarfile.FIFOTYPE)], "no file, folder or link"),
        ([a_file(".")], "an entry without a name"),
        ([a_link("", "a")], "an entry without a name"),
        ([a_link(f"l{n}", f"l{n + 1}") for n in range(2_000)], "cannot be read"),
        ([a_link("a", "b", nul=True)], "cannot be read"),
        ([a_file("large", bytes(5 * MIB))], "more than 2 MiB unpacked"),
        ([a_file(f"f{n}", bytes(MIB)) for n in range(5)], "more than 2 MiB unpacked"),
    ],
)
def test_what_must_not_be_is_refused_and_nothing_lands_outside(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], message: str
) -> None:
    archive = packed(tmp_path, *members)
    with pytest.raises(InputError, match=message):
        unpack(archive, tmp_path / "in" if (tmp_path / "in").mkdir() else tmp_path / "in" / "out", 2 * MIB)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar.gz", "in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["out"]


def test_modes_that_give_rights_are_not_kept(tmp_path: Path) -> None:
    unpack(packed(tmp_path, a_file("setuid", mode=0o6777)), tmp_path / "out", MIB)
    assert (tmp_path / "out" / "setuid").stat().st_mode & 0o7777 == 0o755


def test_a_header_of_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    member = tarfile.TarInfo("././@PaxHeader")
    member.type, member.size = tarfile.XHDTYPE, 2**31
    path = tmp_path / "archive"
    path.write_bytes(gzip.compress(member.tobuf(tarfile.USTAR_FORMAT) + bytes(MIB)))
    with pytest.raises(InputError, match="cannot be read"):
        unpack(path, tmp_path / "out", 2**40)


@pytest.mark.parametrize("kept", [2.0, 0.5, 0.1])
def test_a_broken_archive_is_refused(tmp_path: Path, kept: float) -> None:
    path = packed(tmp_path, a_file("f", bytes(range(256)) * 50))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)] if kept < 1 else b"no archive")
    with pytest.raises(InputError, match="cannot be read"):
        unpack(path, tmp_path / "out", MIB)


def test_the_number_of_entries_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_ENTRIES", 2)
    with pytest.raises(InputError, match="more than 2 entries"):
        unpack(packed(tmp_path, a_file("a"), a_file("b"), a_file("c")), tmp_path / "out", MIB)
