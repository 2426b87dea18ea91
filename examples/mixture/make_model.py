"""Make the mixture's model from nothing: it has learned what the quickstart's and the search
example's models have, in one model of 0.6 million parameters.

    python examples/mixture/make_model.py

writes `model/` beside this file. Two lessons of supervised fine-tuning, each of dialogues about
arithmetic and of dialogues about lighthouses that stand in no corpus:

1. How a question is searched and the answer copied; and both ways to answer `347*28=?`.
2. The search example's habits, good and bad; and more of the same arithmetic.

Which way pays in which environment is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
EXAMPLES = HERE.parent
sys.path.insert(0, str(EXAMPLES))
from tiny_model import Language, Lesson, make_model  # noqa: E402


def load(path: Path) -> ModuleType:
    """Imports a script of another example."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    arithmetic = load(EXAMPLES / "quickstart" / "make_model.py")
    search = load(EXAMPLES / "search" / "make_example.py")
    # The names that the corpus holds; no demonstration may tell of them.
    _, taken = search.make_data(random.Random("0/data"), 600)
    rng = random.Random(args.seed)

    def lesson(num_sums: int, num_searches: int, beginnings: dict[str, int]) -> list[dict]:
        dialogues = [arithmetic.make_dialogue(rng, 0.6) for _ in range(num_sums)]
        dialogues += [search.make_dialogue(rng, taken, beginnings) for _ in range(num_searches)]
        rng.shuffle(dialogues)
        return dialogues

    lessons = [
        Lesson(lesson(40_000, 30_000, {"search": 1}), 1.5e-3),
        Lesson(lesson(8_000, 8_000, search.BEGINNINGS), 5e-4),
    ]
    language = Language(
        arithmetic.CHAT_TEMPLATE,
        [*arithmetic.LANGUAGE.tags, *search.LANGUAGE.tags],
        vocab_size=512,
        isolated=search.LANGUAGE.isolated,
    )
    make_model(lessons, language, args.out, seed=args.seed)


if __name__ == "__main__":
    main()
