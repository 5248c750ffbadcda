"""The command line, `asyncinfer`."""

from asyncinfer.cli.start import main

__all__ = ["main"]
