"""Trains the shipped models. It is in the repository and not in the wheel: nobody needs it to run
them."""
