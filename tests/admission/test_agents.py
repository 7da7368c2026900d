"""What admission sends to the nodes' agents to say who is asking."""

from services.admission.agents import Agent, AgentTokens
from services.kit.credentials import Credential


def test_an_agent_that_is_enrolled_gets_a_token_of_its_own() -> None:
    tokens = AgentTokens(Credential.derived("admission", [b"root" * 8]), "")
    one, two = (tokens.headers("a", Agent("http://a", enrolment)) for enrolment in (b"first", b"second"))
    assert one.keys() == two.keys()
    assert one != two
