"""What well-known checkpoints say in `config.json`, and how many numbers the published weights
have, as their makers count them: of gpt-oss and DeepSeek-V3 without quantisation, of gemma-3-4b
the text's, as of gemma-4 and Llama 4. LongRoPE's lists are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

CONFIGS: Final[dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)
PARAMETERS: Final = {name: config.pop("parameters") for name, config in CONFIGS.items()}
