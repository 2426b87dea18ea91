# Trainer image. CPU by default:
#     docker build -t agentrl .
# For GPUs take a CUDA base and the default torch build:
#     docker build --build-arg BASE_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#                  --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t agentrl:cuda .
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS build
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv --help >/dev/null 2>&1 \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/agentrl
ENV PATH=/opt/agentrl/bin:${PATH} PIP_NO_CACHE_DIR=1
RUN pip install --extra-index-url ${TORCH_INDEX} torch==${TORCH_VERSION}
WORKDIR /src
COPY pyproject.toml README.md ./
COPY agentrl agentrl
COPY environments environments
COPY rewards rewards
RUN pip install '.[all]'

FROM ${BASE_IMAGE}
RUN command -v python3 >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 \
        && rm -rf /var/lib/apt/lists/*)
RUN useradd --uid 10001 --create-home agentrl
COPY --from=build /opt/agentrl /opt/agentrl
ENV PATH=/opt/agentrl/bin:${PATH} PYTHONUNBUFFERED=1
COPY --chown=agentrl examples /home/agentrl/examples
USER agentrl
WORKDIR /home/agentrl
ENTRYPOINT ["agentrl"]
CMD ["--help"]
