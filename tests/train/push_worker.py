"""A rank of `test_a_push_needs_memory_for_two_tensors`: peak memory of writing the weights.

python -m torch.distributed.run --nproc-per-node 2 push_worker.py FOLDER DTYPE
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config import ParallelSection
from agentrl.inference.weights.files import write_weights
from agentrl.model import ranks
from agentrl.model.sharding import shard
from agentrl.model.tensors import take_part


def kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
device = torch.device("cpu")
ranks.join(device, ParallelSection())
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=32768,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=10,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)
model = shard(Qwen3ForCausalLM(config), dtype=dtype, device=device)
largest = max(p.numel() for p in model.parameters()) * 4 / 1024
total = sum(p.numel() for p in model.parameters()) * 4 / 1024
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = kib("VmRSS")
if ranks.rank() == 0:
    write_weights(model, folder / "weights.safetensors")
else:
    take_part(model)
peaks = ranks.gather((kib("VmHWM") - before) / largest)
if ranks.rank() == 0:
    result = {"peaks": peaks, "model": total / largest}
    (folder / "peaks.json").write_text(json.dumps(result))
    print(result)
ranks.leave()
ranks.end_process(0)
