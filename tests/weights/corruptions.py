"""Ways to break the checkpoint in a folder. Each is told where to strike by a seeded generator and
says which file and which tensor the error has to name (None: no tensor is to blame)."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))

Blame: TypeAlias = tuple[str, str | None]
Corruption: TypeAlias = Callable[[Path, Random], Blame]


class Shard:
    """A file of safetensors as it lies on the disk, to be written with anything changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        self.header: dict[str, Any] = json.loads(data[8 : 8 + length])
        self.data = data[8 + length :]

    @property
    def names(self) -> list[str]:
        """In the order of their bytes."""
        names = [name for name in self.header if name != "__metadata__"]
        return sorted(names, key=lambda name: self.header[name]["data_offsets"])

    def write(self, header: bytes | None = None, length: int | None = None) -> None:
        text = json.dumps(self.header).encode() if header is None else header
        size = len(text) if length is None else length
        self.path.write_bytes(struct.pack("<Q", size) + text + self.data)

    def take(self, names: list[str]) -> tuple[dict[str, Any], bytes]:
        """These tensors alone, as header and data of a sound file."""
        header, data = {}, b""
        for name in names:
            begin, end = self.header[name]["data_offsets"]
            offsets = [len(data), len(data) + end - begin]
            header[name] = {**self.header[name], "data_offsets": offsets}
            data += self.data[begin:end]
        return header, data


def single(folder: Path) -> Shard:
    return Shard(folder / SINGLE)


def split(folder: Path) -> dict[str, str]:
    """Two shards and an index instead of one file; the index's map."""
    whole = single(folder)
    weight_map = {}
    names = whole.names
    for file, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        header, data = whole.take(part)
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + data)
        weight_map |= dict.fromkeys(part, file)
    whole.path.unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# --- files that are not whole


def cut_in_the_data(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    keep = random.randrange(len(shard.data))
    shard.data = shard.data[:keep]
    shard.write()
    ends = {name: shard.header[name]["data_offsets"][1] for name in shard.names}
    return SINGLE, next(name for name in shard.names if ends[name] > keep)


def cut_in_the_header(folder: Path, random: Random) -> Blame:
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[: random.randrange(6000)])
    return SINGLE, None


