"""`agentrl search ...`: builds, queries and serves an index. Handlers import what they need."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_search_commands(commands: argparse._SubParsersAction) -> None:
    """Adds `search` and its subcommands, each with a `handler` that returns an exit status."""
    search = commands.add_parser(
        "search",
        help="build, query and serve a search index",
        description="Build, query and serve an index of passages for the search environment.",
    )
    add_subcommands(search)


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    index = subcommands.add_parser(
        "index",
        help="index a corpus",
        description="Index the passages of a .jsonl, .parquet, .txt, .md or SQuAD .json file, or "
        "of a folder of such files.",
    )
    index.add_argument("corpus", type=Path, metavar="CORPUS")
    index.add_argument("--out", type=Path, required=True, metavar="DIR", help="index directory")
    index.add_argument("--add", action="store_true", help="add to an existing index")
    index.add_argument(
        "--retrieval",
        choices=["bm25", "dense", "hybrid"],
        default="bm25",
        help="retrieval that the index supports; dense and hybrid need --model (default: "
        "%(default)s)",
    )
    index.add_argument(
        "--model",
        metavar="DIR|URL",
        help="embedding model: a sentence-transformers directory, or an embedding server as "
        "http://host:port/v1/embeddings#model-name",
    )
    index.add_argument("--query-prefix", default="", help="text the model needs before a query")
    index.add_argument("--passage-prefix", default="", help="text the model needs before a passage")
    index.add_argument(
        "--stemmer",
        default="english",
        metavar="LANGUAGE",
        help="language of BM25's stemmer, or `none` (default: %(default)s)",
    )
    _add_private(index)
    index.set_defaults(handler=_index)

    query = subcommands.add_parser(
        "query", help="show the results of a query", description="Show the results of a query."
    )
    _add_index(query)
    query.add_argument("query", metavar="QUERY")
    query.add_argument("-k", type=int, default=3, help="number of passages (default: %(default)s)")
    query.add_argument("--json", action="store_true", help="print one JSON object per passage")
    query.set_defaults(handler=_query)

    serve = subcommands.add_parser(
        "serve",
        help="serve an index over HTTP",
        description="Serve an index with Search-R1's protocol, POST /retrieve. There is no "
        "authentication: make it reachable only from machines that you trust.",
    )
    _add_index(serve)
    serve.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    serve.add_argument(
        "--port", type=int, default=8000, help="0 picks a free port (default: %(default)s)"
    )
    serve.add_argument(
        "--topk",
        type=int,
        default=3,
        help="passages per query if a request does not set topk (default: %(default)s)",
    )
    serve.add_argument(
        "--threads", type=int, default=4, help="search threads (default: %(default)s)"
    )
    serve.set_defaults(handler=_serve)


def _add_index(command: argparse.ArgumentParser) -> None:
    command.add_argument("dir", type=Path, metavar="DIR", help="index directory")
    command.add_argument(
        "--retrieval",
        choices=["bm25", "dense", "hybrid"],
        help="(default: everything the index supports)",
    )
    _add_private(command)


def _add_private(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-private",
        action="store_true",
        help="allow an embedding server at a private address",
    )


def _index(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from agentrl.errors import ConfigError
    from agentrl_search.corpus import read_corpus
    from agentrl_search.index import add_to_index, build_index

    if not arguments.corpus.exists():
        raise ConfigError(f"corpus {arguments.corpus} does not exist")
    passages = read_corpus(arguments.corpus)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed:,} passages"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("index", total=None, rate="")

        def report(num_passages: int) -> None:
            speed = progress.tasks[0].speed
            progress.update(task, completed=num_passages, rate=f"{speed:,.0f}/s" if speed else "")

        if arguments.add:
            if arguments.model or arguments.retrieval != "bm25":
                raise ConfigError(
                    "--add uses the retrieval and model of the existing index; leave out "
                    "--retrieval and --model"
                )
            info = add_to_index(
                passages, arguments.out, allow_private=arguments.allow_private, progress=report
            )
        else:
            info = build_index(
                passages,
                arguments.out,
                retrieval=arguments.retrieval,
                stemmer=None if arguments.stemmer == "none" else arguments.stemmer,
                model=arguments.model,
                query_prefix=arguments.query_prefix,
                passage_prefix=arguments.passage_prefix,
                allow_private=arguments.allow_private,
                progress=report,
            )
    print(f"{arguments.out}: {info.num_passages:,} passages")
    return 0


def _query(arguments: argparse.Namespace) -> int:
    import json

    from agentrl.errors import ConfigError
    from agentrl_search.index import open_index

    if arguments.k < 1:
        raise ConfigError(f"-k is {arguments.k}; it has to be at least 1")
    retriever = open_index(
        arguments.dir, arguments.retrieval, allow_private=arguments.allow_private
    )
    for hit in retriever.search([arguments.query], arguments.k)[0]:
        passage = hit.passage
        if arguments.json:
            entry = {"id": passage.id, "title": passage.title, "text": passage.text}
            print(json.dumps(entry | {"score": hit.score}, ensure_ascii=False))
        else:
            print(f"{hit.score:.3f}  {passage.id}  {passage.title}\n{passage.text}\n")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from agentrl.env.server.serve import listen
    from agentrl_search.index import open_index
    from agentrl_search.server import serve

    retriever = open_index(
        arguments.dir, arguments.retrieval, allow_private=arguments.allow_private
    )
    listener = listen(arguments.host, arguments.port)
    name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    port = listener.getsockname()[1]
    print(f"serving {arguments.dir} at http://{name}:{port}/retrieve", flush=True)
    serve(retriever, listener, topk=arguments.topk, num_threads=arguments.threads)
    return 0
