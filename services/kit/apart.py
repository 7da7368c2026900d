"""Call functions in a separate process that ends afterwards, so that what they load, such as scikit-learn, is freed."""

import asyncio
import os
import pickle
import struct
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, BinaryIO, ParamSpec, Self, TypeVar, cast

from services.kit.logging import configure_logging

_P = ParamSpec("_P")
_R = TypeVar("_R")
_LENGTH = struct.Struct("!Q")


class Apart:
    """A process that is started by the first call; an async context manager that ends it on exit."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()  # it has answered, or nobody waits for its answer any more
            await self._process.wait()

    async def call(self, function: Callable[_P, _R], *given: _P.args, **options: _P.kwargs) -> _R:
        """Return or raise what a module-level function does; ``ChildProcessError`` if its process has died."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", __name__), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        asked, answers = self._process.stdin, self._process.stdout
        assert asked
        assert answers
        try:
            asked.write(_framed((function, given, options)))
            await asked.drain()
            (length,) = _LENGTH.unpack(await answers.readexactly(_LENGTH.size))
            is_result, found = pickle.loads(await answers.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildProcessError(f"the process of {function.__name__} has ended") from error
        if not is_result:
            raise found
        return cast("_R", found)


def _framed(what: Any) -> bytes:
    data = pickle.dumps(what)
    return _LENGTH.pack(len(data)) + data


def _answer(asked: BinaryIO, answers: BinaryIO) -> None:
    while head := asked.read(_LENGTH.size):
        function, given, options = pickle.loads(asked.read(*_LENGTH.unpack(head)))
        try:
            answer = _framed((True, function(*given, **options)))
        except Exception as error:
            answer = _framed((False, error))
        answers.write(answer)
        answers.flush()


def main() -> None:
    """Read calls from standard input and write answers to standard output; anything printed goes to standard error."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        log_format, level = (os.environ.get(f"WATTSHIFT_LOG_{name}") for name in ("FORMAT", "LEVEL"))
        configure_logging("apart", log_format=log_format or "text", level=level or "INFO")
        _answer(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
