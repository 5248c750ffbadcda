from asyncinfer.quantization.schemes.bitsandbytes import Bnb4Matrix
from asyncinfer.quantization.schemes.fp4 import Fp4Matrix, Mxfp4Experts
from asyncinfer.quantization.schemes.fp8 import Fp8Matrix
from asyncinfer.quantization.schemes.gptq import AwqMatrix, GptqMatrix
from asyncinfer.quantization.schemes.hqq import HqqMatrix
from asyncinfer.quantization.schemes.integers import IntMatrix, RowInt8Matrix
from asyncinfer.quantization.schemes.matrix import (
    BadPart,
    GroupEnds,
    MatrixFormat,
    Part,
    Rows,
    StoredNumbers,
)
from asyncinfer.quantization.schemes.modules import Modules
from asyncinfer.quantization.schemes.scheme import Scheme

__all__ = [
    "AwqMatrix",
    "BadPart",
    "Bnb4Matrix",
    "Fp4Matrix",
    "Fp8Matrix",
    "GptqMatrix",
    "GroupEnds",
    "HqqMatrix",
    "IntMatrix",
    "MatrixFormat",
    "Modules",
    "Mxfp4Experts",
    "Part",
    "RowInt8Matrix",
    "Rows",
    "Scheme",
    "StoredNumbers",
]
