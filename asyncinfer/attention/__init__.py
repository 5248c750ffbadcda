from asyncinfer.attention.backend import MOST_HEAD_DIM, Attend, begin_attention, reads_pages
from asyncinfer.attention.batch import AttentionBatch, DeviceBatch
from asyncinfer.attention.chunked import in_chunks
from asyncinfer.attention.contiguous import ContiguousKV
from asyncinfer.attention.decode import FEW_BESIDE_CODE
from asyncinfer.attention.flashinfer import FlashInferAttention, use_flashinfer
from asyncinfer.attention.formats import PLAIN, KVFormat, kv_format, vector_bytes
from asyncinfer.attention.gathered import GatheredAttention
from asyncinfer.attention.indexed import IndexedAttention, IndexQueries
from asyncinfer.attention.kv import KVCache, LayerKV
from asyncinfer.attention.native import FixedChunk, FixedRows, compile_native, reads_plain_pages
from asyncinfer.attention.paged import HeadNorms, PagedAttention
from asyncinfer.attention.recorded_states import RecordedStates
from asyncinfer.attention.row_copies import begin_copy
from asyncinfer.attention.states import LayerStates, StateCache, StatePass, StateRows, StateShape
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.attention.whole import WholeAttention

__all__ = [
    "FEW_BESIDE_CODE",
    "MOST_HEAD_DIM",
    "PLAIN",
    "Attend",
    "AttentionBatch",
    "AttentionVariant",
    "ContiguousKV",
    "DeviceBatch",
    "FixedChunk",
    "FixedRows",
    "FlashInferAttention",
    "GatheredAttention",
    "HeadNorms",
    "IndexQueries",
    "IndexedAttention",
    "KVCache",
    "KVFormat",
    "LayerKV",
    "LayerStates",
    "PagedAttention",
    "RecordedStates",
    "StateCache",
    "StatePass",
    "StateRows",
    "StateShape",
    "WholeAttention",
    "begin_attention",
    "begin_copy",
    "compile_native",
    "in_chunks",
    "kv_format",
    "reads_pages",
    "reads_plain_pages",
    "use_flashinfer",
    "vector_bytes",
]
