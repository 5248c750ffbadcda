"""Write docs/faults.md: `python tests/faults/write_page.py`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

    from faults.page import PAGE, page
    from faults.registry import find_tests, read_rows

    PAGE.write_text(page(read_rows(), find_tests()), "utf-8")
    print(PAGE)
