"""Measurements of the engine's internals: what `asyncinfer bench` finds in a checkout only."""
