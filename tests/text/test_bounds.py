"""What a template may do: every way to take long, or much memory, is counted. # fault 44"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from asyncinfer.errors import InvalidRequest
from asyncinfer.text import ChatTemplate, render_budget
from asyncinfer.text.compiled_template import MAX_SOURCE
from asyncinfer.text.render_budget import RenderBudget

LONG = "ab c<!---->" * 20_000
CHAT = [{"role": "user", "content": LONG}, {"role": "user", "content": LONG}]
EACH = "{%% set n = namespace(x=[], y='') %%}{%% for i in range(9999) %%}%s{%% endfor %%}"
#: Which of the bounds is met first is no matter.
BOUND = "steps of work|held at once|in short values|characters written"
HELD = "held at once|in short values"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of everything, so that it is soon used up."""
    for name in ("MAX_STEPS", "MAX_SHORT", "MAX_HELD", "MAX_WRITTEN"):
        monkeypatch.setattr(render_budget, name, getattr(render_budget, name) // 100)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        *(
            (EACH % f"{{% set a = messages[0].content|{name} %}}", BOUND)
            for name in (
                *("sort", "list", "title", "striptags", "unique|list", "wordcount", "urlencode"),
                *("groupby('x')|list", "map('upper')|list", "select|list", "max", "lower"),
                *("replace('x', 'y')", "indent", "batch(2)|list", "tojson", "e", "reverse|list"),
            )
        ),
        *(
            (EACH % f"{{% set a = messages[0].content.{call} %}}", BOUND)
            for call in ("split()", "upper()", "count('a')", "find('x')", "title()", "splitlines()")
        ),
        (EACH % "{% set n.x = n.x + [messages[0].content.split()] %}", BOUND),
        (EACH % "{% set n.x = n.x + messages[0].content.split('a')[:999] %}", BOUND),
        (EACH % "{% set n.x = n.x + [messages[0].content ~ i] %}", HELD),
        (EACH % "{% set n.x = n.x + [messages[0].content + 'x'] %}", HELD),
        (EACH % "{% set n.x = n.x + [messages[0].content[1:]] %}", HELD),
        (EACH % "{% set n.x = n.x + [messages[0].content[:999] ~ i] %}", BOUND),
        (EACH % "{% set n.x = n.x + range(9999)|list %}", BOUND),
        (EACH % "{% set a = 'x' in messages[0].content %}", BOUND),
        (EACH % "{% set a = messages[0].content == messages[1].content %}", BOUND),
        (EACH % "{% set a = messages|selectattr('content', 'in', ['x'] * 999)|list %}", BOUND),
        (EACH % "{% set a = messages|map(attribute='content')|join %}", BOUND),
        (EACH % "{% set a = (range(999)|list).index(998) %}", BOUND),
        (EACH % "{{ messages[0].content }}", BOUND),
        ("{% set x %}" + EACH % ("y" * 9999) + "{% endset %}", BOUND),
        (EACH % ("{% set a = i %}" * 99), BOUND),
        ("{% macro m() %}" + "{% set a = 1 %}" * 99 + "{% endmacro %}" + EACH % "{{ m() }}", BOUND),
        (
            "{% for i in range(9999) recursive %}{% for j in range(99) %}{% endfor %}{% endfor %}",
            BOUND,
        ),
        ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "RecursionError|" + BOUND),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError|" + BOUND),
        ("{{ ([[1] * 999] * 999)|sum(start=[])|length }}", BOUND),
        ("{{ [1]|map('take a step', -10 ** 9, 0)|list }}", "no filter named 'take a step'"),
        ("{{ [[1]]|map('count rounds', -10 ** 9, 0)|list }}", "no filter named"),
        (
            "{% set n = namespace(d=0) %}{% block a %}{% set n = n %}{% if true %}"
            + "{% set x = 1 %}" * 99
            + "{% for i in range(9) %}{{ self.a() }}{% endfor %}{% endif %}{% endblock %}",
            "RecursionError|" + BOUND,
        ),
        *(
            (
                "{% set n = namespace(x=1, y=1) %}{% for i in range(64) %}"
                + "{% set n.x = "
                + nest
                + " %}{% set n.y = "
                + nest.replace("x", "y")
                + " %}{% endfor %}{{ "
                + use
                + " }}",
                f"{BOUND}|a tuple is too large",
            )
            for nest, use in (
                ("[n.x, n.x]", "n.x == n.y"),
                ("{1: n.x, 2: n.x}", "n.x != n.y"),
                ("dict(a=n.x, b=n.x)", "n.x == n.y"),
                ("[n.x] * 2", "n.x == n.y"),
                ("(n.x, n.x)", "{n.x: 1}"),
                ("[n.x, n.x]", "n.x in [1, n.y]"),
                ("[n.x, n.x]", "[n.x, n.y]|sort"),
                ("[n.x, n.x]", "[n.x].index(n.y)"),
            )
        ),
        ("{{ dict.update(messages[0], role='system') }}", "update"),
        ("{{ namespace(_x=1) }}", "without an underscore"),
        ("{{ ('a'.encode() * 10 ** 10)|length }}", "encode"),
        ("{{ (5).to_bytes(10 ** 10, 'big') }}", "to_bytes"),
        ("{{ '%*d' % (10 ** 9, 1) }}", "a width that is a value"),
        ("{{ '%.*f'|format(10 ** 9, 1.0) }}", "a width that is a value"),
        ("{{ '{:{w}}'.format(1, w=10 ** 9) }}", "a width that is a value"),
        ("{{ '{:>{0}}'.format(10 ** 9) }}", "a width that is a value"),
        ("{{ 'a\tb'.expandtabs(tabsize=10 ** 9) }}", "expandtabs is too large"),
        ("{{ 1|round(-10 ** 9) }}", "round is too large"),
        ("{{ 1|round(10 ** 9, 'floor') }}", "round is too large"),
        ("{{ ('9' * 9999)|int }}", "int is too large"),
        ("{{ ('f' * 9999)|int(base=16) }}", "int is too large"),
        ("{{ 2 ** 99999 }}", r"'\*\*' is too large"),
        ("{{ (2 ** 20000) * (2 ** 20000) * (2 ** 20000) * (2 ** 20000) }}", r"'\*' is too large"),
        ("{{ messages[0].content.join(range(999)|map('string')) }}", "join is too large"),
        ("{{ range(999)|join(messages[0].content) }}", "join is too large"),
        ("{{ (messages[0].content|list * 99999)|length }}", r"'\*' is too large"),
    ],
)
@pytest.mark.usefixtures("small")
def test_what_takes_long_or_much(source: str, says: str) -> None:
    template = ChatTemplate(source)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=says):
            template.render(CHAT)
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("small")
def test_what_is_let_go_may_be_made_again() -> None:
    """A prompt that is gathered piece by piece: many long texts, one at a time."""
    source = (
        "{% set n = namespace(out='') %}{% for i in range(60) %}"
        "{% set n.out = n.out ~ messages[0].content %}{% endfor %}{{ n.out|length }}"
    )
    piece = "x" * 20_000
    assert sum(range(61)) * len(piece) > 10 * render_budget.MAX_HELD
    text = ChatTemplate(source).render([{"role": "user", "content": piece}])
    assert text == str(60 * len(piece))


