"""Every causal family of the installed transformers: is the trainer exact on it, or does it refuse?

    OMP_NUM_THREADS=1 python benchmarks/model_families.py [FAMILY ...] [--part 1/2]

Each family is built small with random weights, once as it is and once for each threshold that its
configuration knows (windows, chunks, scales, chosen keys, rope types that follow the length of a
row), which is put at 40 tokens: beyond what the check at the start of a run looks at by itself,
within the rows here. Four things are asked of each case:

* causal: what follows a token does not change its log-prob.
* packed: log-probs of samples in one row, in both orders, equal those of the family's own forward
  pass over each sample alone.
* sampled: so do those that the embedded engine reports, from a padded batch and from one alone.
* Otherwise the family is refused with a ConfigError or an InferenceError. Anything else is WRONG,
  a crash included.

The reference is another instance of the model, loaded by transformers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import families as tiny
from samples_for_tests import sample_of

from agentrl.errors import ConfigError, InferenceError
from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded_sampling import (
    SampledTurn,
    SampleRequest,
    require_exact_cache,
    sample,
    share_weights,
)
from agentrl.model.load import auto_class, load_model, without_dropout
from agentrl.model.logprobs import packing_of, sample_logprobs
from agentrl.model.rows import pack
from agentrl.types import Sample

THRESHOLD = 40
LENGTHS = (70, 3, 44, 1, 25)
PROMPTS = (60, 3, 20)
NEW_TOKENS = 30
MAX_TOKENS = PROMPTS[0] + NEW_TOKENS
EXACT = 1e-4
"""In nats, the mean over a case's tokens. Random weights make log-probs of about -5."""
LARGEST = 12_000_000
"""Parameters of a model that counts as small."""
TIME_LIMIT_S = 120

MORE: dict[str, dict[str, Any]] = {
    "bert": dict(is_decoder=True),
    "dbrx": {},
    "deepseek_v4": dict(num_hidden_layers=4),
    "plbart": dict(encoder_attention_heads=4, decoder_attention_heads=4),
    "reformer": dict(is_decoder=True),
    "zamba": dict(num_hidden_layers=3, attn_layer_period=2, attn_layer_offset=1),
    "zaya": dict(num_experts_per_tok=1),
}
"""Of families that docs/models.md does not list: what makes them small."""


class Skipped(Exception):
    """A case that cannot be built."""


def config_of(model_type: str, changes: dict[str, Any]) -> PretrainedConfig:
    return tiny.tiny_config(model_type, **MORE.get(model_type, {}), **changes)


def build(model_type: str, changes: dict[str, Any], folder: Path) -> str:
    """Saves a tiny model of a family.

    Raises:
        Skipped: transformers does not build it, or it is not small.
    """
    try:
        config = config_of(model_type, changes)
        with torch.device("meta"):
            size = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
    except Exception as error:
        raise Skipped(f"not built ({type(error).__name__}: {first_line(error)})") from error
    if size > LARGEST:
        raise Skipped(f"not small ({size:,} parameters)")
    try:
        return tiny.save_tiny_model(folder, model_type, **MORE.get(model_type, {}), **changes)
    except Exception as error:
        raise Skipped(f"not built ({type(error).__name__}: {first_line(error)})") from error


def traps(model_type: str) -> dict[str, dict[str, Any]]:
    """Returns what to change in the configuration of a family, by the name of the case."""
    try:
        text = config_of(model_type, {}).get_text_config()
    except Exception:
        return {"plain": {}}
    found: dict[str, dict[str, Any]] = {"plain": {}}
    for name in ("sliding_window", "attention_window_size", "window_size", "keep_window_size"):
        if isinstance(getattr(text, name, None), int):
            found[name] = {name: THRESHOLD}
    if isinstance(getattr(text, "attention_chunk_size", None), int):
        found["attention_chunk_size"] = {"attention_chunk_size": THRESHOLD}
    if hasattr(text, "floor_scale"):
        tuned = {"floor_scale": THRESHOLD, "attn_temperature_tuning": True, "attn_scale": 0.5}
        found["floor_scale"] = tuned
    if isinstance(rates := getattr(text, "compress_rates", None), dict):
        found["compress_rates"] = {"compress_rates": {kind: 4 for kind in rates}}
    if hasattr(text, "index_topk"):
        found["index_topk"] = {"index_topk": THRESHOLD}
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and rope:
        found |= {name: {"rope_parameters": rope} for name in ("longrope", "dynamic")}
    return found


