"""The command line on a fake model, as a program: `python talk.py MODE ARGUMENT...`.

MODE "talk" answers some 200 tokens a second, without end; "stuck" never finishes loading.
"""

from __future__ import annotations

import sys
from functools import partial

from asyncinfer.cli.torch_later import torch_later


def run() -> None:
    # A fake model needs none of it, and its import takes longer than all the rest.
    torch_later()
    from talking import Talking, TalkingEngine

    import asyncinfer
    from asyncinfer.cli import main

    mode = sys.argv.pop(1)
    asyncinfer.Engine = partial(TalkingEngine, source=Talking(mode, 0.0025))  # type: ignore[misc, assignment]
    # With the arguments of this process, so that it heeds signals as the program does.
    main()


if __name__ == "__main__":
    run()
