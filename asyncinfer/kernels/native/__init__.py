"""CPU operators that LLVM compiles for this machine's processor. `llvmlite` contains LLVM, so no
compiler has to be installed; without `llvmlite`, torch's operators are used. Each kernel is
compared with torch before it is used. A step can be recorded if its layers call `NativeFunction`s
alone, which write to tensors of `calls.empty`."""

from asyncinfer.kernels.native.arena import Arena
from asyncinfer.kernels.native.between import add_, between_kernels, head_norm, kv_write
from asyncinfer.kernels.native.blocked import BLOCK_OUTPUTS, BlockedWeight
from asyncinfer.kernels.native.call_queue import CallQueue
from asyncinfer.kernels.native.calls import Recording, empty
from asyncinfer.kernels.native.decode import decode_kernel
from asyncinfer.kernels.native.ends import EndKernels, end_kernels, prepare_recording
from asyncinfer.kernels.native.host import NEEDED, available
from asyncinfer.kernels.native.kept_code import source_hash
from asyncinfer.kernels.native.laying import LayingKernels, laying_kernels
from asyncinfer.kernels.native.lora import LoraKernel, lora_kernel
from asyncinfer.kernels.native.own_blocks import in_blocks, own_blocks_work, read_own_blocks
from asyncinfer.kernels.native.packed import packed_kernel
from asyncinfer.kernels.native.packed_blocks import Layout
from asyncinfer.kernels.native.prefill import PrefillKernel, prefill_kernel
from asyncinfer.kernels.native.recorded_calls import ChunkKV, RecordedCalls

__all__ = [
    "BLOCK_OUTPUTS",
    "NEEDED",
    "Arena",
    "BlockedWeight",
    "CallQueue",
    "ChunkKV",
    "EndKernels",
    "LayingKernels",
    "Layout",
    "LoraKernel",
    "PrefillKernel",
    "RecordedCalls",
    "Recording",
    "add_",
    "available",
    "between_kernels",
    "decode_kernel",
    "empty",
    "end_kernels",
    "head_norm",
    "in_blocks",
    "kv_write",
    "laying_kernels",
    "lora_kernel",
    "own_blocks_work",
    "packed_kernel",
    "prefill_kernel",
    "prepare_recording",
    "read_own_blocks",
    "source_hash",
]
