"""Name others' images by what they are and not by tags that move: ``python3 deploy/pin_images.py`` at a release.

Each ``NAME:TAG`` in the files below becomes ``NAME:TAG@sha256:...``, the digest that its registry has for it now, of
all platforms; a digest that is there already is replaced. Docker asks the registries. ``--check`` asks nobody, changes
nothing, and exits 1 where one is not pinned.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("deploy/Dockerfile", "docker-compose.yml")
IMAGE = re.compile(r"(?P<before>_IMAGE(?::-|=))(?P<image>[a-z0-9][\w./-]*:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def main(words: Sequence[str]) -> int:
    """Pin the images, all of them or none; 1 where a registry does not say what one is, or one is not pinned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which are not pinned")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    options = parser.parse_args(words)
    texts = {path: path.read_text() for path in (options.root / name for name in FILES)}
    found = [match for text in texts.values() for match in IMAGE.finditer(text)]
    if options.check:
        moving = sorted({match["image"] for match in found if match["digest"] is None})
        print("\n".join(f"{image} is not pinned" for image in moving) or "all are pinned")
        return 1 if moving else 0
    digests: dict[str, str] = {}
    for image in sorted({match["image"] for match in found}):
        try:
            digests[image] = digest_of(image)
        except (OSError, ValueError) as error:
            print(f"nothing was changed: {image}: {error}", file=sys.stderr)
            return 1
    for path, text in texts.items():
        path.write_text(IMAGE.sub(lambda match: f"{match['before']}{match['image']}@{digests[match['image']]}", text))
    print("\n".join(f"{image}@{digest}" for image, digest in digests.items()))
    return 0


def digest_of(image: str) -> str:
    """Return the digest that the image's registry has for its tag.

    Raises:
        OSError: There is no Docker.
        ValueError: It, or the registry, does not say.
    """
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode != 0 or not DIGEST.fullmatch(asked.stdout.strip()):
        raise ValueError(((asked.stderr or asked.stdout).strip().splitlines() or ["no answer"])[-1])
    return asked.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
