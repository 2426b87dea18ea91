"""`agentrl search ...`: builds, queries and serves an index. Commands import what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

Index = Annotated[Path, Parameter(help="Folder of the index.")]
Private = Annotated[bool, Parameter(help="Allow an embedding server at a private address.")]
Retrieval = Literal["bm25", "dense", "hybrid"]
Json = Annotated[bool, Parameter(name="--json", help="Print one JSON object per passage.")]
How = Annotated[
    Retrieval | None, Parameter(help="Retrieval to use; everything the index supports by default.")
]

app = App("search", help="Build, query and serve a search index.")


@app.command
def index(
    corpus: Path,
    /,
    *,
    out: Path,
    add: bool = False,
    retrieval: Retrieval = "bm25",
    model: str | None = None,
    query_prefix: str = "",
    passage_prefix: str = "",
    stemmer: str = "english",
    allow_private: Private = False,
) -> int:
    """Index a corpus.

    Indexes the passages of a .jsonl, .parquet, .txt, .md or SQuAD .json file, or of a folder of
    such files.

    Args:
        corpus: File or folder of passages.
        out: Folder for the index.
        add: Add to an existing index.
        retrieval: Retrieval that the index supports; dense and hybrid need --model.
        model: Embedding model: a sentence-transformers folder, or an embedding server as
            http://host:port/v1/embeddings#model-name.
        query_prefix: Text that the model needs before a query.
        passage_prefix: Text that the model needs before a passage.
        stemmer: Language of BM25's stemmer, or none.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from agentrl.errors import ConfigError
    from agentrl_search.corpus import read_corpus
    from agentrl_search.index import add_to_index, build_index

    if not corpus.exists():
        raise ConfigError(f"corpus {corpus} does not exist")
    passages = read_corpus(corpus)
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

        if add:
            if model or retrieval != "bm25":
                raise ConfigError(
                    "--add uses the retrieval and model of the existing index; leave out "
                    "--retrieval and --model"
                )
            info = add_to_index(passages, out, allow_private=allow_private, progress=report)
        else:
            info = build_index(
                passages,
                out,
                retrieval=retrieval,
                stemmer=None if stemmer == "none" else stemmer,
                model=model,
                query_prefix=query_prefix,
                passage_prefix=passage_prefix,
                allow_private=allow_private,
                progress=report,
            )
    print(f"{out}: {info.num_passages:,} passages")
    return 0


@app.command
def query(
    dir: Index,
    query: str,
    /,
    *,
    retrieval: How = None,
    k: Annotated[int, Parameter(name=["-k"])] = 3,
    json_: Json = False,
    allow_private: Private = False,
) -> int:
    """Show the results of a query.

    Args:
        query: Text to search for.
        k: Number of passages.
    """
    import json

    from agentrl.errors import ConfigError
    from agentrl_search.index import open_index

    if k < 1:
        raise ConfigError(f"-k is {k}; it has to be at least 1")
    retriever = open_index(dir, retrieval, allow_private=allow_private)
    for hit in retriever.search([query], k)[0]:
        passage = hit.passage
        if json_:
            entry = {"id": passage.id, "title": passage.title, "text": passage.text}
            print(json.dumps(entry | {"score": hit.score}, ensure_ascii=False))
        else:
            print(f"{hit.score:.3f}  {passage.id}  {passage.title}\n{passage.text}\n")
    return 0


@app.command
def serve(
    dir: Index,
    /,
    *,
    retrieval: How = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    topk: int = 3,
    threads: int = 4,
    allow_private: Private = False,
) -> int:
    """Serve an index over HTTP.

    Serves Search-R1's protocol, POST /retrieve. There is no authentication: make it reachable only
    from machines that you trust.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        topk: Passages per query if a request does not set topk.
        threads: Search threads.
    """
    from agentrl.env.server.serve import listen
    from agentrl_search.index import open_index
    from agentrl_search.server import serve as run_server

    retriever = open_index(dir, retrieval, allow_private=allow_private)
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    port = listener.getsockname()[1]
    print(f"serving {dir} at http://{name}:{port}/retrieve", flush=True)
    run_server(retriever, listener, topk=topk, num_threads=threads)
    return 0
