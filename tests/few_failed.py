"""few_failed.py MOST: succeeds where pytest's last run here failed in at most MOST tests.

`make test` removes the list of an earlier run before it starts.
"""

import json
import sys
from pathlib import Path

LISTED = Path(".pytest_cache/v/cache/lastfailed")

if not LISTED.is_file():
    sys.exit("no list of failed tests: the run broke off")
failed = json.loads(LISTED.read_text())
print(f"{len(failed)} failed: {', '.join(list(failed)[:20])}")
sys.exit(0 if 0 < len(failed) <= int(sys.argv[1]) else 1)
