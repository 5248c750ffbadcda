from asyncinfer.files.config_json import (
    CONFIG_JSON,
    QUANT_JSON,
    read_config_file,
    read_config_json,
)
from asyncinfer.files.folder import checkpoint_file, following_links, plain_name
from asyncinfer.files.json_file import KeyTwice, read_json, unique_keys

__all__ = [
    "CONFIG_JSON",
    "QUANT_JSON",
    "KeyTwice",
    "checkpoint_file",
    "following_links",
    "plain_name",
    "read_config_file",
    "read_config_json",
    "read_json",
    "unique_keys",
]
