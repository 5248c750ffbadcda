"""The command line, `asyncinfer`."""

from asyncinfer.cli.app import main

__all__ = ["main"]
