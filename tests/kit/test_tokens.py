"""Signed tokens: who may ask whom, for what, in which role, and for how long."""

from __future__ import annotations

import jwt
import pytest

from services.contracts.identity import Identity, Role
from services.kit.callers import CALLERS, KEEPERS_OF_NODES, NODE, SERVICES
from services.kit.credentials import (
    Credential,
    CredentialError,
    audience_secret,
    caller_key,
    node_secret,
    roots_of,
    standing_token,
)
from services.kit.problems import ProblemError
from services.kit.tokens import LEEWAY_S, LIFETIME_S, REUSED_S, Incoming, Outgoing, outgoing, outgoing_to_node

ROOT = b"the root of the tests"
USER = Identity(tenant_id="t", role=Role.USER, key_id="k", user_id="u", project="p")
JOBS = ("GET", "/v1/jobs")


class Clock:
    """A clock that is set by hand, UTC seconds."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def credential(name: str, *roots: bytes) -> Credential:
    return Credential.derived(name, roots or (ROOT,))


def asked(audience: str, *roots: bytes, clock: Clock | None = None) -> Incoming:
    return Incoming(audience, credential(audience, *roots).secrets, clock_s=clock or Clock())


def sent(issuer: str, audience: str, *roots: bytes, clock: Clock | None = None) -> Outgoing:
    return Outgoing(issuer, audience, credential(issuer, *roots).keys[audience], clock or Clock())


def status(incoming: Incoming, authorization: str, method: str = "GET", path: str = "/v1/jobs") -> int:
    try:
        incoming.caller(authorization, method, path)
    except ProblemError as error:
        return error.status
    return 200


def test_a_token_says_who_asks_and_for_whom() -> None:
    found = asked("admission").caller(sent("gateway", "admission").authorization(USER), *JOBS)

    assert (found.service, found.identity) == ("gateway", USER)


def test_a_service_alone_is_nobody() -> None:
    found = asked("admission").caller(sent("router", "admission").authorization(), "POST", "/internal/keys/resolve")

    assert (found.service, found.identity) == ("router", None)


@pytest.mark.parametrize("audience", [name for name in CALLERS if name != NODE])
def test_no_service_is_let_in_that_is_not_in_the_table(audience: str) -> None:
    incoming = asked(audience)
    for issuer in SERVICES:
        key = caller_key(audience_secret(ROOT, audience), issuer)  # which no such service has
        token = Outgoing(issuer, audience, key, Clock()).authorization()
        assert (status(incoming, token) == 401) == (issuer not in CALLERS[audience])
        assert (audience in credential(issuer).keys) == (issuer in CALLERS[audience])


def test_a_service_passes_as_itself_alone() -> None:
    incoming = asked("telemetry")
    simulator = credential("simulator")

    forged = Outgoing("gateway", "telemetry", simulator.keys["telemetry"], Clock()).authorization(USER)
    for_another = Outgoing("simulator", "scheduler", simulator.keys["scheduler"], Clock()).authorization()

    assert status(incoming, forged) == 401
    assert status(incoming, for_another) == 401
    assert not simulator.nodes
    assert credential("telemetry").nodes
    assert {"admission", "telemetry"} == KEEPERS_OF_NODES


def test_a_caller_asks_what_it_is_for_and_nothing_else() -> None:
    admission = asked("admission")
    router, serving = sent("router", "admission"), sent("serving", "admission")
    admin = Identity(tenant_id="t", role=Role.ADMIN, key_id="k")

    assert status(admission, router.authorization(), "GET", "/v1/jobs") == 403
    assert status(admission, router.authorization(USER), "POST", "/internal/keys/resolve") == 403
    assert status(admission, serving.authorization(USER), "POST", "/v1/jobs/job_1/cancel") == 200
    assert status(admission, serving.authorization(admin), "POST", "/v1/jobs/job_1/cancel") == 403
    assert status(admission, sent("gateway", "admission").authorization(admin), "POST", "/internal/keys/x") == 403


def test_a_token_ends_and_is_made_anew_before_that() -> None:
    clock = Clock()
    outgoing_, incoming = sent("gateway", "admission", clock=clock), asked("admission", clock=clock)
    first = outgoing_.authorization(USER)
    began_s = clock.now_s

    clock.now_s = began_s + REUSED_S - 1
    assert outgoing_.authorization(USER) == first
    clock.now_s = began_s + REUSED_S
    assert outgoing_.authorization(USER) != first
    clock.now_s = began_s + LIFETIME_S + LEEWAY_S - 1
    assert status(incoming, first) == 200
    clock.now_s = began_s + LIFETIME_S + LEEWAY_S
    assert status(incoming, first) == 401, "although it was known before"
    clock.now_s = began_s - LEEWAY_S - 1
    assert status(asked("admission", clock=clock), first) == 401, "it is of the future"


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 10**12},
        {"aud": "carbon"},
        {"iss": "scheduler"},
        {"iss": ["gateway"]},
        {"act": {"tenant_id": "t"}},
        {"act": "x"},
        {"iat": "x"},
        {"exp": None},
    ],
)
def test_claims_that_are_not_right_are_refused(changes: dict[str, object]) -> None:
    claims = {"iss": "gateway", "aud": "admission", "iat": 1_000_000, "exp": 1_000_300} | changes
    key = credential("gateway").keys["admission"]

    token = jwt.api_jws.encode(jwt.PyJWT()._encode_payload(claims), key, "HS256")  # type: ignore[attr-defined]

    assert status(asked("admission"), f"Bearer {token}") == 401


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer ", "Basic x", "Bearer x.y.z", "Bearer " + "x" * 5_000])
def test_what_is_no_token_is_refused(token: str) -> None:
    assert status(asked("admission"), token) == 401


def test_an_unsigned_token_is_refused() -> None:
    claims = {"iss": "gateway", "aud": "admission", "iat": 1_000_000, "exp": 1_000_300}

    assert status(asked("admission"), "Bearer " + jwt.encode(claims, None, "none")) == 401


def test_a_secret_is_replaced_while_both_are_accepted() -> None:
    old, new = b"the old root", b"the new root"
    between = asked("admission", new, old)

    assert status(between, sent("gateway", "admission", old).authorization(USER)) == 200
    assert status(between, sent("gateway", "admission", new, old).authorization(USER)) == 200
    assert status(asked("admission", new), sent("gateway", "admission", old).authorization(USER)) == 401


def test_a_node_knows_admission_and_nobody_else() -> None:
    admission = credential("admission")
    secret = node_secret(credential("telemetry").nodes[0], "n1", b"enrolment")
    node = Incoming("node/n1", [secret], NODE, Clock())
    path = "/v1/allocations/job_1.1/logs"

    def from_admission(node_id: str, enrolment: bytes) -> str:
        made = outgoing_to_node(admission, node_id, enrolment)
        return Outgoing("admission", f"node/{node_id}", made._key, Clock()).authorization()  # pyright: ignore

    assert status(node, from_admission("n1", b"enrolment"), path=path) == 200
    assert status(node, from_admission("n1", b"enrolment"), "POST", "/v1/jobs") == 403
    assert status(node, from_admission("n2", b"enrolment"), path=path) == 401
    assert status(node, from_admission("n1", b"the one before"), path=path) == 401
    other = Outgoing("telemetry", "node/n1", caller_key(secret, "telemetry"), Clock()).authorization()
    assert status(node, other, path=path) == 401


def test_a_credential_is_one_word_and_of_one_service() -> None:
    whole = credential("admission", b"a" * 20, b"b" * 20)

    assert Credential.parsed(whole.text()) == whole
    assert " " not in whole.text()
    assert outgoing(credential("router"), "serving").authorization()
    with pytest.raises(KeyError):
        outgoing(credential("router"), "scheduler")
    for wrong in ("", "x", "e30", "bnVsbA"):
        with pytest.raises(CredentialError):
            Credential.parsed(wrong)


def test_standing_tokens_are_of_one_node() -> None:
    assert standing_token("join" * 5, "n1") != standing_token("join" * 5, "n2")
    assert roots_of("one, two,") == (b"one", b"two")
