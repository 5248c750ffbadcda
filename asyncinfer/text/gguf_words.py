"""How a GGUF file's tokenizer splits a text into words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["CUTS", "DIGITS", "GPT2"]

#: Parts of the patterns that split a text into words, of GPT-2 (Radford et al., 2019) and later.
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(digits: str) -> str:
    """Llama 3's pattern; `digits` is the pattern of a number."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, ending: str, *, but: str = "", signs_end: str = r"\r\n/") -> str:
    """GPT-4o's pattern: a new word begins where a capital follows a small letter. `ending` matches
    what may end a word, `but` letters that belong to neither case, and `signs_end` the end of a run
    of signs."""
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (f"[{letters}{but}]" for letters in (_UPPER, _LOWER))
    return (
        rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[{signs_end}]*|{_SPACES}"
    )


_LLAMA3: Final = _words(r"\p{N}{1,3}")
_QWEN2: Final = _words(r"\p{N}")
_GPT4O: Final = _cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
_TEKKEN: Final = _cased_words(r"\p{N}", "")
#: Combining marks belong to the letter before them.
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
#: Signs end before a line does, where Qwen2's include line ends.
_SEED: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
#: K-EXAONE's words go on over single spaces between letters.
_EXAONE_MOE: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
#: DeepSeek-V3's successive splits: numbers, Chinese and Japanese, all else.
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}",
)
#: Letters that the following splits skip: small ones of Armenian and Georgian, mathematical ones,
#: and rare ones.
_UNCUT: Final = (
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bb\U00016e40-\U00016e7f\U0001d400-\U0001df1e"
)
#: The successive splits of the first DeepSeek models: line ends, letters that have cases, signs,
#: spaces at the end, Chinese, Japanese and Korean, digits.
_DEEPSEEK: Final = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNCUT}]]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[一-龥\u0800-一가-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER: Final = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[一-龥\u0800-一가-\ud7ff]+",
    r"\p{N}",
)
#: Runs of Han characters are words of their own.
_KIMI: Final = r"[\p{Han}]+|" + _cased_words(
    r"\p{N}{1,3}", f"{_CONTRACTIONS}?", but=r"&&[^\p{Han}]", signs_end=r"\r\n"
)
#: Digits in threes, counted from the end of a number.
_AYA: Final = (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)
#: GPT-2's own split, and the same after each digit was split off.
GPT2: Final = "gpt-2"
DIGITS: Final = "digits, then gpt-2"
#: A file's name for its split -> the patterns for a byte-level tokenizer.
CUTS: Final[Mapping[str, str | tuple[str, ...]]] = {
    "a.x-4.0": GPT2,
    "chatglm-bpe": _LLAMA3,
    "codeshell": DIGITS,
    "command-r": DIGITS,
    "dbrx": _LLAMA3,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK3,
    "exaone-moe": _EXAONE_MOE,
    "exaone4": GPT2,
    "falcon-h1": _LLAMA3,
    "falcon3": _LLAMA3,
    "glm4": _LLAMA3,
    "glm5": _LLAMA3,
    "gpt-2": GPT2,
    "gpt-4o": _GPT4O,
    "granite-docling": GPT2,
    "hunyuan": _QWEN2,
    "hunyuan-dense": _DEEPSEEK3,
    "jais": GPT2,
    "joyai-llm": _DEEPSEEK3,
    "kanana2": _GPT4O,
    "kimi-k2": _KIMI,
    "kormo": _QWEN2,
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _GPT4O,
    "megrez": _QWEN2,
    "mellum": GPT2,
    "midm-2.0": _LLAMA3,
    "minerva-7b": DIGITS,
    "minimax-m2": _GPT4O,
    "mpt": GPT2,
    "olmo": GPT2,
    "phi-2": GPT2,
    "pixtral": _TEKKEN,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "refact": DIGITS,
    "seed-coder": _SEED,
    "smaug-bpe": _LLAMA3,
    "smollm": DIGITS,
    "solar-open": _QWEN2,
    "stablelm2": _QWEN2,
    "starcoder": DIGITS,
    "tekken": _TEKKEN,
    "tiny_aya": _AYA,
    "trillion": GPT2,
}
