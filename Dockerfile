# Trainer image. Build from the repository's root; CPU by default:
#
#   docker build -t agentrl .
#   docker run --rm --init -v agentrl-runs:/home/agentrl/runs agentrl \
#     train examples/quickstart/run.toml
#
# For GPUs take a CUDA base and the torch build that goes with it; run with `--gpus all`:
#
#   docker build --build-arg BASE_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t agentrl:cuda .
#
# BASE_IMAGE may be any Debian-like image; python3 (3.11 or newer) is installed where it is missing.
# Behind a private certificate authority or package index, use a base image that holds the bundle
# and pass --build-arg PIP_CERT=/path/in/the/image, PIP_INDEX_URL and TORCH_INDEX.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS build
ARG PIP_CERT
ARG PIP_INDEX_URL
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -c "import ensurepip, venv" 2>/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/agentrl
# --index-url: from the default index, torch would be the CUDA build, some gigabytes larger.
RUN /opt/agentrl/bin/pip install --no-cache-dir --disable-pip-version-check \
        --index-url "${TORCH_INDEX}" "torch==${TORCH_VERSION}"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY agentrl agentrl
COPY environments environments
COPY rewards rewards
RUN /opt/agentrl/bin/pip install --no-cache-dir --disable-pip-version-check '.[all]'

FROM ${BASE_IMAGE}
RUN command -v python3 >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 \
        && rm -rf /var/lib/apt/lists/*)
# A volume that is mounted on runs is then the user's own.
RUN useradd --uid 10001 --create-home agentrl \
    && install --directory --owner agentrl --group agentrl /home/agentrl/runs
COPY --from=build /opt/agentrl /opt/agentrl
ENV PATH=/opt/agentrl/bin:${PATH} \
    PYTHONUNBUFFERED=1
COPY --chown=agentrl examples /home/agentrl/examples
USER agentrl
WORKDIR /home/agentrl
ENTRYPOINT ["agentrl"]
CMD ["--help"]
