"""Images of others are pinned by the digests that their registries have, all of them or none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deploy import pin_images
from tests.support.servers import ROOT

DOCKER = """#!/bin/sh
[ "$1 $2 $3" = "buildx imagetools inspect" ] || exit 2
case $4 in $UNKNOWN) echo "ERROR: $4: not found" >&2; exit 1;; esac
printf 'sha256:%s\\n' "$(printf '%s' "$4$RELEASE" | sha256sum | cut -c1-64)"
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the files that name images, and a Docker that knows a digest for each."""
    for name in pin_images.FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("RELEASE", "1")
    monkeypatch.setenv("UNKNOWN", "none")
    return tmp_path


def texts(checkout: Path) -> list[str]:
    return [(checkout / name).read_text() for name in pin_images.FILES]


def test_every_image_of_others_is_pinned_and_pinned_anew(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--root", str(checkout)]
    assert pin_images.main([*words, "--check"]) == 1
    before = texts(checkout)

    assert pin_images.main(words) == 0

    pinned = texts(checkout)
    assert pin_images.main([*words, "--check"]) == 0
    for name, old, new in zip(pin_images.FILES, before, pinned, strict=True):
        assert old != new, name
        assert pin_images.DIGEST.sub("", new).replace("@", "") == pin_images.DIGEST.sub("", old).replace("@", "")
    monkeypatch.setenv("RELEASE", "2")
    assert pin_images.main(words) == 0
    assert [text.count("sha256:") for text in texts(checkout)] == [text.count("sha256:") for text in pinned]
    assert texts(checkout) != pinned


@pytest.mark.parametrize("unknown", ["postgres*", "python*"])
def test_one_that_is_not_to_be_had_changes_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unknown: str
) -> None:
    monkeypatch.setenv("UNKNOWN", unknown)
    before = texts(checkout)

    assert pin_images.main(["--root", str(checkout)]) == 1

    assert "not found" in capsys.readouterr().err
    assert texts(checkout) == before


def test_no_image_of_others_is_left_out() -> None:
    """All that are named anywhere in the files are found; our own have the tag of the release."""
    compose, dockerfile = ((ROOT / name).read_text() for name in ("docker-compose.yml", "deploy/Dockerfile"))
    named = [line.split("image:", 1)[1].strip() for line in compose.splitlines() if line.strip().startswith("image:")]
    others = [each for each in named if not each.startswith("wattshift")]
    assert len(pin_images.IMAGE.findall(compose)) == len(others) == 2
    bases = {line.split()[1] for line in dockerfile.splitlines() if line.startswith("FROM ")}
    assert bases == {"${PYTHON_IMAGE}"}
    assert len(pin_images.IMAGE.findall(dockerfile)) == 1
