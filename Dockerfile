# syntax=docker/dockerfile:1
# The environment of `burst` on GPU machines: one image, every version pinned. Not built by anybody yet.
#   docker build --build-arg BURST_COMMIT=$(git rev-parse HEAD) --tag burst .
#   docker run --rm --gpus all --shm-size 8g burst doctor

# CUDA's libraries come with torch's wheels; the base says which driver the image needs. Another CUDA 13 image will do.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${CUDA_IMAGE}

# Triton and FlashAttention-4 build their kernels' launchers when first called, which takes a C compiler and headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /opt/burst
ENV PATH=/opt/burst/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# pyproject.toml says what is needed and which versions will do; these are the ones taken.
COPY <<PINS /opt/burst/pins.txt
flash-attn-4==4.0.0b36
jinja2==3.1.6
matplotlib==3.11.2
numpy==2.4.6
nvidia-cutlass-dsl==4.8.1
nvidia-ml-py==13.615.71
pandas==3.1.1
paramiko==5.1.0
pyyaml==6.0.3
quack-kernels==0.6.5
ray==2.60.0
rich==15.0.0
torch==2.13.0
PINS

# torch is most of the image and changes least, so it has a layer of its own.
RUN pip install --constraint /opt/burst/pins.txt torch
WORKDIR /burst
COPY . .
RUN pip install --constraint /opt/burst/pins.txt --editable '.[gpu]' \
    && python -m compileall -q engine baselines cluster harness \
    && useradd --create-home --uid 10001 burst \
    && install --directory --owner burst results/runs

# The commit records name: an image has no git history.
ARG BURST_COMMIT=
ENV BURST_COMMIT=${BURST_COMMIT}

USER burst
ENTRYPOINT ["burst"]
CMD ["doctor"]
