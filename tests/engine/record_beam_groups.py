"""Record what transformers 4.52.4 finds in beam searches with groups, which version 5 has no more.

pip install transformers==4.52.4 torch
PYTHONPATH=tests python tests/engine/record_beam_groups.py
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from engine.beam_models import CONFIGS, beam_model, ends, group_searches, theirs

FILE = Path(__file__).with_name("beam_groups.json")


def main() -> None:
    found = []
    for family in CONFIGS:
        model = beam_model(family)
        for eos in ends(model):
            for search in group_searches():
                options = dict(search)
                beams, groups = options.pop("beams"), options.pop("groups")
                answers = theirs(model, beams, eos, num_beam_groups=groups, **options)
                found.append({"family": family, "eos": eos, "search": search, "answers": answers})
    lines = ",\n".join(json.dumps(each) for each in found)
    FILE.write_text(
        f'{{"transformers": "{transformers.__version__}", "searches": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
