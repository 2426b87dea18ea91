#!/usr/bin/env bash
# install.sh DIR PYTHON TORCH_VERSION: SGLang for a CPU into the virtual environment DIR, from the
# package index and without CUDA: x86-64, glibc 2.34 or newer, 1.75 GB.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
"$2" -m venv "$1"
pip() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"; }
pip "$1" --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "torch==$3" \
    2>/dev/null || pip "$1" "torch==$3"
pip "$1" "torch==$3" transformers==5.19.0 tokenizers==0.23.2 aiohttp fastapi 'uvicorn>=0.51' \
    uvloop orjson msgspec 'pyzmq>=25.1.2' psutil pybase64 pydantic python-multipart \
    prometheus-client setproctitle requests numpy scipy pillow einops interegular IPython \
    partial_json_parser packaging regex sentencepiece==0.2.1 tiktoken tqdm xxhash zstandard \
    watchfiles openai==2.8.0 openai-harmony==0.0.4 safetensors dill apache-tvm-ffi==0.1.11 \
    llguidance gguf ninja distro outlines==0.1.11 cloudpickle loguru
# Without what they ask for: CUDA's kernels, of which a CPU calls none.
pip "$1" --no-deps sglang==0.5.23 xgrammar==0.2.7 compressed-tensors==0.18.0 \
    sglang-router==0.3.2
packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/sglang_cpu_stubs.py" "$packages/"
echo 'import sglang_cpu_stubs' >"$packages/sglang_cpu_stubs.pth"
"$1/bin/python" -c 'import sglang.launch_server'
