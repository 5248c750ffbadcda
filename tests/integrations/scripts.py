"""What a model answers whose agent asks for the weather: a call, and then what came of it."""

from __future__ import annotations

from asyncinfer.testing import Said

QUESTION = "Is it warm in Rome?"
WEATHER = "21 degrees in Rome"
ANSWER = "Yes: 21 degrees in Rome."


def temperature(city: str) -> str:
    """The temperature in a city."""
    return f"21 degrees in {city}"


def agent(messages: list[dict[str, str]]) -> Said | str:
    """Calls the tool, and answers once it has its result. Fails where something was lost."""
    (question,) = [each["content"] for each in messages if each["role"] == "user"]
    assert question == QUESTION
    results = [each["content"] for each in messages if each["role"] == "tool"]
    if not results:
        assert any('"temperature"' in each["content"] for each in messages), "no tool was offered"
        return Said(reasoning="I need the weather.", tool_calls=[("temperature", {"city": "Rome"})])
    assert results == [WEATHER]
    (called,) = [each["content"] for each in messages if each["role"] == "assistant"]
    assert '{"name": "temperature", "arguments": {"city": "Rome"}}' in called
    return ANSWER
