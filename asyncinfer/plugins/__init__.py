"""Plugins by name: a `Registry` for each kind, and `register` for code without a package."""

from asyncinfer.plugins.chosen import Chosen
from asyncinfer.plugins.groups import (
    block,
    cache_policies,
    ignored,
    models,
    observers,
    proposers,
    register,
    registries,
    samplers,
    schedulers,
    unblock,
)
from asyncinfer.plugins.info import PluginInfo
from asyncinfer.plugins.registry import Registry

__all__ = [
    "Chosen",
    "PluginInfo",
    "Registry",
    "block",
    "cache_policies",
    "ignored",
    "models",
    "observers",
    "proposers",
    "register",
    "registries",
    "samplers",
    "schedulers",
    "unblock",
]