def with_rope(rope: dict[str, Any], name: str, angles: int) -> dict[str, Any]:
    """Returns a table of rope parameters, or one for each kind of layer, of another type."""
    if any(isinstance(part, dict) for part in rope.values()):
        return {
            key: with_rope(part, name, angles) if isinstance(part, dict) else part
            for key, part in rope.items()
        }
    new: dict[str, Any] = rope | {"rope_type": name, "factor": 4.0}
    if name == "longrope":
        rng = np.random.default_rng(0)
        new |= {
            "original_max_position_embeddings": THRESHOLD,
            "attention_factor": 1.1,
            "short_factor": rng.uniform(1, 1.5, angles).tolist(),
            "long_factor": rng.uniform(2, 8, angles).tolist(),
        }
    return new


def changes_of(model_type: str, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Raises:
    Skipped: the family has no angles of one number.
    """
    if "rope_parameters" not in changes:
        return changes
    with tempfile.TemporaryDirectory() as folder:
        path = build(model_type, {}, Path(folder))
        model = plain_model(path)
    sizes = {b.shape[-1] for n, b in model.named_buffers() if n.endswith("inv_freq")}
    if len(sizes) != 1:
        raise Skipped(f"has angles for {sorted(sizes)} pairs")
    rope = with_rope(changes["rope_parameters"], name, sizes.pop())
    limit = THRESHOLD if name == "dynamic" else 4 * MAX_TOKENS
    return {"rope_parameters": rope, "max_position_embeddings": limit}


def plain_model(path: str) -> PreTrainedModel:
    """Loads a model as transformers does, without any of the trainer's code but for dropout."""
    config = AutoConfig.from_pretrained(path)
    without_dropout(config)
    return (
        auto_class(config)
        .from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def long_factors_always(model: PreTrainedModel) -> None:
    """Makes the reference take longrope's long factors for short rows too, as vLLM does."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if not hasattr(module, "rope_type") or not getattr(config, "rope_parameters", None):
            continue
        module.config = copy.deepcopy(config)  # others read scales from the same table
        rope: dict[str, Any] = module.config.rope_parameters  # pyright: ignore
        for table in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            if "original_max_position_embeddings" in table:
                table["original_max_position_embeddings"] = 1


def own_logprobs(model: PreTrainedModel, ids: np.ndarray | list[int]) -> torch.Tensor:
    """Computes the log-probs of a row's tokens but the first by the family's own forward pass."""
    row = torch.from_numpy(np.asarray(ids, np.int64))[None]
    for module in model.modules():  # transformers fails where it finds its own long factors again
        for name in [n for n in vars(module) if n.endswith("_long_inv_freq")]:
            delattr(module, name)
    table = model(row, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return table.gather(1, row[0, 1:, None]).squeeze(1)


def make_samples() -> list[Sample]:
    """Makes samples of random tokens; those of more than 24 tokens begin with the same 20."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, 128, 20)
    samples = []
    for length in LENGTHS:
        ids = rng.integers(3, 128, length)
        if length > 24:
            ids[:20] = prefix
        samples.append(sample_of(ids, np.arange(length) > 0))
    return samples


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:160]


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours.float() - theirs).abs().mean().item()


@torch.no_grad()
def leak(model: PreTrainedModel) -> float:
    """Computes how much the second half of a row changes the log-probs of its first half."""
    row = make_samples()[0].token_ids
    other = row.copy()
    half = len(row) // 2
    other[half:] = other[half:][::-1]
    return (own_logprobs(model, row) - own_logprobs(model, other))[: half - 1].abs().max().item()


