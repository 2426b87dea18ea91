#!/usr/bin/env bash
# package.sh DIR: what an index would serve, installed where nothing else is, with DIR for the
# environment. The quickstart's commands run from the wheel alone; the extras can be resolved.
set -euo pipefail
cd "$(dirname "$0")/.."
kept=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}
torch=${TORCH_VERSION:-2.13.0}
# [all] is installed below; the tests run in [dev].
extras=$("$python" -c '
import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
installed = extras["all"][0].partition("[")[2].rstrip("]").split(",")
print(*(set(extras) - {"all", "dev", *installed}))')

echo "== the wheel"
rm -rf build/dist
"$python" -m pip wheel --quiet --no-deps --wheel-dir build/dist .
wheel=$(ls "$PWD"/build/dist/agentrl_gym-*.whl)
echo "$wheel"

if [ ! -x "$kept/bin/python" ]; then
    "$python" -m venv "$kept"
    "$kept/bin/python" -m pip install --quiet --retries 0 --timeout 15 \
        --index-url https://download.pytorch.org/whl/cpu "torch==$torch" 2>/dev/null ||
        "$kept/bin/python" -m pip install --quiet "torch==$torch"
fi
"$kept/bin/python" -m pip install --quiet --force-reinstall --no-deps "$wheel"
"$kept/bin/python" -m pip install --quiet "$wheel[all]"
"$kept/bin/python" -m pip check

echo "== the quickstart from the wheel alone"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
export PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
agentrl=$kept/bin/agentrl
"$agentrl" --version
"$agentrl" examples
"$agentrl" train examples/quickstart/run.toml --run.num_steps 3 --quiet
"$agentrl" eval examples/quickstart/run.toml --checkpoint latest --eval.num_tasks 4 --json
"$agentrl" env list
"$agentrl" env check math
"$agentrl" env init my-env
"$agentrl" env check my-env/my_env/env.py:MyEnv
"$agentrl" train examples/quickstart/run.toml --env.id my-env/my_env/env.py:MyEnv --dry-run |
    tail -1
"$agentrl" view --report runs/quickstart
"$kept/bin/python" -c '
import agentrl, sys
assert "site-packages" in agentrl.__file__, agentrl.__file__
assert "torch" not in sys.modules
assert agentrl.__version__ != "unknown"
'

echo "== extras that [all] leaves out"
for extra in $extras; do
    "$kept/bin/python" -m pip install --quiet --dry-run "$wheel[$extra]" || {
        echo "agentrl-gym[$extra] cannot be installed"
        exit 1
    }
    echo "agentrl-gym[$extra]"
done
