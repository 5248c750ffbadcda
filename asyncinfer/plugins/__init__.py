"""Plugins by name: a `Registry` for each kind, and `register` for code without a package."""

from asyncinfer.plugins.groups import (
    cache_policies,
    models,
    observers,
    register,
    registries,
    samplers,
    schedulers,
)
from asyncinfer.plugins.registry import PluginInfo, Registry

__all__ = [
    "PluginInfo",
    "Registry",
    "cache_policies",
    "models",
    "observers",
    "register",
    "registries",
    "samplers",
    "schedulers",
]
