"""Tiny random models of the decoder families that transformers builds."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from agentrl.model.attention import ATTENTION_NAME, SHARED_ATTENTION_NAME
from agentrl.model.load import load_model
from agentrl.model.logprobs import decoder_of

# Those a family's configuration knows; small, and with as many kinds of layers as it has.
SHAPE = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    # older names
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=128,
    d_model=32,
    # mixtures of experts
    moe_intermediate_size=16,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    # windows and chunks shorter than the segments of a test
    sliding_window=5,
    attention_chunk_size=5,
    # gated delta layers
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
# vLLM's kernels for CPUs take no smaller heads.
WIDE = dict(
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=64,
    head_dim=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    mamba_d_ssm=256,
    mamba_d_head=64,
    mamba_head_dim=64,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
MLA = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
)
MAMBA2 = dict(
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_n_groups=1,
    mamba_d_state=8,
    mamba_chunk_size=4,
    mamba_num_heads=4,
    mamba_head_dim=16,
    n_groups=1,
    ssm_state_size=8,
    chunk_size=4,
)
SLIDING = dict(layer_types=["sliding_attention", "full_attention"])
FAMILIES: dict[str, dict] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "axk1": MLA | dict(head_dim=4),
    "axk2": MLA,
    "bamba": MAMBA2 | dict(attn_layer_indices=[1]),
    "bitnet": {},
    "bloom": {},
    "codegen": dict(rotary_dim=4),
    "cohere": {},
    "cohere2": dict(
        num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"]
    ),
    "cohere2_moe": SLIDING,
    "cwm": SLIDING,
    "deepseek_v2": MLA,
    "deepseek_v3": MLA | dict(head_dim=4),
    "deepseek_v32": MLA | dict(index_topk=4, index_n_heads=2, index_head_dim=8),
    "diffllama": {},
    "doge": {},
    "dots1": dict(n_shared_experts=1),
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": SLIDING,
    "exaone_moe": SLIDING,
    "falcon": dict(num_kv_heads=2, new_decoder_architecture=True),
    "falcon_h1": MAMBA2 | dict(mamba_d_ssm=64, lm_head_multiplier=0.5),
    "falcon_mamba": dict(state_size=8),
    "flex_olmo": {},
    "gemma": {},
    "gemma2": SLIDING | dict(attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma3_text": SLIDING,
    "gemma3n_text": SLIDING
    | dict(
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=0,
        intermediate_size=[48] * 2,
        activation_sparsity_pattern=[0.0] * 2,
    ),
    "gemma4_text": SLIDING
    | dict(
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
        global_head_dim=16,
        enable_moe_block=True,
        top_k_experts=2,
        num_kv_shared_layers=0,
    ),
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": MLA | dict(first_k_dense_replace=1),
    "glm_moe_dsa": MLA | dict(index_topk=4, index_n_heads=2, index_head_dim=8),
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": dict(
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
        num_hidden_layers=2,
    ),
    "gpt_neox": {},
    "gpt_oss": SLIDING,
    "gptj": dict(rotary_dim=4),
    "granite": dict(logits_scaling=8.0),
    "granite_swa": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": MAMBA2
    | dict(shared_intermediate_size=16, layer_types=["mamba", "attention"]),
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": {},
    "jais2": {},
    "jamba": dict(mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1),
    "jetmoe": {},
    "kimi_linear": MLA
    | dict(
        linear_head_dim=8,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "laguna": {},
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "llama": {},
    "llama4_text": dict(layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0]),
    "longcat_flash": MLA
    | dict(
        head_dim=4,
        num_layers=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        moe_topk=2,
        zero_expert_num=2,
    ),
    "mamba": dict(state_size=8),
    "mamba2": dict(state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=4),
    "mellum": SLIDING,
    "mimo_v2_flash": SLIDING,
    "minicpm3": MLA | dict(dim_model_base=16, scale_emb=2),
    "minimax": dict(layer_types=["linear_attention", "full_attention"], block_size=4),
    "minimax_m2": {},
    "ministral": SLIDING,
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": MAMBA2
    | dict(
        moe_shared_expert_intermediate_size=16,
        layers_block_type=["mamba", "attention", "moe", "mlp"],
    ),
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmo_hybrid": {},
    "olmoe": {},
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": dict(shared_expert_intermediate_size=16),
    "qwen3": {},
    "qwen3_5_text": dict(layer_types=["linear_attention", "full_attention"]),
    "qwen3_5_moe_text": dict(
        layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=16
    ),
    "qwen3_moe": {},
    "qwen3_next": dict(
        layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=16
    ),
    "recurrent_gemma": dict(attention_window_size=5, lru_width=32),
    "seed_oss": dict(attention_dropout=0.1),
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": SLIDING | dict(attn_logit_softcapping=2.0, final_logit_softcapping=1.0),
    "xglm": dict(attention_heads=4, num_layers=2, ffn_dim=48),
    "youtu": MLA | dict(head_dim=4, pad_token_id=None),
    "zamba2": dict(
        layers_block_type=["mamba", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=4,
        chunk_size=4,
        adapter_rank=4,
        num_key_value_heads=4,
        attention_head_dim=16,
    ),
}


# Checkpoints with a vision tower: their text model, and how the tower is made small.
VISION: dict[str, tuple[str, dict]] = {
    "gemma3": ("gemma3_text", {}),
    "gemma4": ("gemma4_text", {}),
    "llama4": ("llama4_text", dict(vision_output_dim=32)),
    "mistral3": ("mistral", {}),
    "qwen3_5": ("qwen3_5_text", dict(depth=1, out_hidden_size=32)),
    "qwen3_5_moe": ("qwen3_5_moe_text", dict(depth=1, out_hidden_size=32)),
    "qwen3_vl": ("qwen3_vl_text", dict(depth=1, out_hidden_size=32, deepstack_visual_indexes=[])),
}
TOWER = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_heads=2,
    head_dim=16,
    image_size=28,
    patch_size=14,
    position_embedding_size=16,
    num_position_embeddings=16,
    projector_input_dim=32,
    projector_output_dim=32,
)


def tiny_config(model_type: str, **changes) -> PretrainedConfig:
    if model_type in VISION:
        text, tower = VISION[model_type]
        default = AutoConfig.for_model(model_type)
        known = (default.vision_config or default.sub_configs["vision_config"]()).to_dict()
        tower = {name: value for name, value in TOWER.items() if name in known} | tower
        text_config = tiny_config(text, **changes).to_dict()
        return AutoConfig.for_model(model_type, text_config=text_config, vision_config=tower)
    default = AutoConfig.for_model(model_type)
    known = set(default.to_dict()) | set(default.attribute_map)
    shape = {**SHAPE, **FAMILIES.get(model_type, {}), **changes}
    own = FAMILIES.get(model_type, {})
    shape = {name: value for name, value in shape.items() if name in known or name in own}
    return AutoConfig.for_model(model_type, **shape)


def tiny_model(model_type: str, **changes) -> PreTrainedModel:
    """With random weights, large enough for every part of a layer to matter."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **changes)
    auto = AutoModelForImageTextToText if model_type in VISION else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.5 if parameter.shape[0] == 128 else 0.1)
            elif "norm" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save_tiny_model(directory: Path, model_type: str, *, wide: bool = False, **changes) -> str:
    """A directory as `agentrl.model.load.load_model` wants it, with a chat template."""
    model = tiny_model(model_type, **(WIDE if wide else {}), **changes)
    model.save_pretrained(directory)
    words = {f"w{index}": index for index in range(128)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return str(directory)


NAMED = [
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma2", "gemma3", "gemma4", "gpt_oss", "olmo3"),
    *("mistral", "cohere2", "exaone4", "llama4", "granitemoehybrid", "nemotron_h", "falcon_h1"),
    *("bamba", "jamba", "minimax", "kimi_linear", "glm4_moe_lite", "seed_oss"),
]
"""What must be among them, whatever else changes."""

NOT_SAMPLED = ["deepseek_v32", "falcon_mamba", "glm_moe_dsa", "mamba", "minimax", "recurrent_gemma"]
"""Not exact with transformers' caches, so not sampled from in the trainer's process."""

SERVED = [
    *(
        "exaone4",
        "falcon_h1",
        "gemma3_text",
        "granite",
        "granitemoehybrid",
        "mistral",
        "mixtral",
        "olmo3",
    ),
    *("qwen3", "qwen3_moe", "qwen3_next", "seed_oss"),
]
"""Served by vLLM's CPU build, updated once and equal to the trainer after."""

IN_BFLOAT16 = ["qwen3_next"]
"""vLLM's CPU kernels for their layers take nothing else."""

_NO_TORCHVISION = "its class needs torchvision, which that build leaves out"
NOT_SERVED = {
    "bamba": "its layers are not known to vLLM's fall-back on transformers",
    "cohere2": "log-probs differ by 0.09",
    "gemma2": "log-probs differ by 1.4 with small soft caps",
    "gemma4": _NO_TORCHVISION,
    "glm4_moe_lite": "served, but the update is refused: a tensor cannot be checked",
    "gpt_oss": "served, but the update is refused: its loader bypasses the check of the file",
    "deepseek_v3": "its MLA takes no small heads",
    "jamba": "served, but the build has no selective scan",
    "kimi_linear": "wants prefix caching off",
    "lfm2": "wants a conv_dim, which transformers no longer writes",
    "llama4": _NO_TORCHVISION,
    "minimax_m2": "wants a rotary_dim, which transformers no longer writes",
    "nemotron_h": "its experts have no kernel for CPUs",
    "qwen3_5": _NO_TORCHVISION,
}
"""Tried with vLLM's CPU build, and what came of it."""

SPOKEN = {
    "hermes": "granitemoehybrid qwen2 qwen3 qwen3_moe qwen3_next smollm3",
    "qwen_xml": "nemotron_h qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next",
    "llama_json": "llama",
    "pythonic": "llama llama4 llama4_text",
    "mistral": "ministral ministral3 mistral mistral3 mixtral",
    "gemma4": "gemma4 gemma4_text",
    "harmony": "gpt_oss",
    "glm4": "glm4_moe glm4_moe_lite glm_moe_dsa",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "minimax_m2": "minimax_m2",
    "phi4": "phi3",
    "olmo3": "olmo3",
    "lfm2": "lfm2 lfm2_moe",
    "granite3": "granite granitemoe",
    "seed_oss": "seed_oss",
    "apertus": "apertus",
    "cohere": "cohere2",
    "command_r": "cohere",
    "longcat": "longcat_flash",
    "jamba": "jamba",
    "functiongemma": "gemma3_text",
    "nemotron_v2": "nemotron_h",
}
"""The dialects that published models of a `model_type` speak; their chat templates decide."""

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MARK = (
    "<!-- below: written by `python tests/families.py`, proved by tests/train/test_families.py -->"
)


def _traits(config: PretrainedConfig) -> list[str]:
    """Lists a family's features beyond plain attention, read from its configuration."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    found = {
        "sliding windows": "sliding_attention" in kinds
        or (not kinds and getattr(text, "sliding_window", None) is not None),
        "chunks": "chunked_attention" in kinds,
        "recurrent layers": bool(kinds & {"linear_attention", "mamba", "conv", "hybrid"}),
        "MLA": hasattr(text, "kv_lora_rank"),
        "soft caps": bool(getattr(text, "attn_logit_softcapping", None)),
        "experts": any(getattr(text, name, None) for name in ("num_experts", "num_local_experts"))
        or bool(getattr(text, "n_routed_experts", None)),
        "vision tower, frozen": text is not config,
    }
    return [name for name, has in found.items() if has]


def rows_of(model: PreTrainedModel) -> str:
    """Returns how a loaded model is run, as chosen for its family."""
    implementation = decoder_of(model).config._attn_implementation
    ways = {SHARED_ATTENTION_NAME: "packed, sharing", ATTENTION_NAME: "packed"}
    return ways.get(implementation, "one segment at a time")


def row_of(model_type: str, rows: str) -> str:
    served = "not tried"
    if model_type in SERVED:
        served = "yes, in bfloat16" if model_type in IN_BFLOAT16 else "yes"
    elif model_type in NOT_SERVED:
        served = f"no: {NOT_SERVED[model_type]}"
    cells = [
        f"`{model_type}`",
        rows,
        "no" if model_type in NOT_SAMPLED else "yes",
        served,
        ", ".join(f"`{name}`" for name, types in SPOKEN.items() if model_type in types.split()),
        ", ".join(_traits(tiny_config(model_type))),
    ]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """docs/models.md with its table made again; what stands above the mark is kept, and so is how
    the families' rows are computed."""
    above, _, below = PAGE.read_text().partition(MARK)
    rows = {
        line.split("`")[1]: line.split("|")[2].strip() for line in below.splitlines() if "`" in line
    }
    head = ["`model_type`", "rows", "embedded engine", "vLLM's CPU build", "dialect", "has"]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|---|"]
    lines += [row_of(name, rows.get(name, "packed")) for name in sorted([*FAMILIES, *VISION])]
    return above + MARK + "\n\n" + "\n".join(lines) + "\n"


def _measure_and_write() -> None:
    """Prove every family again and write the page; the test compares each with its row."""
    rows = {}
    for name in [*FAMILIES, *VISION]:
        with tempfile.TemporaryDirectory() as directory:
            path = save_tiny_model(Path(directory), name)
            model = load_model(path, dtype=torch.float32, device="cpu")
        rows[name] = row_of(name, rows_of(model))
    above, _, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(above + MARK + "\n\n" + "\n".join(rows.values()) + "\n")
    PAGE.write_text(page())


if __name__ == "__main__":
    _measure_and_write()
