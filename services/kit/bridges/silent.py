"""The error that everything which asks or reads an engine raises."""


class EngineSilentError(Exception):
    """The engine does not answer, or not as expected; the message says how."""
