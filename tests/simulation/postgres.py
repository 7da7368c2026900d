"""A real PostgreSQL on virtual time: sessions of the programs under simulation, asked in turn by the loop.

What asyncpg writes to a connection goes to a server of this machine in one step of the loop, which reads the answer in
the same step; the answer arrives in a later one. A statement that waits for another's lock suspends its connection
alone: it is looked after whenever a transaction has ended. Nothing is ever under way in the server that the loop does
not wait for, so that a run repeats.

A schema before ``pg_catalog`` has the functions that tell the time, which read what the loop says before each exchange.
Each run has a database of its own, a copy of one that was migrated. Its sessions outlive connections: what begins a
connection is answered here, and its end discards what the session has kept.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextvars
import copy
import functools
import hashlib
import hmac
import itertools
import re
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.simulation.loop import EPOCH_S, Clock, Process, Simulation
from tests.support.servers import fresh_database, postgres_server

SOCKET = "/simulated/.s.PGSQL.5432"
URL = "postgresql://simulated@/simulated?host=/simulated"
"""What programs under simulation take for the address of their database."""
LOOK_S = 0.005
"""An answer that takes longer is asked after: its statement may wait for a lock."""
HANGS_S = 60.0
"""Of real time: a server that neither answers nor waits for so long is at fault."""
SILENT_S = 40.0
"""An answer that is very late comes after every time limit of a statement."""

_STARTUP, _CANCEL = 196_608, 80_877_102
_PREPARE = """
CREATE SCHEMA simulated;
CREATE FUNCTION simulated.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    AS 'SELECT current_setting(''simulated.clock'')::timestamptz';
CREATE FUNCTION simulated.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    AS 'SELECT current_setting(''simulated.clock'')::timestamptz';
CREATE FUNCTION simulated.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    AS 'SELECT current_setting(''simulated.began'')::timestamptz';
CREATE FUNCTION simulated.transaction_timestamp() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    AS 'SELECT current_setting(''simulated.began'')::timestamptz';
CREATE FUNCTION simulated.timeofday() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    AS 'SELECT current_setting(''simulated.clock'')';
DO $$
DECLARE
    found record;
    clocks CONSTANT text := '(pg_catalog\\.)?\\m(now|clock_timestamp|statement_timestamp|transaction_timestamp)\\(\\)';
BEGIN
    FOR found IN SELECT d.adrelid::regclass AS name, a.attname, pg_get_expr(d.adbin, d.adrelid) AS expression
                   FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
                  WHERE pg_get_expr(d.adbin, d.adrelid) ~ clocks
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT %s', found.name, found.attname,
                       regexp_replace(found.expression, clocks, 'simulated.\\2()', 'g'));
    END LOOP;
    FOR found IN SELECT c.oid::regclass AS name, pg_get_viewdef(c.oid) AS expression FROM pg_class c
                  WHERE c.relkind = 'v' AND c.relnamespace = 'public'::regnamespace AND pg_get_viewdef(c.oid) ~ clocks
    LOOP
        EXECUTE format('CREATE OR REPLACE VIEW %s AS %s', found.name,
                       regexp_replace(found.expression, clocks, 'simulated.\\2()', 'g'));
    END LOOP;
    FOR found IN SELECT c.oid::regclass AS name FROM pg_class c
                  WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
    LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', found.name);
    END LOOP;
