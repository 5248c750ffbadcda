"""How much one request may ask for. A test compares the numbers with docs/reference.md.

Each bound is large enough for every known use, and so small that even a request at all bounds at
once costs little until it is refused or admitted.
"""

from __future__ import annotations

from typing import Final

#: Tokens, token ids and counts of them.
MAX_TOKENS: Final = 2**31 - 1
#: Answers to one prompt.
MAX_N: Final = 128
#: Alternatives to a token.
MAX_LOGPROBS: Final = 128
#: Logprobs of a prompt, alternatives included: tokens x (1 + alternatives).
MAX_PROMPT_SCORES: Final = 2**20
MAX_STOP: Final = 64
MAX_STOP_CHARS: Final = 4096
#: Entries of a list of token ids.
MAX_TOKEN_LIST: Final = 65_536
MAX_LOGIT_BIAS: Final = 4096
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORD_CHARS: Final = 256
#: Of all bad words together: every step compares each of their tokens.
MAX_BAD_WORDS_CHARS: Final = 16_384
#: Names, levels of nesting, values and characters of `sampler_args`, and bits of an integer there.
MAX_SAMPLER_ARGS: Final = 64
MAX_SAMPLER_DEPTH: Final = 8
MAX_SAMPLER_VALUES: Final = 65_536
MAX_SAMPLER_CHARS: Final = 65_536
MAX_SAMPLER_BITS: Final = 128
#: Samplers of one request, and characters of a sampler's name.
MAX_SAMPLERS: Final = 16
MAX_SAMPLER_NAME: Final = 256
#: Characters of a `cache_scope`.
MAX_SCOPE_CHARS: Final = 256
#: Tokens that a stream holds unread.
MAX_BUFFER: Final = 1_000_000
#: Either way.
MAX_PRIORITY: Final = 2**31 - 1
#: Seconds; some thirty years.
MAX_DEADLINE: Final = 1e9
