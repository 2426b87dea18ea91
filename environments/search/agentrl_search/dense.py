"""Dense retrieval: one vector per passage in a memory-mapped file, searched exactly with numpy.

Vectors come from a local model directory in sentence-transformers' layout (loaded with transformers
alone) or from a server with OpenAI's embeddings API. They are scaled to length 1, so that scores
are cosine similarities.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from agentrl.errors import ConfigError, DataError, EnvError
from agentrl_search.outgoing import post_json

BATCH = 64
"""Texts per batch of the model."""
BLOCK = 65_536
"""Vectors scored at a time: 100 MB at 384 dimensions."""


class Encoder(Protocol):
    def encode(self, texts: list[str]) -> np.ndarray:
        """Returns (len(texts), dimension) float32 with rows of norm 1. Has to be thread-safe."""
        ...


def make_encoder(model: str, *, allow_private: bool = False) -> Encoder:
    """Makes an encoder.

    Args:
        model: a model directory, or a server as `http(s)://host/v1/embeddings#model-name`.
        allow_private: whether the server may have a private address.

    Raises:
        ConfigError: `model` is neither, its layout is not supported, or transformers is missing.
    """
    if model.startswith(("http://", "https://")):
        return ServerEncoder(model, allow_private=allow_private)
    return LocalEncoder(Path(model).expanduser())


class LocalEncoder:
    """A transformer with mean or first-token pooling, on a GPU if there is one, else on the CPU."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "config.json").is_file():
            raise ConfigError(
                f"embedding model {directory} is not a model directory (it has no config.json); "
                "give a sentence-transformers directory, or the URL of an embedding server"
            )
        self._pooling = _read_pooling(directory)
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                "a local embedding model needs transformers: pip install 'agentrl-gym[train]'"
            ) from error
        self._torch: Any = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model: Any = AutoModel.from_pretrained(directory, local_files_only=True)
        self._model = model.float().to(self._device).eval()
        self._max_tokens = _max_tokens(directory, self._model.config)
        # A fast tokenizer must not be used for padding by two threads at once.
        self._lock = threading.Lock()

    def encode(self, texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: list[np.ndarray | None] = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            encoded = self._encode([texts[index] for index in chosen])
            for index, vector in zip(chosen, encoded, strict=True):
                vectors[index] = vector
        return np.stack([vector for vector in vectors if vector is not None])

    def _encode(self, texts: list[str]) -> np.ndarray:
        torch = self._torch
        with self._lock, torch.inference_mode():
            inputs = self._tokenizer(
                texts,
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            ).to(self._device)
            states = self._model(**inputs).last_hidden_state  # (B, T, D)
            if self._pooling == "cls":
                pooled = states[:, 0]
            else:
                mask = inputs["attention_mask"][:, :, None].to(states.dtype)
                pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
            return torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()


class ServerEncoder:
    """An encoder that calls a server's OpenAI-compatible `POST /v1/embeddings`."""

    def __init__(self, url: str, *, allow_private: bool) -> None:
        self._url, _, self._name = url.partition("#")
        if not self._name:
            raise ConfigError(
                f"embedding server {url}: add # and the model's name, as in "
                "https://host/v1/embeddings#model-name"
            )
        self._allow_private = allow_private

    def encode(self, texts: list[str]) -> np.ndarray:
        blocks = [self._encode(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
        return np.concatenate(blocks)

    def _encode(self, texts: list[str]) -> np.ndarray:
        reply = post_json(
            self._url, {"model": self._name, "input": texts}, allow_private=self._allow_private
        )
        try:
            rows = sorted(reply["data"], key=lambda row: row["index"])
            vectors = np.asarray([row["embedding"] for row in rows], np.float32)
            if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
                raise ValueError(f"vectors of shape {vectors.shape} for {len(texts)} texts")
        except (KeyError, TypeError, ValueError) as error:
            raise EnvError(
                f"embedding server {self._url} sent no valid embeddings: {error!r}"
            ) from error
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


class DenseWriter:
    """Appends vectors to a file that already contains `num_passages`."""

    def __init__(
        self, path: Path, num_passages: int, dimension: int | None, encoder: Encoder, prefix: str
    ) -> None:
        """
        Args:
            dimension: of the vectors in the file; None if there are none yet.
            prefix: text the model needs before every passage.
        """
        self._encoder = encoder
        self._prefix = prefix
        self.dimension = dimension
        size = num_passages * 4 * (dimension or 0)
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(size)
        self._file.seek(size)

    def add(self, contents: list[str]) -> None:
        vectors = self._encoder.encode([self._prefix + text for text in contents])
        self.dimension = self.dimension or vectors.shape[1]
        if vectors.shape[1] != self.dimension:
            raise DataError(
                f"the encoder's vectors have dimension {vectors.shape[1]}, but those of the index "
                f"have {self.dimension}; use the model that the index was built with"
            )
        self._file.write(vectors.astype("<f4").tobytes())

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Dense:
    """Ranks passages by cosine similarity. Thread-safe."""

    def __init__(
        self, path: Path, num_passages: int, dimension: int, encoder: Encoder, prefix: str
    ) -> None:
        """
        Args:
            prefix: text the model needs before every query, such as `query: `.

        Raises:
            DataError: the file is missing or too short.
        """
        self._encoder = encoder
        self._prefix = prefix
        try:
            vectors = np.memmap(path, "<f4", "r")[: num_passages * dimension]
            self._vectors = vectors.reshape(num_passages, dimension)
        except (OSError, ValueError) as error:
            raise DataError(f"vectors {path} are damaged ({error}); rebuild the index") from error

    def rank(self, queries: list[str], k: int) -> list[list[tuple[int, float]]]:
        """Returns, per query, `(row, cosine)` of the k nearest passages, best first."""
        if not queries:
            return []
        encoded = self._encoder.encode([self._prefix + query for query in queries])  # (Q, D)
        best_scores = np.empty((len(queries), 0), np.float32)
        best_rows = np.empty((len(queries), 0), np.int64)
        for start in range(0, len(self._vectors), BLOCK):
            scores = encoded @ self._vectors[start : start + BLOCK].T  # (Q, block)
            rows = np.broadcast_to(np.arange(start, start + scores.shape[1]), scores.shape)
            best_scores = np.concatenate((best_scores, scores), axis=1)
            best_rows = np.concatenate((best_rows, rows), axis=1)
            if best_scores.shape[1] > k:
                chosen = np.argpartition(-best_scores, k - 1, axis=1)[:, :k]
                best_scores = np.take_along_axis(best_scores, chosen, axis=1)
                best_rows = np.take_along_axis(best_rows, chosen, axis=1)
        return [
            sorted(
                zip(rows.tolist(), scores.tolist(), strict=True), key=lambda hit: (-hit[1], hit[0])
            )
            for rows, scores in zip(best_rows, best_scores, strict=True)
        ]


def _read_pooling(directory: Path) -> str:
    """Returns `mean` or `cls` according to sentence-transformers' files; `mean` without them."""
    modules = directory / "modules.json"
    if not modules.is_file():
        return "mean"
    pooling = "mean"
    for module in orjson.loads(modules.read_bytes()):
        kind = module["type"].rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(
                f"embedding model {directory} has an unsupported layer '{kind}'; run the model in "
                "an embedding server and give its URL"
            )
        if kind == "Pooling":
            config = orjson.loads((directory / module["path"] / "config.json").read_bytes())
            modes = {
                name.removeprefix("pooling_mode_")
                for name, on in config.items()
                if name.startswith("pooling_mode_") and on is True
            } or {config.get("pooling_mode", "mean_tokens")}
            known = {"mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
            if len(modes) != 1 or not modes <= set(known):
                raise ConfigError(
                    f"embedding model {directory} uses the pooling {', '.join(sorted(modes))}, but "
                    "only mean and cls are supported; run the model in an embedding server and "
                    "give its URL"
                )
            pooling = known[modes.pop()]
    return pooling


def _max_tokens(directory: Path, config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", 512)
    settings = directory / "sentence_bert_config.json"
    if settings.is_file():
        limit = min(limit, orjson.loads(settings.read_bytes()).get("max_seq_length") or limit)
    return limit