END $$;
"""
_SESSION = {
    "search_path": "simulated, pg_catalog, public",
    "deadlock_timeout": "1ms",  # whoever closes a circle learns it at once
    "timezone": "UTC",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    "synchronous_commit": "off",
}
_WRITES = re.compile(rb"\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|TRUNCATE|MERGE\s+INTO)\s+(\w+)", re.IGNORECASE)
_UNCHANGED = frozenset({"BEGIN", "ROLLBACK", "SET", "UPDATE 0", "DELETE 0", "INSERT 0 0"})
_NOT_SET = frozenset({"user", "database", "lock_timeout", "search_path", "client_encoding"})


class SessionLostError(Exception):
    """The server has ended a session by itself."""


class Session:
    """A session of the server, asked one thing at a time.

    Attributes:
        pid: Of its process in the server.
        greeting: What the server has said at its beginning, for whoever takes the session over.
        status: Of its transaction: ``I`` none, ``T`` open, ``E`` failed.
        tags: What the commands of the last exchange said that they have done.
    """

    def __init__(self, url: str, database: str) -> None:
        """Begin a session with a database of the server at ``url``."""
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=HANGS_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._got = bytearray()
        self._at = self._from = 0
        self._wanted, self._skipped = 0, 0
        self._is_flushed = self._is_whole = False
        self._writing: dict[bytes, frozenset[str]] = {}
        self._written: set[str] = set()
        self.pid, self.greeting, self.status = 0, b"", "I"
        self.tags: list[str] = []
        self._authenticate(parts.username or "", parts.password or "", database)

    def send(self, data: bytes, prefix: str) -> None:
        """Send what a client wrote, after statements of the loop's own whose answer nobody sees."""
        self.tags = []
        self._wanted, last = 0, b""
        for kind, body in _messages(data):
            self._wanted += kind in (b"S", b"Q")
            last = kind
            self._note(kind, body)
        self._is_flushed = last == b"H"
        self._skipped = 0
        if prefix:
            data = _message(b"Q", prefix.encode() + b"\0") + data
            self._wanted += 1
            self._skipped = 1
        self._is_whole = False
        self._socket.sendall(data)

    def _note(self, kind: bytes, body: bytes) -> None:
        """Note what tables may be changed by what is carried out; a ``WITH`` may that says it has selected."""
        if kind == b"P":
            name, sql, _ = body.split(b"\0", 2)
            self._writing[name] = _tables(sql)
        elif kind == b"B":
            self._written |= self._writing.get(body.split(b"\0", 2)[1], frozenset())
        elif kind == b"Q":
            self._written |= _tables(body)

    def changed(self) -> frozenset[str]:
        """Return the tables that the transaction which has just ended may have changed."""
        written, self._written = frozenset(self._written), set()
        return written if any(tag not in _UNCHANGED for tag in self.tags) else frozenset()

    def has_answered(self, within_s: float) -> bool:
        """Return whether the whole answer is here.

        Raises:
            SessionLostError: It ended instead.
        """
        while not self._look():
            if not self._poll.poll(within_s * 1e3):
                return False
            try:
                found = self._socket.recv(1 << 18)
            except ConnectionError as error:
                raise SessionLostError(str(error)) from error
            if not found:
                raise SessionLostError(bytes(self._got[self._from :]).decode(errors="replace"))
            self._got += found
        return True

    def answer(self) -> bytes:
        """Return the answer, once it is whole."""
        found = bytes(self._got[self._from : self._at])
        del self._got[: self._at]
        self._at = self._from = 0
        return found

    def query(self, sql: str) -> list[tuple[str | None, ...]]:
        """Return the rows of statements of the loop's own, as text.

        Raises:
            RuntimeError: They fail.
        """
        self.send(_message(b"Q", sql.encode() + b"\0"), "")
        if not self.has_answered(HANGS_S):
            raise RuntimeError(f"no answer: {sql}")
        rows: list[tuple[str | None, ...]] = []
        for kind, body in _messages(self.answer()):
            if kind == b"E":
                raise RuntimeError(f"{body!r}: {sql}")
            if kind == b"D":
                rows.append(_row(body))
        return rows

    def close(self) -> None:
        """End it."""
        self._socket.close()

    def _look(self) -> bool:
        """Read on in what came; return whether it is the whole answer."""
        while not self._is_whole and len(self._got) - self._at >= 5:
            length = 1 + int.from_bytes(self._got[self._at + 1 : self._at + 5], "big")
            if len(self._got) - self._at < length:
                break
            kind = self._got[self._at : self._at + 1]
            body = self._got[self._at + 5 : self._at + length]
            self._at += length
            if kind == b"Z":
                self.status = chr(body[0])
                self._wanted -= 1
                if self._skipped:
                    self._skipped, self._from, self.tags = 0, self._at, []
                self._is_whole = not self._wanted and not self._is_flushed
            elif kind == b"C":
                self.tags.append(body[:-1].decode())
            elif not self._wanted and kind in (b"T", b"n", b"E"):
                self._is_whole = True
        return self._is_whole

    def _authenticate(self, user: str, password: str, database: str) -> None:
        words = {"user": user, "database": database, **_SESSION}
        body = b"".join(f"{name}\0{value}\0".encode() for name, value in words.items()) + b"\0"
        self._socket.sendall(struct.pack("!ii", len(body) + 8, _STARTUP) + body)
        first, nonce = b"", base64.b64encode(b"simulated-client").decode()
        greeting: list[bytes] = []
        while True:
            kind, body = self._receive()
            if kind == b"E":
                raise SessionLostError(body.decode(errors="replace"))
            if kind == b"Z":
                break
            if kind != b"R":
                greeting.append(_message(kind, body))
                if kind == b"K":
                    self.pid = struct.unpack("!i", body[:4])[0]
                continue
            (step,) = struct.unpack("!i", body[:4])
            if step == 10:
                first = f"n=,r={nonce}".encode()
                said = b"n,," + first
                self._socket.sendall(_message(b"p", b"SCRAM-SHA-256\0" + struct.pack("!i", len(said)) + said))
            elif step == 11:
                self._socket.sendall(_message(b"p", _proof(password, first, body[4:])))
            elif step not in (0, 12):
                raise SessionLostError(f"the server wants an authentication of kind {step}")
        self.greeting = b"".join(greeting)

    def _receive(self) -> tuple[bytes, bytes]:
        head = self._exactly(5)
        return head[:1], self._exactly(int.from_bytes(head[1:], "big") - 4)

    def _exactly(self, length: int) -> bytes:
        found = b""
        while len(found) < length:
            more = self._socket.recv(length - len(found))
            if not more:
                raise SessionLostError("the server has ended the session as it began")
            found += more
        return found


