"""The command `agentrl` on a rank 1 whose disk stops answering after four files."""

import itertools
import os
import sys
import time

from agentrl.cli.main import main

if os.environ["RANK"] == "1":
    force_to_disk, number = os.fsync, itertools.count()

    def stuck(descriptor: int) -> None:
        if next(number) > 3:
            time.sleep(3600)
        force_to_disk(descriptor)

    os.fsync = stuck

sys.exit(main())
