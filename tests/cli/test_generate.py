"""`asyncinfer generate` and what all commands share: output, errors, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from cli.talking import Talking, TalkingEngine
from cli.terminals import PROGRAM
from click.testing import CliRunner

import asyncinfer
import asyncinfer.models
from asyncinfer.cli import main
from asyncinfer.cli.app import COMMANDS, one_line
from asyncinfer.cli.app import asyncinfer as group
from asyncinfer.cli.options import byte_size

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line on a fake model; gives its exit code, stdout and stderr."""
    monkeypatch.setattr(asyncinfer, "Engine", TalkingEngine)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert isinstance(caught.value.code, int)
        return (caught.value.code, *capsys.readouterr())

    return call


def test_the_text_and_nothing_else_goes_to_stdout(run: Run) -> None:
    async def expected() -> str:
        async with asyncinfer.Engine() as engine:
            return (await engine.generate("hello", temperature=0.0, max_tokens=40)).text

    code, out, err = run("generate", "hello", "-t", "0", "--max-tokens", "40")
    assert (code, out, err) == (0, anyio.run(expected) + "\n", "")


def test_echo_and_stop_and_seed(run: Run) -> None:
    line = ("generate", "hello", "--seed", "7", "--max-tokens", "60")
    _, text, _ = run(*line)
    assert run(*line, "--echo")[1] == "hello" + text
    stop = next(char for char in text[5:] if char.isalpha())
    assert run(*line, "--stop", stop)[1] == text[: text.index(stop)] + "\n"
    assert run(*line, "--stop", stop, "--stop", text[0])[1] == "\n"


def test_json(run: Run) -> None:
    code, out, _ = run("generate", "é", "--json", "-n", "2", "--max-tokens", "8")
    answer = json.loads(out)
    assert code == 0
    assert answer["prompt"] == "é"
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [8, 8]
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["text"] == answer["choices"][0]["text"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf8"])
def test_json_loses_no_character_to_the_encoding(
    run: Run, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert run("generate", "é日本", "--json", "--max-tokens", "8")[0] == 0
    out = raw.getvalue().decode(encoding)
    assert json.loads(out)["prompt"] == "é日本"
    assert ("日本" in out) == (encoding == "utf8")


def test_several_answers(run: Run) -> None:
    _, out, _ = run("generate", "x", "-n", "3", "--seed", "1", "--max-tokens", "8")
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        f"--- {i} of 3" for i in (1, 2, 3)
    ]


def test_the_prompt_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("--seed", "7", "--max-tokens", "10")
    _, text, _ = run("generate", "hé\n", *line)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("hé\n".encode())))
    assert run("generate", "-", *line) == (0, text, "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    code, _, err = run("generate", "-")
    assert code == 2
    assert "UTF-8" in err


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (("generate", "x", "--top-p", "4"), 2, "Error: top_p=4.0: must be in (0, 1]\n"),
        (("generate", "\udcff"), 2, "PROMPT is not UTF-8"),
        (("generate", "x", "--max-tokens", "-1"), 2, "max_tokens=-1"),
        (("generate", "x", "-n", "0"), 2, "n=0: must be"),
        (("generate", "x", "-t", "nan"), 2, "temperature=nan: must be"),
        (("generate", "x", "--stop", ""), 2, "stop"),
        (("generate", "x", "--regex", "[0-9]", "--json-object"), 2, "json_object"),
        (("chat", "x", "--max-tokens", "-1"), 2, "max_tokens=-1"),
        (("chat", "x", "--negative-prompt", "y"), 2, "needs a guidance_scale"),
        (("generate", "x", "--regex", "(a"), 1, "regex="),
        (("generate", "x", "--max-context", "0"), 2, "max_context=0: must be >= 1"),
        (("generate", "x", "--kv-bytes", "lots"), 2, "'lots' is not a number of bytes"),
        (("generate", "x", "--kernels", "cuda"), 2, "'auto', 'triton', 'torch'"),
        (("generate", "x", "--temperature", "warm"), 2, "temperature"),
        (("generate",), 2, "PROMPT"),
        (("generate", "x", "--unknown"), 2, "--unknown"),
        (("compose",), 2, "compose"),
    ],
)
def test_errors_are_one_line(run: Run, line: tuple[str, ...], code: int, says: str) -> None:
    got, out, err = run(*line)
    assert got == code
    assert out == ""
    assert says in err
    assert "Traceback" not in err
    assert err.startswith("Usage: ") if code == 2 else err.count("\n") == 1


