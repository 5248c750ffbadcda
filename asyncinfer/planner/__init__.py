"""What a model takes on a GPU and how fast it can be there, from its config alone."""

from asyncinfer.planner.floors import Floor, Speed, Storage, decode_floor, prefill_floor
from asyncinfer.planner.format_plan import FormatPlan
from asyncinfer.planner.formats import FORMATS, Format
from asyncinfer.planner.gpus import Gpu, find_gpu, gpus
from asyncinfer.planner.hybrid_cache import HybridReplay, replay_hybrid
from asyncinfer.planner.plan import Plan, config_of, plan, plan_config
from asyncinfer.planner.size import ModelSize
from asyncinfer.planner.stored import StoredType

__all__ = [
    "FORMATS",
    "Floor",
    "Format",
    "FormatPlan",
    "Gpu",
    "HybridReplay",
    "ModelSize",
    "Plan",
    "Speed",
    "Storage",
    "StoredType",
    "config_of",
    "decode_floor",
    "find_gpu",
    "gpus",
    "plan",
    "plan_config",
    "prefill_floor",
    "replay_hybrid",
]
