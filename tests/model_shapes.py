"""Published shapes of the models that run files name: all that counting memory needs of them.

No file of a model can be downloaded in tests. These are the numbers of each one's config.json; a
test compares the parameters that they make with what its model card says.
"""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

_QWEN2 = dict(model_type="qwen2", vocab_size=151936, tie_word_embeddings=True)
_QWEN3 = dict(model_type="qwen3", vocab_size=151936, head_dim=128, num_key_value_heads=8)

SHAPES: dict[str, dict] = {
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2
    | dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
    ),
    "Qwen/Qwen2.5-3B": _QWEN2
    | dict(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
    ),
    "Qwen/Qwen3-1.7B": _QWEN3
    | dict(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-4B": _QWEN3
    | dict(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-8B": _QWEN3
    | dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": dict(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
}

PARAMETERS = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54e9,
    "Qwen/Qwen2.5-3B": 3.09e9,
    "Qwen/Qwen3-1.7B": 1.7e9,
    "Qwen/Qwen3-4B": 4.0e9,
    "Qwen/Qwen3-8B": 8.2e9,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30.5e9,
}
"""As the model cards give them."""


def config_of(name: str) -> PretrainedConfig:
    shape = dict(SHAPES[name])
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def save_config(name: str, folder: Path) -> str:
    """A folder with the model's config.json and no weights."""
    config_of(name).save_pretrained(folder)
    return str(folder)
