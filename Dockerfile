# SPDX-License-Identifier: Apache-2.0
# For NVIDIA GPUs: torch 2.13, vLLM 0.32, Python 3.12. No test builds this file.
# The CUDA libraries come with torch's wheels, so the host needs only a driver that is new enough for them and the
# NVIDIA container toolkit.
#
#     docker build -t easy-verl .
#     docker run --gpus all --ipc=host -it -v "$PWD":/workspace easy-verl
#
# `--ipc=host`: processes share decoded media and NCCL's buffers in /dev/shm, which containers limit to 64 MiB.
FROM python:3.12-slim

# Triton compiles kernels while the program runs.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/verl
COPY pyproject.toml setup.py README.md LICENSE ./
COPY verl verl
COPY examples examples
COPY scripts scripts
RUN pip install --no-cache-dir torch==2.13.0 torchvision==0.28.0 vllm==0.32.0 \
    && pip install --no-cache-dir --editable '.[gpu]'

CMD ["bash"]