class Server:
    """The server, and the database of which each run gets a copy."""

    def __init__(self, url: str) -> None:
        """Take the address of any database of it, as whoever may do everything there."""
        self.url = url
        migrated = urlsplit(fresh_database(url)).path[1:]
        preparing = Session(url, migrated)
        preparing.query("SET search_path = public")
        preparing.query(_PREPARE)
        preparing.close()
        self._template = migrated
        self._own = Session(url, urlsplit(url).path[1:])
        for setting in ("fsync", "full_page_writes"):  # a checkpoint belongs to each copy, and is thrown away with it
            self._own.query(f"ALTER SYSTEM SET {setting} = off")
        self._own.query("SELECT pg_reload_conf()")
        self._numbers = itertools.count(1)

    def again(self) -> Server:
        """Return the same for a process that was forked, which may not share what was connected before."""
        other = copy.copy(self)
        other._own = Session(self.url, urlsplit(self.url).path[1:])
        return other

    def copy(self) -> str:
        """Return the name of a new database."""
        name = f"run_{self._own.pid}_{next(self._numbers)}"
        self._own.query(f"CREATE DATABASE {name} TEMPLATE {self._template} STRATEGY file_copy")
        return name

    def drop(self, name: str) -> None:
        """Remove it."""
        self._own.query(f"DROP DATABASE {name} WITH (FORCE)")


class Losses(NamedTuple):
    """How often connections fail.

    Attributes:
        refused: Of those that are begun.
        statement: Lost at an exchange, before it took effect or after.
        commit: Lost at the end of a transaction, likewise.
        late: Answers that come after every time limit.
    """

    refused: float = 0.0
    statement: float = 0.0
    commit: float = 0.0
    late: float = 0.0


NO_LOSSES = Losses()