def test_at_the_bounds_and_one_past_them() -> None:
    budget = RenderBudget()
    budget.step(render_budget.MAX_STEPS)
    with pytest.raises(SecurityError, match=f"more than {render_budget.MAX_STEPS} steps"):
        budget.step(1)
    budget.write(render_budget.MAX_WRITTEN)
    with pytest.raises(SecurityError, match=f"more than {render_budget.MAX_WRITTEN} characters"):
        budget.write(1)
    budget.check("x", render_budget.MAX_SIZE)
    with pytest.raises(
        SecurityError, match=f"{render_budget.MAX_SIZE + 1} > {render_budget.MAX_SIZE}"
    ):
        budget.check("x", render_budget.MAX_SIZE + 1)
    assert ChatTemplate("x".ljust(MAX_SOURCE))
    assert not ChatTemplate("x".ljust(MAX_SOURCE + 1))


def test_what_is_held_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    size = render_budget._LOOK + 1
    monkeypatch.setattr(render_budget, "MAX_HELD", 3 * size)
    budget = RenderBudget()
    held = [budget.keep("x" * size) for _ in range(2)]
    for _ in range(3):
        # Nobody holds these.
        budget.keep("x" * size)
        budget.keep(list("x" * (size // 66)))
    held.append(budget.keep("x" * size))
    with pytest.raises(SecurityError, match=f"{4 * size} characters held at once"):
        held.append(budget.keep("y" * size))


def test_a_short_value_counts_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_budget, "MAX_SHORT", 1 << 18)
    budget: Any = RenderBudget()
    for _ in range(4):
        budget.keep("x" * ((1 << 16) - 1))
    budget.keep("xxxx")
    with pytest.raises(SecurityError, match="in short values"):
        budget.keep("x")