def more_than_there_should_be(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    shard.data += random.randbytes(random.randrange(1, 100))
    shard.write()
    return SINGLE, None


def a_byte_that_is_no_json(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    text = bytearray(json.dumps(shard.header).encode())
    text[random.randrange(len(text))] = random.choice(b"\x00\x01\x1f\xff")
    shard.write(bytes(text))
    return SINGLE, None


def a_huge_header(folder: Path, random: Random) -> Blame:
    single(folder).write(length=random.choice((2**63, 2**64 - 1, 100_000_001, 50_000_000)))
    return SINGLE, None


def nothing_in_it(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    shard.header, shard.data = {}, b""
    shard.write()
    return str(folder), "model.embed_tokens.weight"


# --- headers that lie


def two_in_one_place(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    place = random.randrange(1, len(shard.names))
    before, name = shard.names[place - 1 : place + 1]
    begin, end = shard.header[before]["data_offsets"]
    # A byte into the other, and as long as it says.
    length = shard.header[name]["data_offsets"][1] - shard.header[name]["data_offsets"][0]
    shard.header[name]["data_offsets"] = [end - 1, end - 1 + length]
    assert begin < end
    shard.write()
    return SINGLE, name


def a_hole(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    place = random.randrange(1, len(shard.names))
    name = shard.names[place]
    # What comes behind moves on; the bytes between belong to nobody.
    for later in shard.names[place:]:
        shard.header[later]["data_offsets"] = [n + 2 for n in shard.header[later]["data_offsets"]]
    shard.data += b"\0\0"
    shard.write()
    return SINGLE, name


def behind_the_end(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    name = random.choice(shard.names[:-1])
    begin, end = shard.header[name]["data_offsets"]
    far = random.choice((len(shard.data), 2**40, 2**63))
    shard.header[name]["data_offsets"] = [far, far + end - begin]
    shard.write()
    # Where it was there is a hole, and the next one is behind it.
    return SINGLE, next(n for n in shard.names if shard.header[n]["data_offsets"][0] > begin)


def a_dtype_of_another_size(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    name = random.choice(shard.names)
    shard.header[name]["dtype"] = random.choice(("F32", "F64", "U8", "F8_E4M3", "I64"))
    shard.write()
    return SINGLE, name


def a_dtype_of_the_same_size(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    name = random.choice(shard.names)
    shard.header[name]["dtype"] = random.choice(("I16", "U16"))
    shard.write()
    return SINGLE, name


def a_dtype_that_is_none(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    name = random.choice(shard.names)
    shard.header[name]["dtype"] = random.choice(("bfloat16", "", None, 16, ["BF16"]))
    shard.write()
    return SINGLE, name


def another_shape_of_the_same_size(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    name = random.choice([n for n in shard.names if len(shard.header[n]["shape"]) == 2])
    rows, columns = shard.header[name]["shape"]
    shapes = [[rows * columns], [1, rows, columns], [rows * 2, columns // 2]]
    shard.header[name]["shape"] = random.choice(shapes)
    shard.write()
    return SINGLE, name


def a_shape_that_is_none(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    name = random.choice(shard.names)
    bad = ([-256], [2**62, 2**62], [float("nan")], ["256"], 256, None, [[256]], [0], [1.5])
    shard.header[name]["shape"] = random.choice(bad)
    shard.write()
    return SINGLE, name


def a_name_twice(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    name = random.choice(shard.names)
    entry = f", {json.dumps(name)}: {json.dumps(shard.header[name])}}}"
    shard.write((json.dumps(shard.header)[:-1] + entry).encode())
    return SINGLE, name


# --- tensors of another model


def a_tensor_is_missing(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    gone = random.choice(shard.names)
    shard.header, shard.data = shard.take([name for name in shard.names if name != gone])
    shard.write()
    return str(folder), gone


def a_tensor_too_many(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    names = ("NaN", "model.layers.6.mlp.up_proj.weight", "../../x", "a\0b", "x" * 10_000, "", "ü")
    name = random.choice(names)
    size = len(shard.data)
    shard.header[name] = {"dtype": "BF16", "shape": [4], "data_offsets": [size, size + 8]}
    shard.data += bytes(8)
    shard.write()
    return SINGLE, name


def a_tensor_by_another_name(folder: Path, random: Random) -> Blame:
    shard = single(folder)
    name = random.choice(shard.names)
    other = random.choice((name.upper(), f" {name}", f"{name}\0", name.replace("e", "е")))
    shard.header[other] = shard.header.pop(name)
    shard.write()
    return str(folder), name


# --- an index that lies


def an_index_that_leads_out(folder: Path, random: Random) -> Blame:
    weight_map = split(folder)
    name = random.choice(list(weight_map))
    # It is there to be read.
    (folder.parent / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes())
    out = (f"../{SHARDS[0]}", str(folder.parent / SHARDS[0]), f"..\\{SHARDS[0]}", f"./{SHARDS[0]}")
    write_index(folder, {**weight_map, name: random.choice(out)})
    return INDEX, name


def an_index_of_other_files(folder: Path, random: Random) -> Blame:
    weight_map = split(folder)
    name = random.choice(list(weight_map))
    no_shard = (None, 7, ["x"], "pytorch_model.bin", "x.safetensors.exe", float("nan"), "")
    write_index(folder, {**weight_map, name: random.choice(no_shard)})
    return INDEX, name


def an_index_that_swaps(folder: Path, random: Random) -> Blame:
    weight_map = split(folder)
    name = random.choice(list(weight_map))
    other = SHARDS[1 - SHARDS.index(weight_map[name])]
    write_index(folder, {**weight_map, name: other})
    return other, name


def an_index_that_leaves_out(folder: Path, random: Random) -> Blame:
    weight_map = split(folder)
    name = random.choice(list(weight_map))
    file = weight_map.pop(name)
    write_index(folder, weight_map)
    return file, name


def an_index_that_makes_up(folder: Path, random: Random) -> Blame:
    weight_map = split(folder)
    file = random.choice(SHARDS)
    write_index(folder, {**weight_map, "ghost": file})
    return file, "ghost"


def an_index_that_is_none(folder: Path, random: Random) -> Blame:
    split(folder)
    bad = ("", "[]", "null", "{", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\xff")
    (folder / INDEX).write_text(random.choice(bad), "latin-1")
    return INDEX, None


def a_shard_is_missing(folder: Path, random: Random) -> Blame:
    split(folder)
    file = random.choice(SHARDS)
    (folder / file).unlink()
    return file, None


def a_tensor_in_two_shards(folder: Path, random: Random) -> Blame:
    weight_map = split(folder)
    first, second = (Shard(folder / file) for file in SHARDS)
    name = random.choice(first.names)
    header, data = first.take([name])
    size = len(second.data)
    begin, end = header[name]["data_offsets"]
    second.header[name] = {**header[name], "data_offsets": [size + begin, size + end]}
    second.data += data
    second.write()
    assert weight_map[name] == SHARDS[0]
    return SHARDS[1], name


# --- files that are not files


def what_is_no_file(folder: Path, random: Random) -> Blame:
    names = (SINGLE, "config.json", INDEX, *SHARDS)
    name = random.choice(names)
    if name not in (SINGLE, "config.json"):
        split(folder)
    path = folder / name
    path.unlink()
    kind = random.choice(("fifo", "folder", "device", "link out", "link to nothing", "circle"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link out":
        (folder.parent / name).write_bytes(b"{}")
        path.symlink_to(folder.parent / name)
    else:
        path.symlink_to({"device": "/dev/zero", "circle": path}.get(kind, folder / "nothing"))
    return name, None


def pickles_alone(folder: Path, random: Random) -> Blame:
    (folder / SINGLE).unlink()
    name = random.choice(("pytorch_model.bin", "model.pt", "consolidated.00.pth"))
    (folder / name).write_bytes(pickle.dumps(Payload()))
    return name, None


def a_pickle_that_says_it_is_none(folder: Path, random: Random) -> Blame:
    (folder / SINGLE).write_bytes(pickle.dumps(Payload()))
    return SINGLE, None


class Payload:
    """Ends the tests when it is read."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (87,)


# --- a config that lies


def code_that_comes_along(folder: Path, random: Random) -> Blame:
    (folder / "modeling.py").write_text("import os; os._exit(87)")
    changes = ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, {"auto_map": "modeling"})
    return _config(folder, random.choice(changes)), None


def a_config_of_another_kind(folder: Path, random: Random) -> Blame:
    changes = (
        {"quantization_config": {"quant_method": "gptq"}},
        {"architectures": ["NoSuchForCausalLM"]},
        {"architectures": []},
        {"architectures": None},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"hidden_act": "os.system"},
        {"torch_dtype": "int8", "dtype": None},
    )
    return _config(folder, random.choice(changes)), None


def a_number_that_cannot_be(folder: Path, random: Random) -> Blame:
    key = random.choice(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")
    )
    bad = (0, -1, 2**40, 10**300, 1.5, True, "256", [256], {}, float("nan"), float("inf"))
    return _config(folder, {key: random.choice(bad)}), None


def a_shape_of_another_model(folder: Path, random: Random) -> Blame:
    _config(folder, {})
    changes, tensor = random.choice(
        (
            ({"vocab_size": 4097}, "model.embed_tokens.weight"),
            ({"num_hidden_layers": 7}, "model.layers.6.input_layernorm.weight"),
            ({"intermediate_size": 641}, "model.layers.0.mlp.gate_proj.weight"),
            ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight"),
            ({"head_dim": 32}, "model.layers.0.self_attn.q_proj.weight"),
            ({"tie_word_embeddings": False}, "lm_head.weight"),
            ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        )
    )
    _config(folder, changes)
    lacks = tensor in ("lm_head.weight", "model.layers.6.input_layernorm.weight")
    return (str(folder) if lacks or tensor.endswith("bias") else SINGLE), tensor


def a_config_that_is_none(folder: Path, random: Random) -> Blame:
    path = folder / "config.json"
    text = random.choice(("", "[]", "null", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\xff\xfe"))
    path.write_text(text, "latin-1")
    return "config.json", None


def no_config(folder: Path, random: Random) -> Blame:
    (folder / "config.json").unlink()
    return "config.json", None


def _config(folder: Path, changes: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return "config.json"


CORRUPTIONS: tuple[Corruption, ...] = (
    cut_in_the_data,
    cut_in_the_header,
    more_than_there_should_be,
    a_byte_that_is_no_json,
    a_huge_header,
    nothing_in_it,
    two_in_one_place,
    a_hole,
    behind_the_end,
    a_dtype_of_another_size,
    a_dtype_of_the_same_size,
    a_dtype_that_is_none,
    another_shape_of_the_same_size,
    a_shape_that_is_none,
    a_name_twice,
    a_tensor_is_missing,
    a_tensor_too_many,
    a_tensor_by_another_name,
    an_index_that_leads_out,
    an_index_of_other_files,
    an_index_that_swaps,
    an_index_that_leaves_out,
    an_index_that_makes_up,
    an_index_that_is_none,
    a_shard_is_missing,
    a_tensor_in_two_shards,
    what_is_no_file,
    pickles_alone,
    a_pickle_that_says_it_is_none,
    code_that_comes_along,
    a_config_of_another_kind,
    a_number_that_cannot_be,
    a_shape_of_another_model,
    a_config_that_is_none,
    no_config,
)
