"""How much one request may ask for. A test compares the numbers with docs/reference.md.

Each bound is large enough for every known use. Each is also so small that even a request at all
bounds at once costs little until it is refused or admitted.
"""

from __future__ import annotations

from typing import Final

#: Tokens, token ids and counts of them.
MAX_TOKENS: Final = 2**31 - 1
#: Answers to one prompt.
MAX_N: Final = 128
#: Beams of a beam search.
MAX_BEAMS: Final = 64
#: Alternatives to a token.
MAX_LOGPROBS: Final = 128
#: Logprobs of a prompt, alternatives included: tokens x (1 + alternatives).
MAX_PROMPT_SCORES: Final = 2**20
MAX_STOP: Final = 64
MAX_STOP_CHARS: Final = 4096
#: Regular expressions of `stop_regex`, characters of one, and of the text that one matches.
MAX_STOP_REGEX: Final = 16
MAX_STOP_REGEX_CHARS: Final = 1024
MAX_STOP_REGEX_SPAN: Final = 256
#: Tokens of a loop that `repetition_stop` looks for, and how often it may come.
MAX_LOOP_TOKENS: Final = 256
MAX_LOOP_TIMES: Final = 4096
#: Characters of an opening or closing tag of the reasoning.
MAX_TAG_CHARS: Final = 64
#: Entries of a list of token ids.
MAX_TOKEN_LIST: Final = 65_536
MAX_LOGIT_BIAS: Final = 4096
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORD_CHARS: Final = 256
#: Characters of all bad words together: every step compares each of their tokens.
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
#: Characters of an adapter's name.
MAX_ADAPTER_NAME: Final = 256
#: Tokens that a stream holds unread.
MAX_BUFFER: Final = 1_000_000
#: Tokens of a chunk.
MAX_STREAM_INTERVAL: Final = 1024
#: Largest priority, and negated the smallest.
MAX_PRIORITY: Final = 2**31 - 1
#: Seconds of a `deadline`; some thirty years.
MAX_DEADLINE: Final = 1e9
#: Characters of a schema, a grammar, a regular expression or a structural tag.
MAX_GRAMMAR_CHARS: Final = 65_536
#: Levels of nesting, and values, of a JSON Schema.
MAX_SCHEMA_DEPTH: Final = 100
MAX_SCHEMA_VALUES: Final = 16_384
#: Strings of `choice`, and characters of one.
MAX_CHOICES: Final = 4096
MAX_CHOICE_CHARS: Final = 4096
#: Characters of `constrain_after`.
MAX_CLOSING_CHARS: Final = 256
#: The most messages of a chat, and parts of all their contents.
MAX_MESSAGES: Final = 16_384
#: The most values in all their fields together, including those in nested lists and objects.
MAX_MESSAGE_VALUES: Final = 131_072
#: Bytes of an HTTP request's body, where an application names no other number.
MAX_BODY_BYTES: Final = 8 << 20
#: Objects and arrays of a body of more than 32 KiB.
MAX_BODY_CONTAINERS: Final = 16_384
#: Seconds in which a body has to arrive.
BODY_SECONDS: Final = 60.0
#: Seconds within which a client must read some of its answer.
UNREAD_SECONDS: Final = 300.0
#: Prompts that one HTTP request completes, and texts that one embeds: as many as OpenAI's API.
MAX_BATCH: Final = 128
MAX_EMBEDDED: Final = 2048
#: Tools of a request, characters of a tool's name, and of all schemas and descriptions together.
MAX_TOOLS: Final = 128
MAX_TOOL_NAME: Final = 128
MAX_TOOL_CHARS: Final = 262_144
#: Characters of `template_options` as JSON.
MAX_TEMPLATE_OPTION_CHARS: Final = 65_536
#: Characters or tokens of `prediction`.
MAX_PREDICTION: Final = 1_000_000
