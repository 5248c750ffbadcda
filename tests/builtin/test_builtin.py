"""The shipped models: what is in the folders, what they write, and the script that trains them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from asyncinfer.builtin import DRAFT_PATH, MODEL_PATH

transformers = pytest.importorskip("transformers")

END_OF_TEXT = "<|endoftext|>"
FOLDERS = [pytest.param(MODEL_PATH, id="model"), pytest.param(DRAFT_PATH, id="draft")]
PATHS = MODEL_PATH.parent / "paths.py"
TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


def parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def greedy(folder: Path, prompt: str, tokens: int = 48) -> str:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    text: str = tokenizer.decode(out[0], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folder_is_whole_and_small(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["use_cache"] is True
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_the_models_share_one_tokenizer() -> None:
    assert (MODEL_PATH / "tokenizer.json").read_bytes() == (
        DRAFT_PATH / "tokenizer.json"
    ).read_bytes()
    assert 4 <= parameters(MODEL_PATH) / parameters(DRAFT_PATH) <= 6


def test_the_card_tells_the_parameters_and_a_measured_perplexity() -> None:
    card = (MODEL_PATH.parent / "CARD.md").read_text()
    for folder, worst in ((MODEL_PATH, 12), (DRAFT_PATH, 60)):
        row = re.search(rf"^\| `{folder.name}/` \|.*$", card, re.MULTILINE)
        assert row is not None
        cells = [cell.strip() for cell in row[0].strip("|").split("|")]
        assert int(cells[1].replace(",", "")) == parameters(folder)
        assert 1 < float(cells[-2]) < worst


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n",
        "\t\tx\r\n  y\r",
        "def f():\n        return 1\n",
        "naïve 日本語 👩‍👩‍👧",
        "\x00\x7f\u0300\u2028",
        "a" * 200,
        "1234567890",
        " \n \n\n    x",
    ],
)
def test_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert (
        TOKENIZER.decode(
            TOKENIZER.encode(text, add_special_tokens=False).ids, skip_special_tokens=False
        )
        == text
    )


def test_every_text_opens_with_the_end_of_text() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    end = TOKENIZER.token_to_id(END_OF_TEXT)
    assert (
        TOKENIZER.encode("x").ids[0]
        == tokenizer("x")["input_ids"][0]
        == tokenizer.bos_token_id
        == tokenizer.eos_token_id
        == end
    )
    assert tokenizer("x")["input_ids"] == TOKENIZER.encode("x").ids
    assert tokenizer.model_max_length == 2048


@pytest.mark.parametrize("depth", range(1, 7))
def test_a_new_line_and_its_indentation_are_one_token(depth: int) -> None:
    line = "\n" + "    " * depth
    assert (
        len(TOKENIZER.encode(line + "pass", add_special_tokens=False).ids)
        == len(TOKENIZER.encode("pass", add_special_tokens=False).ids) + 1
    )


@pytest.mark.parametrize(("generation", "end"), [(False, ""), (True, "\n")])
def test_the_chat_template_writes_comments(generation: bool, end: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add two\n\nnumbers."},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"},
        {"role": "user", "content": "Now subtract."},
    ]
    code = "def add(a, b):\n    return a + b\n"
    comments = "# Be brief.\n# Add two\n#\n# numbers."
    want = f"{END_OF_TEXT}{comments}\n{code}\n# Now subtract.{end}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        == want
    )
    source = json.loads((MODEL_PATH / "tokenizer_config.json").read_text())["chat_template"]
    plain = ImmutableSandboxedEnvironment().from_string(source)
    assert (
        plain.render(messages=messages, bos_token=END_OF_TEXT, add_generation_prompt=generation)
        == want
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_writes_python(folder: Path) -> None:
    text = greedy(folder, "def add(a, b):")
    assert re.match(r"def add\(a, b\):\n    \S", text)
    assert folder == DRAFT_PATH or re.search(r"\n    +return\b", text)


def test_the_script_trains_both_models(tmp_path: Path) -> None:
    # In this process: another one would import transformers anew.
    module = importlib.import_module("asyncinfer.builtin.training.__main__")
    try:
        module.main(["--tiny", "--minutes", "0.02", "--output", str(tmp_path)])
    finally:
        transformers.utils.logging.enable_progress_bar()
    assert {path.name for path in tmp_path.iterdir()} == {"CARD.md", "draft", "model"}
    card = (tmp_path / "CARD.md").read_text()
    for name in ("model", "draft"):
        folder = tmp_path / name
        assert greedy(folder, "def add(a, b):", tokens=2).startswith("def add(a, b):")
        assert f"| `{name}/` | {parameters(folder):,} |" in card


def test_the_paths_need_only_the_standard_library() -> None:
    imports = re.findall(r"^(?:import|from) (\S+)", PATHS.read_text(), re.MULTILINE)
    assert set(imports) == {"__future__", "pathlib", "typing"}
