"""The search environment's index against bm25s and SQLite FTS5.

    python benchmarks/search.py index [--passages 1000000] [--queries 200]

`index` writes one synthetic corpus (words drawn by Zipf's law from 200,000, passages of 60 words on
average) and lets each engine build and query it, in processes of their own: seconds and peak
resident memory of the build, bytes on disk, then in a fresh process the latency of single queries
with top 10, on one thread, and its resident memory. Queries are four words of a passage. All use
the same words without stemming and k1 = 1.2, b = 0.75; `agentrl` also stores the passages and reads
those it found, the others return numbers only. Agreement is the share of queries whose best passage
is `agentrl`'s. bm25s is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_search.corpus import read_corpus
from agentrl_search.index import build_index, open_index

VOCABULARY = 200_000
TOP = 10
ENGINES = ("agentrl", "bm25s", "fts5")


def write_corpus(path: Path, queries_path: Path, num_passages: int, num_queries: int) -> None:
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = sorted({"".join(rng.choice(letters, 7)) for _ in range(VOCABULARY)})
    rng.shuffle(vocabulary)
    weights = 1.0 / np.arange(1, len(vocabulary) + 1)
    cumulative = np.cumsum(weights) / weights.sum()
    asked = set(rng.choice(num_passages, num_queries, replace=False).tolist())
    queries = []
    with path.open("w") as file:
        for number in range(num_passages):
            length = int(np.clip(rng.lognormal(4.0, 0.4), 10, 300))
            drawn = np.searchsorted(cumulative, rng.random(length))
            words = [vocabulary[index] for index in drawn]
            file.write(f'{{"id": "{number}", "text": "{" ".join(words)}"}}\n')
            if number in asked:
                queries.append(" ".join(rng.choice(words, 4)))
    queries_path.write_text(json.dumps(queries))


def texts_of(corpus: Path):
    with corpus.open("rb") as file:
        for line in file:
            yield json.loads(line)["text"]


def build(engine: str, corpus: Path, out: Path) -> None:
    if engine == "agentrl":
        build_index(read_corpus(corpus), out, stemmer=None)
    elif engine == "bm25s":
        import bm25s

        tokens = bm25s.tokenize(list(texts_of(corpus)), stopwords=[], show_progress=False)
        index = bm25s.BM25(k1=1.2, b=0.75)
        index.index(tokens, show_progress=False)
        index.save(out)
    else:
        out.mkdir()
        connection = sqlite3.connect(out / "index.db")
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(body, content='')")
        rows = enumerate(texts_of(corpus))
        connection.executemany("INSERT INTO passages(rowid, body) VALUES (?, ?)", rows)
        connection.commit()
        connection.close()


def make_search(engine: str, out: Path):
    """A function from a query to the number of its best passage."""
    if engine == "agentrl":
        retriever = open_index(out)
        return lambda query: int(retriever.search([query], TOP)[0][0].passage.id)
    if engine == "bm25s":
        import bm25s

        index = bm25s.BM25.load(out, mmap=True)

        def search(query: str) -> int:
            tokens = bm25s.tokenize([query], stopwords=[], show_progress=False)
            found, _ = index.retrieve(tokens, k=TOP, show_progress=False, n_threads=1)
            return int(found[0][0])

        return search
    connection = sqlite3.connect(out / "index.db")
    statement = f"SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT {TOP}"

    def match(query: str) -> int:
        words = " OR ".join(f'"{word}"' for word in query.split())
        return connection.execute(statement, (words,)).fetchall()[0][0]

    return match


def work(task: str, engine: str, directory: Path) -> dict[str, Any]:
    """One engine's build or queries, in this process."""
    corpus, out = directory / "corpus.jsonl", directory / engine
    started = time.perf_counter()
    if task == "build":
        build(engine, corpus, out)
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        result = {"build_s": time.perf_counter() - started, "size_mb": size / 1e6}
    else:
        search = make_search(engine, out)
        opened = time.perf_counter() - started
        queries = json.loads((directory / "queries.json").read_text())
        search(queries[0])
        times, best = [], []
        for query in queries:
            started = time.perf_counter()
            best.append(search(query))
            times.append((time.perf_counter() - started) * 1000)
        result = {
            "open_s": opened,
            "p50_ms": statistics.median(times),
            "mean_ms": statistics.mean(times),
            "p99_ms": float(np.percentile(times, 99)),
            "best": best,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return result | {"peak_mb": peak}


def run_worker(task: str, engine: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "work", task, engine, str(directory)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def compare_indexes(num_passages: int, num_queries: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="agentrl-search-"))
    try:
        corpus = directory / "corpus.jsonl"
        write_corpus(corpus, directory / "queries.json", num_passages, num_queries)
        print(f"{num_passages:,} passages, {corpus.stat().st_size / 1e6:,.0f} MB of JSONL")
        print(
            "engine   build s   index MB   build peak MB   p50 ms   mean ms   p99 ms   query MB"
            "   agreement"
        )
        reference: list[int] = []
        for engine in ENGINES:
            if engine == "bm25s" and importlib.util.find_spec("bm25s") is None:
                print("bm25s is not installed")
                continue
            built = run_worker("build", engine, directory)
            asked = run_worker("query", engine, directory)
            reference = reference or asked["best"]
            same = statistics.mean(
                float(a == b) for a, b in zip(asked["best"], reference, strict=True)
            )
            print(
                f"{engine:8} {built['build_s']:7.1f} {built['size_mb']:10.0f} "
                f"{built['peak_mb']:15.0f} {asked['p50_ms']:8.2f} {asked['mean_ms']:9.2f} "
                f"{asked['p99_ms']:8.2f} "
                f"{asked['peak_mb']:10.0f} {same:11.2f}",
                flush=True,
            )
            shutil.rmtree(directory / engine)
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    index = commands.add_parser("index")
    index.add_argument("--passages", type=int, default=1_000_000)
    index.add_argument("--queries", type=int, default=200)
    worker = commands.add_parser("work")
    worker.add_argument("task", choices=["build", "query"])
    worker.add_argument("engine", choices=ENGINES)
    worker.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "index":
        compare_indexes(arguments.passages, arguments.queries)
    else:
        print(json.dumps(work(arguments.task, arguments.engine, arguments.directory)))


if __name__ == "__main__":
    main()