class SimulatedPostgres:
    """The database of one run.

    Attributes:
        clock: Of its host.
        losses: How often connections fail while the run is not calm.
        late: How often a statement, or its answer, takes a while.
        on_commit: Called after each transaction that may have changed something, with the tables that it wrote to.
        changes: How many there were.
        most: How many connections of one name a process ever had at once.
    """

    def __init__(self, simulation: Simulation, server: Server) -> None:
        self._simulation, self._server = simulation, server
        self.most = Counter[str]()
        self._name = server.copy()
        self._free: list[Session] = []
        self._links: list[_Link] = []
        self._waiting: list[_Link] = []
        self._all: list[_Link] = []
        self._own = Session(server.url, self._name)
        self._own.query("SET lock_timeout = '1s'")  # who holds a lock goes on only when the run does
        self._context = contextvars.Context()
        self.clock = Clock()
        self.losses = NO_LOSSES
        self.late = 0.03
        self.on_commit: Callable[[frozenset[str]], None] | None = None
        self.changes = 0
        simulation.loop.sockets[SOCKET] = self._connect

    def close(self) -> None:
        """End every session, and remove the database."""
        self._simulation.loop.sockets.clear()
        for link in self._all:
            link.forget()
        for session in (*self._free, *(link.session for link in self._links if link.session), self._own):
            session.close()
        self._server.drop(self._name)

    def trouble(self, levels: int) -> None:
        """Draw how late answers are, and how often connections and answers are lost."""
        draw = self._simulation.choices.below
        self.late, level = (0.03, 0.3)[draw(2)], draw(levels)
        self.losses = Losses(*(rate * level for rate in (0.01, 0.002, 0.01, 0.001)))

    def died(self, process: Process) -> None:
        """Have the connections of a process end that was killed; what it had sent may be carried out."""
        for link in [each for each in self._links if each.process is process]:
            link.die()

    def restart(self) -> None:
        """End every connection, as a server does that starts again."""
        for link in [*self._links]:
            link.lose()

    def unused(self, since_s: float) -> list[str]:
        """Return the names of the connections that nobody has used for so long."""
        return [link.name for link in self._links if self._simulation.loop.time() - link.used_s > since_s]

    def rows(self, sql: str) -> list[tuple[str | None, ...]]:
        """Return what is committed, for the run's own eyes; times are texts.

        Raises:
            RuntimeError: The statement fails, such as one that would have to wait for a lock.
        """
        now = self._now()
        return self._own.query(f"SET simulated.clock = '{now}'; SET simulated.began = '{now}'; {sql}")

    def _now(self) -> str:
        at = datetime.fromtimestamp(EPOCH_S + self._simulation.loop.time() + self.clock.ahead_s, UTC)
        return at.isoformat(timespec="microseconds")

    async def _connect(self, protocol_factory: Callable[[], Any]) -> tuple[asyncio.Transport, Any]:
        draw, losses = self._simulation.choices.below, self._losses
        await asyncio.sleep(0.005 * draw(4, often=0.1))
        if losses.refused and draw(2, often=losses.refused):
            raise ConnectionRefusedError("the database takes no connections")
        protocol = protocol_factory()
        link = _Link(self, self._simulation, protocol)
        self._links.append(link)
        self._all.append(link)
        protocol.connection_made(link)
        return link, protocol

    @property
    def _losses(self) -> Losses:
        return NO_LOSSES if self._simulation.is_calm else self.losses

    def take(self) -> Session:
        """Return a session that nobody uses."""
        return self._free.pop() if self._free else Session(self._server.url, self._name)

    def release(self, link: _Link) -> None:
        """Undo what a connection has left open."""
        if link in self._links:
            self._links.remove(link)
        session, link.session = link.session, None
        if session is None:
            return
        if link in self._waiting:
            self._waiting.remove(link)
            self.cancel(session)
            session.answer()
        if session.status != "I":
            session.query("ROLLBACK")
        session.query("DISCARD ALL")
        session.changed()
        self._free.append(session)
        self._look_after()

    def cancel(self, session: Session) -> None:
        """Cancel the statement of a session that waits, and return once it has ended."""
        self._own.query(f"SELECT pg_cancel_backend({session.pid})")
        if not session.has_answered(HANGS_S):
            raise RuntimeError("a statement that was cancelled goes on")

    def cancel_of(self, pid: int) -> None:
        """Cancel what a connection waits for, as somebody else's request; what has ended is not undone."""
        for link in [*self._waiting]:
            if link.session is not None and link.session.pid == pid:
                self.cancel(link.session)
                self._look_after()

    def carry_out(self, link: _Link, data: bytes, *, is_new: bool) -> bytes | None:
        """Return the server's answer; None while the statement waits for a lock."""
        session = link.session
        assert session is not None
        prefix = ""
        if is_new and session.status != "E":
            now = self._now()
            prefix = f"SET simulated.clock = '{now}'"
            if session.status == "I":
                prefix += f"; SET simulated.began = '{now}'"
        session.send(data, prefix)
        if not self._has_ended(session):
            self._waiting.append(link)
            return None
        return self._ended(session)

    def _ended(self, session: Session) -> bytes:
        answer = session.answer()
        if session.status == "I":
            self._look_after()
            if changed := session.changed():
                self.changes += 1
                if self.on_commit is not None:
                    self.on_commit(changed)
        return answer

    def _has_ended(self, session: Session) -> bool:
        for _ in range(int(HANGS_S / LOOK_S)):
            if session.has_answered(LOOK_S):
                return True
            if self._is_blocked(session):
                return False
        raise RuntimeError("the database neither answers nor waits")

    def _is_blocked(self, session: Session) -> bool:
        """Whether a statement waits for a lock, and not in a circle, which the server breaks by itself."""
        circle = f"""
            WITH RECURSIVE waits (pid) AS (
                SELECT unnest(pg_blocking_pids({session.pid}))
                UNION SELECT b.pid FROM waits w, unnest(pg_blocking_pids(w.pid)) AS b (pid)
            ) SELECT count(*), count(*) FILTER (WHERE pid = {session.pid}) FROM waits"""
        waits, closed = self._own.query(circle)[0]
        return waits != "0" and closed == "0"

    def _look_after(self) -> None:
        """Answer those whose statements need not wait any more."""
        while True:
            for link in [*self._waiting]:
                session = link.session
                assert session is not None
                is_free = session.has_answered(0) or not self._is_blocked(session)
                if is_free and self._has_ended(session):
                    self._waiting.remove(link)
                    link.reply(self._ended(session))
                    break
            else:
                return