@torch.no_grad()
def packed(model: PreTrainedModel, plain: PreTrainedModel) -> float:
    """Computes the larger difference of two orders of the samples."""
    samples = make_samples()
    found = []
    for order in (samples, samples[::-1]):
        micro = pack(order, range(len(order)), share=packing_of(model) == 2)
        ours, _ = sample_logprobs(model, micro, temperature=1.0)
        rows = {index: own_logprobs(plain, each.token_ids) for index, each in enumerate(order)}
        expected = torch.empty_like(ours)
        for index, row in rows.items():
            expected[torch.from_numpy(micro.row_of == index)] = row
        found.append(difference(ours, expected))
    return max(found)


@torch.no_grad()
def sampled(twin: PreTrainedModel, plain: PreTrainedModel) -> float:
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=NEW_TOKENS)
    requests = [SampleRequest(str(n), rng.integers(3, 128, n).tolist(), sampling) for n in PROMPTS]
    found = []
    for batch in (requests, requests[:1]):
        for request, turn in zip(batch, sample(twin, batch, seed=1), strict=True):
            found.append(_of_turn(plain, request, turn))
    return max(found)


def _of_turn(plain: PreTrainedModel, request: SampleRequest, turn: SampledTurn) -> float:
    expected = own_logprobs(plain, request.prompt_ids + turn.token_ids)
    return difference(torch.tensor(turn.logprobs), expected[len(request.prompt_ids) - 1 :])


def verdict(found: float) -> str:
    return "exact" if found < EXACT else f"WRONG by {found:.2g}"


def try_case(model_type: str, name: str, changes: dict[str, Any]) -> tuple[str, str]:
    """Returns what came of packing and of sampling: exact, refused or WRONG, with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = build(model_type, changes_of(model_type, name, changes), Path(folder))
        except Skipped as error:
            return str(error), ""
        try:
            model = load_model(path, dtype=torch.float32, device="cpu", max_tokens=MAX_TOKENS)
            twin = share_weights(model)
        except ConfigError as error:
            return f"refused ({first_line(error)})", "refused"
        except Exception as error:
            return f"WRONG, crashes ({type(error).__name__}: {first_line(error)})", ""
        plain = plain_model(path)
    if name == "longrope":
        long_factors_always(plain)
    try:
        found = leak(plain)
    except Exception as error:
        return (
            f"not comparable (transformers' own: {type(error).__name__}: {first_line(error)})",
            "",
        )
    if found > EXACT:
        return f"WRONG, not causal (by {found:.2g})", ""
    try:
        way = ("one segment at a time", "packed", "shared")[packing_of(model)]
        of_rows = f"{verdict(packed(model, plain))}, {way}"
    except Exception as error:
        of_rows = f"WRONG, crashes ({type(error).__name__}: {first_line(error)})"
    try:
        require_exact_cache(twin, MAX_TOKENS)
        of_engine = verdict(sampled(twin, plain))
    except InferenceError as error:
        of_engine = f"refused ({first_line(error)})"
    except Exception as error:
        of_engine = f"WRONG, crashes ({type(error).__name__}: {first_line(error)})"
    return of_rows, of_engine


def table(model_types: list[str]) -> int:
    """Prints the table; returns how many families are wrong."""
    families: Counter[str] = Counter()
    cases = 0
    for model_type in model_types:
        rows: dict[str, tuple[str, str]] = {}
        for name, changes in traps(model_type).items():
            try:
                with at_most(TIME_LIMIT_S):
                    rows[name] = try_case(model_type, name, changes)
            except TimeoutError as error:
                rows[name] = (f"not finished ({error})", "")
            print(f"{model_type} | {name} | {' | '.join(rows[name])}", flush=True)
            if rows["plain"][0].startswith("not "):
                break
        texts = [text for row in rows.values() for text in row]
        cases += sum(not row[0].startswith(("not ", "has ")) for row in rows.values())
        if any(text.startswith("WRONG") for text in texts):
            families["WRONG"] += 1
        else:
            families[rows["plain"][0].replace(",", "").split(" (")[0].split(" ")[0]] += 1
    print(f"{cases} cases; families: {dict(families)}")
    return families["WRONG"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--part", default="1/1", help="the first of two parts is 1/2")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    every = list(dict.fromkeys([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *tiny.VISION]))
    part, parts = map(int, args.part.split("/"))
    chosen = args.families or every[part - 1 :: parts]
    sys.exit(bool(table(chosen)))


if __name__ == "__main__":
    main()
