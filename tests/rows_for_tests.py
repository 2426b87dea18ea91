"""Files of rows, as data sets have them."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_rows(path: Path, rows: Iterable) -> Path:
    """Writes a JSON line for each row; returns the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
