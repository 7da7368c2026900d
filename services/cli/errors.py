"""How commands fail: exit codes, and the error that carries one."""

from services.contracts.codes import ProblemCode

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_REFUSED = 4
EXIT_UNAVAILABLE = 5
EXIT_DEGRADED = 6


class CliError(Exception):
    """A failure: one line for the user, lines to type below it, an exit code, and the problem's code if any."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED, code: ProblemCode | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.code = code