class _Link(asyncio.Transport):
    """A connection, as asyncpg has it."""

    def __init__(self, postgres: SimulatedPostgres, simulation: Simulation, protocol: Any) -> None:
        super().__init__()
        self._postgres, self._simulation, self._protocol = postgres, simulation, protocol
        self._loop = simulation.loop
        self._context = contextvars.copy_context()
        self.process = self._loop.process_now()
        self.session: Session | None = None
        self.name = ""
        self.used_s = self._loop.time()
        self._written = bytearray()
        self._is_due = self.is_closed = False
        self._is_new = True
        self._exchanges = 0
        self._lock_timeout_s = 0.0
        self._is_lock_late = False

    def write(self, data: Any) -> None:
        """Send something to the server, where it is carried out in a later step."""
        if self.is_closed:
            return
        self._written += data
        if not self._is_due:
            self._is_due = True
            late_s = 0.01 * self._simulation.choices.below(8, often=self._postgres.late)
            self._later(late_s, self._carry_out, contextvars.Context())

    def _later(self, delay_s: float, work: Callable[..., None], context: contextvars.Context, *arguments: Any) -> None:
        if delay_s:
            self._loop.call_later(delay_s, work, *arguments, context=context)
        else:
            self._loop.call_soon(work, *arguments, context=context)

    def _carry_out(self) -> None:
        self._is_due = False
        self.used_s = self._loop.time()
        if self.is_closed or not self._written:
            return
        data = bytes(self._written)
        self._written.clear()
        if self.session is None:
            self._begin(data)
            return
        if data[:1] == b"X":
            self._end(None)
            return
        losses = self._postgres._losses
        often = losses.commit if b"COMMIT" in data else losses.statement
        outcome = self._simulation.choices.below(3, often=often) if often else 0
        if outcome == 1:
            self.lose()
            return
        self._exchanges += 1
        try:
            answer = self._postgres.carry_out(self, data, is_new=self._is_new)
        except SessionLostError:
            self.lose()
            return
        self._is_new = data[-5:] != b"H\0\0\0\4"
        if outcome == 2:
            self.lose()
        elif answer is not None:
            self.reply(answer)
        elif self._lock_timeout_s:
            self._later(self._lock_timeout_s, self._give_up_waiting, contextvars.Context(), self._exchanges)

    def reply(self, answer: bytes) -> None:
        """Have an answer arrive, soon or late."""
        draw, losses = self._simulation.choices.below, self._postgres._losses
        late_s = 0.01 * draw(8, often=self._postgres.late)
        if losses.late and draw(2, often=losses.late):
            late_s = SILENT_S
        if self._is_lock_late:
            self._is_lock_late = False
            answer = _as_lock_timeout(answer)
        self._later(late_s, self._arrive, self._context, answer)

    def _arrive(self, data: bytes) -> None:
        if not self.is_closed:
            self._protocol.data_received(data)

    def _give_up_waiting(self, exchange: int) -> None:
        """End a wait for a lock that has taken as long as the session allows."""
        if exchange == self._exchanges and self in self._postgres._waiting:
            assert self.session is not None
            self._is_lock_late = True
            self._postgres.cancel_of(self.session.pid)

    def _begin(self, data: bytes) -> None:
        _, code = struct.unpack("!ii", data[:8])
        if code == _CANCEL:
            pid, _ = struct.unpack("!ii", data[8:16])
            self._postgres.cancel_of(pid)
            self.is_closed = True
            self._postgres.release(self)
            self._later(0.0, self._protocol.connection_lost, self._context, None)
            return
        words = data[8:].rstrip(b"\0").decode().split("\0")
        settings = dict(zip(words[::2], words[1::2], strict=True))
        self.session = self._postgres.take()
        self.name = settings.get("application_name", "")
        alike = [each for each in self._postgres._links if (each.process, each.name) == (self.process, self.name)]
        self._postgres.most[self.name] = max(self._postgres.most[self.name], len(alike))
        self._lock_timeout_s = float(settings.get("lock_timeout", "0").rstrip("s"))
        chosen = {name: value for name, value in settings.items() if name not in _NOT_SET and name[:4] != "tcp_"}
        if chosen:
            self.session.query("; ".join(f"SET {name} = '{value}'" for name, value in chosen.items()))
        granted = _message(b"R", struct.pack("!i", 0)) + self.session.greeting + _message(b"Z", b"I")
        self._later(0.0, self._arrive, self._context, granted)

    def lose(self) -> None:
        """End the connection at both ends, without a word."""
        self._end(ConnectionResetError("the connection to the database was lost"))

    def die(self) -> None:
        """End it with its process; what that had sent is carried out, or not."""
        if self._written and self.session is not None and self._simulation.choices.below(2):
            data = bytes(self._written)
            if data[:1] != b"X":
                self._postgres.carry_out(self, data, is_new=self._is_new)
        self.is_closed = True
        self._postgres.release(self)

    def _end(self, error: Exception | None) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._postgres.release(self)
            self._later(0.0, self._protocol.connection_lost, self._context, error)

    def forget(self) -> None:
        """Have whoever still holds it know at the end of a run that it is no more."""
        self.is_closed = True
        self._protocol.connection_lost(None)

    def close(self) -> None:
        """End it."""
        self._end(None)

    def abort(self) -> None:
        """End it at once."""
        self._end(None)

    def is_closing(self) -> bool:
        """Whether it has ended."""
        return self.is_closed

    def pause_reading(self) -> None:
        """Answers are taken in whole."""

    def resume_reading(self) -> None:
        """They are all the time."""


