"""The secret that credentials follow from, replaced step by step, and killed at each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kit import files
from services.standalone import root_secret
from services.standalone.data_folder import DataFolder
from services.standalone.process import BadInputError
from tests.support.servers import scratch_folder


class Killed(BaseException):
    """What ends a command in the middle."""


@pytest.fixture
def folder() -> Iterator[DataFolder]:
    with scratch_folder() as path:
        found = DataFolder(path)
        found.make()
        assert root_secret.read(found) == found.secret("service-root")
        yield found


def roots(folder: DataFolder) -> list[str]:
    return root_secret.read(folder).split(",")


def test_a_new_secret_signs_and_the_old_one_is_accepted_until_it_is_dropped(folder: DataFolder) -> None:
    (old,) = roots(folder)
    root_secret.rotate(folder)
    new, *accepted = roots(folder)
    with pytest.raises(BadInputError, match="the old secret is still accepted"):
        root_secret.rotate(folder)
    assert (accepted, roots(folder)) == ([old], [new, old])

    root_secret.finish(folder)
    with pytest.raises(BadInputError, match="nothing to finish"):
        root_secret.finish(folder)
    assert roots(folder) == [new]
    assert len(new) >= 32
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder.path / "secrets").iterdir())


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", range(3))
def test_what_was_killed_in_the_middle_goes_on(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch, step: int, after: bool
) -> None:
    (old,) = roots(folder)
    with monkeypatch.context() as patched:
        steps = iter(range(9))
        for owner, name in ((files, "replace"), (Path, "unlink")):
            original = getattr(owner, name)

            def stopped(*given, original=original, **options) -> None:
                is_now = next(steps) == step
                if is_now and not after:
                    raise Killed
                original(*given, **options)
                if is_now:
                    raise Killed

            patched.setattr(owner, name, stopped)
        with pytest.raises(Killed):
            root_secret.rotate(folder)
    begun = roots(folder)
    assert old in begun, "it is accepted, whatever happened"
    if (step, after) == (2, True):
        with pytest.raises(BadInputError, match="the old secret is still accepted"):
            root_secret.rotate(folder)
    else:
        if begun != [old]:
            with pytest.raises(BadInputError, match="does not sign yet"):
                root_secret.finish(folder)
        root_secret.rotate(folder)
    new, *others = roots(folder)

    assert others == [old]
    assert begun == [old] or set(begun) == {new, old}, "one new secret is made, and no other"


def test_two_commands_at_once(folder: DataFolder) -> None:
    with root_secret._alone(folder), pytest.raises(BadInputError, match="by another command"):
        root_secret.rotate(folder)
    with pytest.raises(BadInputError, match="is not a data folder"):
        root_secret.rotate(DataFolder(folder.path / "nothing"))
    assert len(roots(folder)) == 1
