"""`python -m asyncinfer` is the command `asyncinfer`."""

from asyncinfer.cli import main

main()