@functools.lru_cache(maxsize=4_096)
def _tables(sql: bytes) -> frozenset[str]:
    """Return the tables that a statement writes to."""
    return frozenset(name.decode() for name in _WRITES.findall(sql))


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _messages(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(data):
        end = at + 1 + int.from_bytes(data[at + 1 : at + 5], "big")
        yield data[at : at + 1], data[at + 5 : end]
        at = end


def _row(body: bytes) -> tuple[str | None, ...]:
    count, at = struct.unpack("!h", body[:2])[0], 2
    values: list[str | None] = []
    for _ in range(count):
        (length,) = struct.unpack("!i", body[at : at + 4])
        at += 4
        if length < 0:
            values.append(None)
        else:
            values.append(body[at : at + length].decode())
            at += length
    return tuple(values)


def _proof(password: str, first: bytes, challenge: bytes) -> bytes:
    """Return a client's last word by SCRAM (RFC 5802, section 3)."""
    said = dict(word.split("=", 1) for word in challenge.decode().split(","))
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(said["s"]), int(said["i"]))
    key = hmac.digest(salted, b"Client Key", "sha256")
    last = f"c=biws,r={said['r']}".encode()
    signature = hmac.digest(hashlib.sha256(key).digest(), first + b"," + challenge + b"," + last, "sha256")
    proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
    return last + b",p=" + base64.b64encode(proof)


def _as_lock_timeout(answer: bytes) -> bytes:
    """Return the answer to a statement that was cancelled as the server gives it when a lock took too long."""
    changed = b""
    for kind, body in _messages(answer):
        if kind == b"E":
            fields = [field for field in body.split(b"\0") if field]
            fields = [b"C55P03" if each[:1] == b"C" else each for each in fields]
            body = b"\0".join(fields) + b"\0\0"
        changed += _message(kind, body)
    return changed


@functools.cache
def server_at(url: str) -> Server:
    """Return the server at an address, prepared once in a process."""
    return Server(url)


@functools.cache
def own_server() -> Server:
    """Return a server that ends with this process."""
    running = postgres_server()
    url = running.__enter__()
    atexit.register(running.__exit__, None, None, None)
    return server_at(url)
