"""The command line: `asyncinfer generate`, `chat`, `bench`."""

from asyncinfer.cli.app import main

__all__ = ["main"]
