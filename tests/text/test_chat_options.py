"""What a caller may hand a chat template: the variables that it reads, and none of the engine's."""

from __future__ import annotations

import pytest

from asyncinfer import InvalidRequest
from asyncinfer.text import ChatTemplate

SOURCE = (
    "{% if think %}<think>{% endif %}{{ bos_token }}{{ messages[0].content }}"
    "{{ raise_exception('never') if false }}"
)
TEMPLATE = ChatTemplate(SOURCE, special_tokens={"bos_token": "<s>"})
CHAT = [{"role": "user", "content": "hello"}]


# fault 44
@pytest.mark.parametrize(
    "name", ["unknown", "bos_token", "eos_token", "raise_exception", "strftime_now", "range"]
)
def test_a_variable_that_is_not_the_callers(name: str) -> None:
    with pytest.raises(InvalidRequest, match="reads no such option; it reads: think") as caught:
        TEMPLATE.render(CHAT, **{name: "evil"})
    assert caught.value.field == name


# fault 44
@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_what_has_a_parameter_of_its_own(name: str) -> None:
    with pytest.raises(TypeError, match="multiple values"):
        TEMPLATE.render(CHAT, True, **{name: []})


def test_a_variable_that_the_template_reads() -> None:
    assert TEMPLATE.render(CHAT, think=True) == "<think><s>hello"
