"""The version number of this release, which the packaging reads from here."""

RELEASE = "0.1.0"
