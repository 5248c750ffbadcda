"""The sampler plugins that come with the package. They use the public plugin interface alone."""

from asyncinfer.samplers.dry import DRY
from asyncinfer.samplers.dynamic_temperature import DynamicTemperature
from asyncinfer.samplers.mirostat import Mirostat
from asyncinfer.samplers.top_n_sigma import TopNSigma
from asyncinfer.samplers.xtc import XTC

__all__ = ["DRY", "XTC", "DynamicTemperature", "Mirostat", "TopNSigma"]
