from asyncinfer.models.quantised.methods import read_scheme

__all__ = ["read_scheme"]
