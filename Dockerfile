# sdamd on Linux, in a container: with a Radeon (ENGINE=rocm) or on the CPU alone (ENGINE=cpu).
# compose.yaml has the flags that it is run with; to build it by hand:
#
#     docker build -t sdamd:rocm .
#     docker build -t sdamd:cpu --build-arg ENGINE=cpu .

ARG ENGINE=rocm

# AMD's image has Python and torch for ROCm in /opt/venv. A card that this torch has no kernels for
# needs HSA_OVERRIDE_GFX_VERSION, where there is a value for it: `doctor` says so.
FROM rocm/pytorch:rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.9.1 AS base-rocm

ENV VIRTUAL_ENV=/opt/venv
ENV PATH="${VIRTUAL_ENV}/bin:${PATH}"

# A torch without ROCm would compute on the CPU in silence. This asks for no GPU: there is none here.
RUN python -c "import torch; assert torch.version.hip, torch.__version__"

FROM python:3.12-slim-bookworm AS base-cpu

ENV VIRTUAL_ENV=/opt/venv
ENV PATH="${VIRTUAL_ENV}/bin:${PATH}"

# Empty: from where pip installs everything else.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN python -m venv "${VIRTUAL_ENV}" \
    && PIP_INDEX_URL="${TORCH_INDEX}" python -m pip install --no-cache-dir torch==2.13.0

# hadolint ignore=DL3006
FROM base-${ENGINE} AS sdamd

# The numbers of the person who will own the pictures: `id -u` and `id -g`.
ARG UID=1000
ARG GID=1000

RUN groupadd --non-unique --gid "${GID}" sdamd \
    && useradd --non-unique --uid "${UID}" --gid "${GID}" --create-home sdamd

WORKDIR /opt/sdamd
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY presets presets
COPY sdamd sdamd
COPY ui ui

# The torch that is there is pinned, so that no dependency brings another one.
RUN python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > torch.txt \
    && python -m pip install --no-cache-dir --constraint torch.txt .

# One folder of data, as outside of containers. Below cache/ lie the kernels that MIOpen compiles
# for the card, which take minutes to make again, and what Hugging Face's libraries keep.
ENV SDAMD_HOME=/data
ENV HF_HOME=${SDAMD_HOME}/cache/huggingface

RUN mkdir -p "${SDAMD_HOME}/models" "${SDAMD_HOME}/outputs" "${SDAMD_HOME}/cache" \
    && chown -R "${UID}:${GID}" "${SDAMD_HOME}"

VOLUME ["/data/models", "/data/outputs", "/data/cache"]

USER ${UID}:${GID}
WORKDIR /data
ENTRYPOINT ["python", "-P", "-m", "sdamd"]
CMD ["ui", "--no-browser"]