def test_wrong_options_are_told_before_a_model_is_fetched(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASYNCINFER_MODEL")
    monkeypatch.setattr(asyncinfer.models, "pulled", lambda model: pytest.fail("looked for"))
    for command in ("generate", "chat"):
        assert run(command, "x", "--max-tokens", "-1")[0] == 2


def test_kernels_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "x", "-m", "embedded", "--device", "cpu", "--kernels", "triton"])
    assert caught.value.code == 1
    assert "kernels='triton': needs a GPU, this is cpu" in capsys.readouterr().err


def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "x", "--model", str(tmp_path)])
    assert caught.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert str(tmp_path) in err


def test_a_bug_is_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Talking, "load", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "x"])


def test_output_that_nobody_reads_any_more() -> None:
    program = [sys.executable, str(PROGRAM), "talk", "generate", "x"]
    done = subprocess.run(
        f"{subprocess.list2cmdline(program)} --max-tokens 3000 | head -c 10",
        shell=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert len(done.stdout) == 10
    assert done.stderr == b""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_help_text(name: str) -> None:
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output


def test_help_and_version_need_no_torch() -> None:
    program = """
import sys
from pathlib import Path
from asyncinfer.cli import main
for line in (["--help"], ["--version"], ["generate", "--help"], ["chat", "-h"], ["chat", "--no"]):
    try:
        main(line)
    except SystemExit as end:
        print(end.code)
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert f"asyncinfer {asyncinfer.__version__}" in done.stdout
    assert done.stdout.endswith("2\n[]\n")
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


def test_byte_sizes() -> None:
    sizes = {"7": 7, "1k": 1024, "512M": 2**29, "1.5GiB": 3 * 2**29, "2 gb": 2**31, "1T": 2**40}
    assert {text: byte_size(text) for text in sizes} == sizes


def test_output_that_has_no_room_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    for command in (("generate", "hello", "--max-tokens", "4"), ("plugins",), ("--help",)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Full())
            code, _, err = run(*command)
        assert (code, err) == (1, "Error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("closed", ["stdin", "stderr"])
def test_a_closed_stream_is_an_empty_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    monkeypatch.setattr(sys, closed, None)
    code, out, err = run("generate", "-" if closed == "stdin" else "hello", "--max-tokens", "4")
    assert err == ""
    assert code == 0
    assert out
    getattr(sys, closed).close()


def test_a_closed_stdout_is_an_error_before_anything_is_done() -> None:
    program = [sys.executable, str(PROGRAM), "talk"]
    for command in ("generate hello --max-tokens 4", "chat --max-tokens 4", "plugins"):
        done = subprocess.run(
            f"echo hello | {subprocess.list2cmdline(program)} {command} >&-",
            shell=True,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr == "Error: stdout is closed, there is nowhere to write to\n"


def test_a_conversation_that_nobody_reads_any_more() -> None:
    program = [sys.executable, str(PROGRAM), "talk"]
    line = f"{subprocess.list2cmdline(program)} chat --max-tokens 3000"
    done = subprocess.run(
        ["bash", "-c", f"yes hello | {line} | head -c 10; echo ${{PIPESTATUS[1]}} >&2"],
        capture_output=True,
        timeout=240,
        check=False,
    )
    # What was read of it may end within a character: random text is cut after ten bytes.
    assert done.stderr == b"1\n"


def test_a_prompt_that_the_locale_could_not_decode(run: Run) -> None:
    """As Python hands over bytes of an argument that its locale does not know."""
    line = ("-t", "0", "--max-tokens", "4")
    assert run("generate", "h\udcc3\udca9", *line) == run("generate", "hé", *line)


def test_a_cause_of_several_lines_is_said_once() -> None:
    cause = TimeoutError("a step ran longer than 3 s:\n  File x\n    y()")
    error = RuntimeError(f"the decode loop ended: {cause}")
    error.__cause__ = cause
    assert one_line(error).count("longer than 3 s") == 1
    error.__cause__ = OSError("no\nroom")
    assert one_line(error).endswith("(caused by OSError: no room)")


def test_an_answer_that_fits(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}', "utf-8")
    code, out, _ = run("generate", "x", "--json-schema", str(schema), "--json", "--seed", "1")
    answer = json.loads(out)
    assert code == 0
    assert all(isinstance(value, bool) for value in json.loads(answer["text"]))
    assert "reader" not in answer["choices"][0]
    line = ("generate", "x", "--choice", "left", "--choice", "right")
    assert run(*line)[1] in ("left\n", "right\n")
    code, _, err = run("generate", "x", "--regex", "[")
    assert code == 1
    assert "regex=" in err
    code, _, err = run("generate", "x", "--json-schema", str(tmp_path / "none"))
    assert code == 2
