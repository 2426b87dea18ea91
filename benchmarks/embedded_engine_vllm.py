"""vLLM's column of `embedded_engine.py`, which runs this file in vLLM's environment.

Reads a job as JSON from standard input: `model` (a folder), `prompts` (lists of lists of token
ids), `num_tokens` to sample for each, and `repeats`. Writes to the file that it is given, for each
list of prompts: `seconds` (the least CPU time of all repeats, with every thread of the process) and
`rows` of the last repeat (sampled ids and their log-probabilities).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# The engine in this very process, so that its CPU time is this process's.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ["VLLM_NO_USAGE_STATS"] = "1"

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.load(sys.stdin)
    longest = max(len(prompt) for prompts in job["prompts"] for prompt in prompts)
    llm = LLM(
        job["model"],
        dtype="float32",
        max_model_len=longest + job["num_tokens"],
        max_num_seqs=max(map(len, job["prompts"])),
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=job["num_tokens"], ignore_eos=True, logprobs=0, seed=None
    )
    done = []
    for prompts in job["prompts"]:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(requests[:2], sampling, use_tqdm=False)  # warm
        best, rows = float("inf"), []
        for _ in range(job["repeats"]):
            # Prompts are shared within a round, never with the one before: weights change between.
            llm.reset_prefix_cache()
            started = time.process_time()
            answers = llm.generate(requests, sampling, use_tqdm=False)
            best = min(best, time.process_time() - started)
            outputs = [answer.outputs[0] for answer in answers]
            rows = [
                (
                    list(output.token_ids),
                    [
                        step[token].logprob
                        for step, token in zip(output.logprobs, output.token_ids, strict=True)
                    ],
                )
                for output in outputs
            ]
        done.append({"seconds": best, "rows": rows})
    Path(sys.argv[1]).write_text(json.dumps(done))


if __name__ == "__main__":
    main()
