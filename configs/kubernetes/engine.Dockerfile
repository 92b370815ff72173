# Engines, holders, and the trainers of recipes: docker build -f configs/kubernetes/engine.Dockerfile -t weightsync-engine:0.1.0 .
# requirements/vllm.txt is resolved for Python 3.12 and glibc 2.39 or newer, which Debian 13 has.
FROM python:3.12-slim-trixie
# Triton compiles with gcc, torch.compile with g++. NCCL loads libibverbs for RDMA. KubeRay's probes call wget.
RUN apt-get update && apt-get install -y --no-install-recommends g++ ibverbs-providers wget && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/weightsync
COPY pyproject.toml setup.py README.md LICENSE ./
COPY requirements requirements
COPY configs configs
COPY actors actors
COPY recipes recipes
COPY weightsync weightsync
RUN pip install --no-cache-dir ".[vllm,cuda13]" -c requirements/vllm.txt
WORKDIR /runs
# FlashInfer compiles its sampler with a CUDA toolkit, which the image lacks.
ENV VLLM_USE_FLASHINFER_SAMPLER=0
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
