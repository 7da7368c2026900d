"""The asynchronous client. ``client.py`` is made from this file."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import httpx

from wattshift._exchange import (
    FINAL,
    FIRST_POLL_S,
    LOG_NEXT_OFFSET,
    PAGE,
    Account,
    AnyArray,
    AnyJob,
    Ending,
    EventReader,
    Gpus,
    LogReader,
    Request,
    id_of,
    merged,
    pause_after,
    polls,
    refusal,
    spec_of,
    unreachable,
)
from wattshift._json import read
from wattshift._later import Later
from wattshift.errors import ApiError, UnreachableError
from wattshift.peers import AsyncGuard
from wattshift.sessions import AsyncSender, Collector, ExecResult, exec_body, read_event
from wattshift.sources import Archive

if TYPE_CHECKING:
    from wattshift import models
else:
    models = Later("wattshift.models")


class AsyncClient:
    """Calls the public API of one control plane as the owner of one API key.

    A request that the control plane could not take (429, 503, or no connection) is retried up to ``retries`` times
    with growing pauses, if it has had no effect yet or sending it twice does no more than sending it once. Submissions
    are retried: each has one idempotency key. Every method raises ``ApiError`` if the control plane refuses, with its
    stable ``code`` and the fields at fault, and ``UnreachableError`` if it does not answer. Plain HTTP to this
    machine's own addresses is sent only to the accounts that may hold the port; otherwise ``StrangerError`` is raised.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout_s: float = 30,
        retries: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
        trusted: Collection[int] = (),
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            url: Address of the gateway; by default ``WATTSHIFT_URL``, else this machine's port 8000.
            key: An API key, ``ws_...``; by default ``WATTSHIFT_API_KEY``. With neither an address nor a key, both are
                those of the login in use (``wattshift login``).
            timeout_s: For one answer that is not a stream.
            retries: How many times a request is retried.
            transport: Replaces the connection, for tests.
            trusted: User ids of this machine that may hold the gateway's port, beside root's, the system's and this
                process's own.

        Raises:
            WattshiftError: There is no key, or the logins file cannot be used.
        """
        account = Account.of(url, key)
        self.url = account.url
        self._retries = retries
        self._http = httpx.AsyncClient(
            base_url=account.url,
            headers={"authorization": f"Bearer {account.key}"},
            timeout=timeout_s,
            verify=account.verified_by,
            transport=transport,
            event_hooks={"request": [AsyncGuard(trusted)]},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # --- jobs

    async def submit(
        self,
        command: Sequence[str] | None = None,
        *,
        name: str | None = None,
        gpus: Gpus = 1,
        idempotency_key: str | None = None,
        **terms: Unpack[models.JobSpecTerms],
    ) -> models.SubmittedJob:
        """Submit a job; when this returns, it is on the control plane's disk.

        Args:
            command: Program and arguments; it is not given to a shell. None where ``image`` says what to run.
            name: By default the program's name.
            gpus: Size of the gang, its smallest and largest size, or all the fields of ``gpus``.
            idempotency_key: Submitting again with the same key and the same job returns that job. By default every
                call has a key of its own.
            terms: Whatever else the spec has, such as ``working_dir``, ``work`` or ``deadline``. ``array="0-99%8"``
                submits an array of jobs; ``after={"ok": job}`` waits for another job.
        """
        spec = spec_of(command, name, gpus, terms)
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        answer = await self.request("POST", "/v1/jobs", json=spec, headers=headers)
        return read(models.SubmittedJob, answer.json())

    async def upload(self, folder: str | os.PathLike[str] = ".") -> models.SourceFields:
        """Upload the files of a folder that git does not ignore; return the ``source`` of jobs that run on them.

        An archive that was uploaded before is not sent again, and an interrupted upload is continued. Packing a large
        folder takes a while, during which nothing else happens.

        Raises:
            WattshiftError: It is not a folder, is empty or too large, or has a link that leads out of it.
        """
        with Archive(folder) as archive:
            return await self.send(archive)

    async def send(self, archive: Archive) -> models.SourceFields:
        """Upload an archive; return the ``source`` of jobs that run on its files.

        Raises:
            WattshiftError: It is larger than the control plane accepts.
        """
        path = f"/v1/uploads/{archive.sha256}"
        try:
            answer = await self.request("PUT", path, json={"size_bytes": archive.size_bytes})
        except ApiError as error:
            if error.status != 413:
                raise
            raise archive.too_large(error.detail) from None
        while (number := answer.json()["next_chunk"]) is not None:
            answer = await self.request("PUT", f"{path}/chunks/{number}", json={"data": archive.chunk(number)})
        return {"upload": archive.sha256}

    async def set_secret(self, name: str, value: str, *, project: str | None = None) -> models.Secret:
        """Set a secret of the tenant, or of one of its projects; no answer ever contains its value."""
        body = {"value": value, "project": project}
        return read(models.Secret, (await self.request("PUT", f"/v1/secrets/{name}", json=body)).json())

    async def secrets(self) -> list[models.Secret]:
        """Return what is known about the tenant's secrets: everything but their values."""
        return read(models.SecretList, (await self.request("GET", "/v1/secrets")).json()).items

    async def delete_secret(self, name: str, *, project: str | None = None) -> None:
        """Delete a secret; running jobs keep its value."""
        await self.request("DELETE", f"/v1/secrets/{name}", params={"project": project})

    async def submit_many(
        self, specs: Sequence[models.JobSpecFields], *, idempotency_key: str | None = None
    ) -> list[models.SubmittedJob]:
        """Submit up to 1,000 jobs, all of which are accepted or none; return them in order."""
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        answer = await self.request("POST", "/v1/jobs:batch", json={"jobs": list(specs)}, headers=headers)
        return read(models.SubmittedBatch, answer.json()).jobs

    async def job(self, job: AnyJob) -> models.Job:
        """Return a job as it is now."""
        return read(models.Job, (await self.request("GET", f"/v1/jobs/{id_of(job)}")).json())

    async def jobs(
        self,
        *,
        state: str | Sequence[str] | None = None,
        project: str | None = None,
        name: str | None = None,
        label: str | Sequence[str] | None = None,
        array: AnyArray | None = None,
        submitted_after: datetime | None = None,
        submitted_before: datetime | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[models.Job]:
        """Yield jobs, newest first: those of all pages, or the first ``limit``.

        Args:
            state: Only jobs in this state, or in any of these.
            project: Only jobs of this project.
            name: Only jobs of this name.
            label: Only jobs with this label, ``key=value``, or with all of these.
            array: Only tasks of this array.
            submitted_after: Only jobs submitted after this instant.
            submitted_before: Only jobs submitted before this instant.
            limit: The most jobs to return.
        """
        params = {
            "state": state,
            "project": project,
            "name": name,
            "label": label,
            "array": None if array is None else id_of(array),
            "submitted_after": submitted_after,
            "submitted_before": submitted_before,
        }
        async for item in self._items("/v1/jobs", params, limit):
            yield read(models.Job, item)

    async def job_rows(self, *fields: str, limit: int | None = None, **filters: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield only these fields of each job, as in the JSON, newest first: for a table of ten thousand jobs, say.

        Args:
            fields: Such as ``"id", "name", "state"``; ``ApiError`` 422 lists all that there are.
            limit: The most jobs to return.
            filters: As ``jobs`` takes them.
        """
        if "array" in filters:
            filters["array"] = id_of(filters["array"])
        async for item in self._items("/v1/jobs", {**filters, "fields": list(fields)}, limit):
            yield item

    async def explain(self, job: AnyJob, *, one_change: bool = False) -> models.Explanation:
        """Return why a job waits, how it runs, or what happened to it.

        ``under_policies`` is what every policy would do with it; while its status is ``pending``, ask again.

        Args:
            job: The job.
            one_change: Whether to look for the smallest change that would start a waiting job now, or else earlier
                (``waiting.one_change``).
        """
        params = {"one_change": "true"} if one_change else None
        answer = await self.request("GET", f"/v1/jobs/{id_of(job)}/explain", params=params)
        return read(models.Explanation, answer.json())

    async def wait(self, job: AnyJob, *, timeout_s: float | None = None) -> models.Job:
        """Return a job once it has ended.

        Raises:
            TimeoutError: It has not ended within ``timeout_s``.
        """
        return await self._ended(models.Job, f"/v1/jobs/{id_of(job)}", timeout_s)

    async def cancel(self, job: AnyJob) -> models.Job:
        """Cancel a job; a running one is stopped first, with its grace period."""
        return await self._steer(job, "cancel")

    async def hold(self, job: AnyJob) -> models.Job:
        """Keep a job from starting until it is released; a running one is stopped first, with its grace period."""
        return await self._steer(job, "hold")

    async def release(self, job: AnyJob) -> models.Job:
        """Let a held job start."""
        return await self._steer(job, "release")

    async def forget_checkpoint(self, job: AnyJob) -> models.Job:
        """Let a job that waits for the node with its checkpoint start afresh elsewhere."""
        return await self._steer(job, "forget-checkpoint")

    async def array(self, array: AnyArray) -> models.JobArray:
        """Return an array of jobs as it is now, with its tasks counted by state."""
        return read(models.JobArray, (await self.request("GET", f"/v1/arrays/{id_of(array)}")).json())

    async def wait_array(self, array: AnyArray, *, timeout_s: float | None = None) -> models.JobArray:
        """Return an array once all its tasks have ended; its state is ``succeeded`` only if all did.

        Raises:
            TimeoutError: They have not ended within ``timeout_s``.
        """
        return await self._ended(models.JobArray, f"/v1/arrays/{id_of(array)}", timeout_s)

    async def cancel_array(self, array: AnyArray) -> models.JobArray:
        """Cancel all tasks of an array in one transaction."""
        return await self._steer_array(array, "cancel")

    async def hold_array(self, array: AnyArray) -> models.JobArray:
        """Keep all tasks of an array from starting until they are released; running ones are stopped first."""
        return await self._steer_array(array, "hold")

    async def release_array(self, array: AnyArray) -> models.JobArray:
        """Let the held tasks of an array start."""
        return await self._steer_array(array, "release")

    async def logs(
        self,
        job: AnyJob,
        *,
        follow: bool = False,
        stream: Literal["both", "stdout", "stderr"] = "both",
        generation: int | None = None,
        node: str | None = None,
    ) -> AsyncIterator[str]:
        """Yield a job's output in pieces, as text; bytes that are not UTF-8 are replaced.

        Args:
            job: The job, or its id.
            follow: Wait for the job to start, and go on until its gang has ended; a broken connection is
                resumed where it broke off.
            stream: Standard output, standard error, or both in the order in which they were written.
            generation: Which of the job's gangs; by default the newest.
            node: Which of the gang's nodes; by default the first.
        """
        reader = LogReader(job, stream, generation, node)
        if follow:
            async for piece in self._followed(reader):
                yield piece
        else:
            while True:
                answer = await self._send(reader.request(follow=False))
                reader.begin(answer)
                if not answer.content:
                    break
                yield reader.text(answer.content)
                reader.offset = int(answer.headers.get(LOG_NEXT_OFFSET, reader.offset))
        if rest := reader.rest():
            yield rest

    async def events(self, job: AnyJob | None = None, *, follow: bool = True) -> AsyncIterator[models.JobEvent]:
        """Yield a job's events from the first one until it has ended, or those of all jobs from now on, without end.

        A broken connection is reopened, and continues after the last event. With ``follow=False``, only the events that
        already exist are returned.
        """
        reader, failures = EventReader(), 0
        path = "/v1/events" if job is None else f"/v1/jobs/{id_of(job)}/events"
        params = {} if follow else {"follow": "false"}
        while True:
            try:
                async with self.stream(path, params=params, headers=reader.headers) as answer:
                    if answer.status_code == 204:
                        return
                    async for line in answer.aiter_lines():
                        if event := reader.read(line):
                            failures = 0
                            yield event
            except UnreachableError:
                failures += 1
                if failures > self._retries:
                    raise
                await asyncio.sleep(min(8.0, 0.25 * 2**failures))
            else:
                if not follow or (job is not None and reader.has_ended):
                    return
                await asyncio.sleep(FIRST_POLL_S)

    async def exec(
        self,
        job: AnyJob,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        rank: int | None = None,
        node: str | None = None,
    ) -> ExecResult:
        """Run a command in a running job, on its node and in its environment; return how it ended and what it wrote.

        Args:
            job: The job, or its id.
            command: Program and arguments; they are not given to a shell.
            stdin: Its standard input.
            rank: The process of the job whose environment it gets; by default that of rank 0.
            node: Instead of a rank: the first process on this node.

        Raises:
            ApiError: The job does not run (``conflict``), or has no such rank or node (``not_found``).
            UnreachableError: The connection was lost; the command is ended.
            WattshiftError: It wrote more than 64 MiB.
        """
        path, collector = f"/v1/jobs/{id_of(job)}/exec", Collector()
        session_id = ""

        async def put(body: dict[str, Any]) -> Any:
            return (await self.request("PUT", f"{path}/{session_id}", json=body)).json()

        async with self.stream(path, method="POST", json=exec_body(command, rank, node, stdin=bool(stdin))) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if (event := read_event(line)) and event.type == "started":
                    session_id = event.session_id
                    break
            async with AsyncSender(put, stdin):
                async for line in lines:
                    if event := read_event(line):
                        collector.add(event)
        return collector.result()

    # --- what it took

    async def footprint(self, job: AnyJob) -> models.JobFootprintReport:
        """Return a job's energy and emissions, with the first of the intensities that were used."""
        return read(models.JobFootprintReport, (await self.request("GET", f"/v1/jobs/{id_of(job)}/footprint")).json())

    async def report(
        self, by: str = "project", *, start: datetime | None = None, end: datetime | None = None
    ) -> models.FootprintReport:
        """Return energy and emissions summed by ``job``, ``project``, ``tenant`` or ``node``, with all lines."""
        pages: list[models.FootprintReport] = []
        cursor: str | None = None
        while not pages or cursor:
            params = {"group_by": by, "start": start, "end": end, "cursor": cursor, "limit": 10_000}
            answer = await self.request("GET", "/v1/reports/footprint", params=params)
            pages.append(read(models.FootprintReport, answer.json()))
            cursor, end = pages[-1].next_cursor, pages[-1].end_at
        return merged(pages)

    async def prediction(self, job: AnyJob) -> models.JobPrediction:
        """Return the predicted run time of a job, with its uncertainty; ``ApiError`` 409 where there is none yet."""
        return read(models.JobPrediction, (await self.request("GET", f"/v1/predictions/{id_of(job)}")).json())

    async def whatif(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        **request: Unpack[models.TrainingRequestFields],
    ) -> models.Simulation:
        """Return what policies would have done with past jobs, once it has been simulated.

        ``whatif(policy=["las", "green"], jobs="history", carbon="GB", start="2026-11-01", days=7).result`` holds one
        document for each policy; ``failure`` says why there is none.

        Raises:
            TimeoutError: It has not ended within ``timeout_s``.
        """
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        made = (await self.request("POST", "/v1/simulations", json=request, headers=headers)).json()
        return await self._ended(models.Simulation, f"/v1/simulations/{made['id']}", timeout_s, "status")

    # --- the cluster and its grids

    async def nodes(self) -> list[models.Node]:
        """Return the nodes; for operators."""
        return read(models.NodeList, (await self.request("GET", "/v1/nodes")).json()).items

    async def policy(self) -> models.ActivePolicy:
        """Return the policy in force."""
        return read(models.ActivePolicy, (await self.request("GET", "/v1/policies/active")).json())

    async def zones(self) -> list[models.Zone]:
        """Return the grid zones that the installation knows."""
        return read(models.ZoneList, (await self.request("GET", "/v1/carbon/zones")).json()).items

    async def intensity(self, zone: str) -> models.CurrentIntensity:
        """Return a zone's carbon intensity now, in gCO2/kWh."""
        return read(models.CurrentIntensity, (await self.request("GET", f"/v1/carbon/{zone}/current")).json())

    async def forecast(self, zone: str, *, horizon_s: float | None = None) -> models.IntensityForecast:
        """Return a zone's predicted carbon intensities, in gCO2/kWh; by default for one day."""
        params = {"horizon_s": horizon_s}
        answer = await self.request("GET", f"/v1/carbon/{zone}/forecast", params=params)
        return read(models.IntensityForecast, answer.json())

    # --- anything else

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        content: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        retries: int | None = None,
    ) -> httpx.Response:
        """Return the answer of any operation of the API, retried as this client's own requests are.

        Args:
            method: The HTTP method, in capitals.
            path: The path, such as ``/v1/plans``.
            params: Query parameters; those that are None are left out.
            json: The body as JSON values or models.
            content: The body as JSON text, in place of ``json``.
            headers: Further headers.
            retries: Overrides the client's number of retries.
        """
        request = Request(method, path, params or {}, json, content, headers or {})
        return await self._send(request, retries)

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        method: str = "GET",
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Open a response that continues until the server ends it."""
        timeout = httpx.Timeout(10, read=None)
        given = Request(method, path, params or {}, json, headers=headers or {}).arguments
        try:
            async with self._http.stream(**given, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise refusal(answer)
                yield answer
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error

    async def _send(self, request: Request, retries: int | None = None) -> httpx.Response:
        attempt, most = 0, self._retries if retries is None else retries
        while True:
            try:
                answer = await self._http.request(**request.arguments)
            except httpx.HTTPError as error:
                pause_s = pause_after(request, attempt, error) if attempt < most else None
                if pause_s is None:
                    raise unreachable(self.url, error) from error
            else:
                if answer.status_code < 400:
                    return answer
                pause_s = pause_after(request, attempt, answer) if attempt < most else None
                if pause_s is None:
                    raise refusal(answer)
            attempt += 1
            await asyncio.sleep(pause_s)

    async def _items(self, path: str, params: Mapping[str, Any], limit: int | None) -> AsyncIterator[Any]:
        left, cursor = limit, None
        while left is None or left > 0:
            size = PAGE if left is None else min(PAGE, left)
            answer = await self.request("GET", path, params={**params, "limit": size, "cursor": cursor})
            page = answer.json()
            for item in page["items"]:
                yield item
            left = None if left is None else left - len(page["items"])
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    async def _steer(self, job: AnyJob, action: str) -> models.Job:
        return read(models.Job, (await self.request("POST", f"/v1/jobs/{id_of(job)}/{action}")).json())

    async def _steer_array(self, array: AnyArray, action: str) -> models.JobArray:
        return read(models.JobArray, (await self.request("POST", f"/v1/arrays/{id_of(array)}/{action}")).json())

    async def _ended(
        self, kind: type[Ending], path: str, timeout_s: float | None, state: Literal["state", "status"] = "state"
    ) -> Ending:
        """Return what is at ``path`` once its field ``state`` says that it has ended."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        etag = None
        for pause_s in polls():
            answer = await self.request("GET", path, headers={"if-none-match": etag} if etag else None)
            if answer.status_code != 304:
                found, etag = answer.json(), answer.headers.get("etag")
                if found[state] in FINAL:
                    return read(kind, found)
            if until_s is not None and time.monotonic() + pause_s > until_s:
                raise TimeoutError(f"{path.rpartition('/')[2]} has not ended within {timeout_s:g} s")
            await asyncio.sleep(pause_s)
        raise AssertionError("polls never end")

    async def _followed(self, reader: LogReader) -> AsyncIterator[str]:
        failures, pauses_s = 0, polls()
        while True:
            try:
                request = reader.request(follow=True)
                async with self.stream(request.path, params=request.params) as answer:
                    reader.begin(answer)
                    async for data in answer.aiter_bytes():
                        failures = 0
                        yield reader.text(data)
                return
            except ApiError as error:
                if error.code != "no_data" or (await self.job(reader.job)).state in FINAL:
                    raise
                await asyncio.sleep(next(pauses_s))  # the job has not started
            except UnreachableError:
                failures += 1
                if failures > self._retries:
                    raise
                await asyncio.sleep(min(8.0, 0.25 * 2**failures))
