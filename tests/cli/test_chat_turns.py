"""`asyncinfer chat`: what a conversation remembers."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from cli.talking import TalkingEngine

import asyncinfer
from asyncinfer.cli import main
from asyncinfer.engine import Stream

Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked() -> list[Any]:
    """What the engine was asked, in order: `(messages, options)`."""
    return []


@pytest.fixture
def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> Chat:
    class Engine(TalkingEngine):
        def stream(self, prompt: Any, **options: Any) -> Stream:
            asked.append((prompt, options))
            return super().stream(prompt, **options)

    monkeypatch.setattr(asyncinfer, "Engine", Engine)

    def call(typed: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["chat", "--max-tokens", "4", "--seed", "3", *arguments])
        assert isinstance(caught.value.code, int)
        return (caught.value.code, *capsys.readouterr())

    return call


def test_the_conversation_so_far_is_the_prompt(chat: Chat, asked: list[Any]) -> None:
    code, out, err = chat("one\n\ntwo\n/reset\nthree", "--system", "Be brief.")
    assert (code, err) == (0, "")
    system = {"role": "system", "content": "Be brief."}
    first, second, third = (messages for messages, _ in asked)
    assert first == [system, {"role": "user", "content": "one"}]
    answer = second[2]
    assert answer["role"] == "assistant"
    assert out.startswith(answer["content"] + "\n")
    assert second == [*first, answer, {"role": "user", "content": "two"}]
    assert third == [system, {"role": "user", "content": "three"}]
    assert asked[0][1] == {"max_tokens": 4, "seed": 3}


def test_a_question_that_fails_is_not_kept(chat: Chat, asked: list[Any]) -> None:
    code, _, err = chat("x" * 70_000 + "\ntwo\n")
    assert code == 0
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert asked[1][0] == [{"role": "user", "content": "two"}]


def test_bad_options_are_wrong_usage(chat: Chat) -> None:
    code, _, err = chat("one\n", "--top-p", "7")
    assert code == 2
    assert "top_p=7.0" in err


def test_commands(chat: Chat, asked: list[Any]) -> None:
    _, out, err = chat("/help\n/?\n/nonsense\n")
    assert out.count("Ctrl-C") == 2
    assert "/nonsense" in err
    assert asked == []


@pytest.mark.parametrize("command", ["/bye", "/exit", "/quit", "exit", "quit", "/exit  "])
def test_commands_that_leave(chat: Chat, asked: list[Any], command: str) -> None:
    assert chat(f"{command}\nhello\n") == (0, "", "")
    assert asked == []


@pytest.mark.parametrize("command", ["/clear", "/reset"])
def test_commands_that_forget(chat: Chat, asked: list[Any], command: str) -> None:
    chat(f"one\n{command}\ntwo\n")
    assert asked[1][0] == [{"role": "user", "content": "two"}]


@pytest.mark.parametrize("line", [" /exit", " exit", "exit the loop how?", "/etc"])
def test_what_only_looks_like_a_command(chat: Chat, asked: list[Any], line: str) -> None:
    _, _, err = chat(f"{line}\n")
    assert [messages[-1]["content"] for messages, _ in asked] == ([line] if not err else [])
    assert bool(err) == line.startswith("/")


def test_guided_away_from_another_system_message(chat: Chat, asked: list[Any]) -> None:
    options = ("--system", "Be brief.", "--guidance-scale", "2", "--negative-prompt", "Be rude.")
    # The fake model computes no guides, and says so: what counts is what it was asked.
    code, _, _ = chat("one\ntwo", *options)
    assert code == 0
    assert len(asked) == 2
    rude = {"role": "system", "content": "Be rude."}
    for messages, given in asked:
        assert given["guidance_scale"] == 2
        assert given["negative_prompt"] == [rude, *messages[1:]]


@pytest.mark.parametrize("scale", [(), ("--guidance-scale", "1")])
def test_a_negative_prompt_without_a_scale_is_refused_as_it_was_typed(
    chat: Chat, asked: list[Any], scale: tuple[str, ...]
) -> None:
    code, _, err = chat("one\n", "--negative-prompt", "Be rude.", *scale)
    assert code == 2
    assert err.endswith("Error: negative_prompt='Be rude.': needs a guidance_scale other than 1\n")
    assert asked == []
